import gc
import subprocess
import sys
from hashlib import sha256
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from model_store.artifacts.manifest import EncoderSpec, FileSpec
from model_store.inference.encoder import Encoder, encoder_bytes, shared_encoder
from model_store.inference.graphs import GraphError
from model_store.inference.runtime import run_graph

WIDTH = 3


def graph(operator="MatMul", inputs="x", outputs="encoded", size=4):
    weights = np.arange(size * WIDTH, dtype=np.float32).reshape(size, WIDTH)
    nodes = [helper.make_node(operator, [inputs, "w"], [outputs])]
    proto = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info(inputs, TensorProto.FLOAT, ["rows", size])],
        [helper.make_tensor_value_info(outputs, TensorProto.FLOAT, ["rows", WIDTH])],
        [numpy_helper.from_array(weights, "w")],
    )
    return helper.make_model(proto, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def write_model(folder, model):
    path = folder / "encoder.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def spec(rows_at_once=1, outputs=WIDTH):
    return EncoderSpec(outputs=outputs, rows_at_once=rows_at_once)


@pytest.fixture
def runs(monkeypatch):
    calls = []

    def run(session, outputs, values):
        threads = session.get_session_options().intra_op_num_threads
        calls.append((len(values["x"]), threads))
        return run_graph(session, outputs, values)

    monkeypatch.setattr("model_store.inference.encoder.run_graph", run)
    return calls


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows_at_once", [1, 3, 8])
def test_rows_are_encoded_in_order_in_limited_batches(tmp_path, runs, rows_at_once, threads):
    encoder = Encoder(write_model(tmp_path, graph()).read_bytes(), spec(rows_at_once), 4, threads)
    x = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    runs.clear()
    np.testing.assert_allclose(
        encoder(x), x @ np.arange(12, dtype=np.float32).reshape(4, 3), rtol=1e-5
    )
    sizes = [rows for rows, _ in runs]
    assert max(sizes) == min(rows_at_once, 7)
    assert sum(sizes) == 7
    assert encoder.row_s > 0


@pytest.mark.parametrize(
    ("max_bytes", "num_threads"), [(1 << 20, 1), (0, 3)], ids=["small", "large"]
)
def test_only_small_encoders_run_row_blocks_in_parallel(
    tmp_path, runs, monkeypatch, max_bytes, num_threads
):
    monkeypatch.setattr("model_store.inference.encoder.MAX_ROW_SESSION_BYTES", max_bytes)
    path = write_model(tmp_path, graph(size=1000))
    encoder, size = Encoder(path.read_bytes(), spec(2), 1000, threads=3), path.stat().st_size
    x = np.random.default_rng(0).normal(size=(9, 1000)).astype(np.float32)
    runs.clear()
    expected = np.concatenate([encoder(x[n : n + 2]) for n in range(0, 9, 2)])
    assert {threads for _, threads in runs} == {3}
    runs.clear()
    assert np.array_equal(encoder(x), expected)  # bit for bit
    assert {threads for _, threads in runs} == {num_threads}
    copies = 4 if num_threads == 1 else 3
    assert encoder_bytes(FileSpec(sha256="a" * 64, size=size)) == copies * size


def test_row_time_is_that_of_the_fastest_run(tmp_path, monkeypatch):
    clock = iter([0.0, 0.004, 1.0, 1.002, 2.0, 2.03, 3.0, 3.2])
    encoder = Encoder(write_model(tmp_path, graph()).read_bytes(), spec(), 4)
    monkeypatch.setattr("model_store.inference.encoder.time.perf_counter", lambda: next(clock))
    smallest = encoder._time_row(np.zeros((1, 4), dtype=np.float32))
    assert smallest == pytest.approx(0.002)
    assert not list(clock)  # timing stops after 0.1 s


@pytest.mark.parametrize("content", [b"", b"no model", b"\x3a\xff\xff\xff\xff\x7f", b"\x0f" * 50])
def test_invalid_model_file_is_refused(tmp_path, content):
    path = tmp_path / "encoder.onnx"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=r"^encoder\.onnx: "):
        Encoder(path.read_bytes(), spec(), 4)


@pytest.mark.parametrize(
    ("model", "encoder_spec", "message"),
    [
        (graph(inputs="rows"), spec(), r"expected inputs \['x'\] and outputs \['encoded'\]"),
        (graph(), spec(outputs=5), "expected 5 float32 numbers per row"),
        (graph(size=6), spec(), "it does not run on rows of 4 numbers"),
        (
            graph("RandomNormalLike"),
            spec(),
            "expected supported operators, got RandomNormalLike",
        ),
    ],
)
def test_graph_that_does_not_match_the_encoder_is_refused(tmp_path, model, encoder_spec, message):
    with pytest.raises(GraphError, match=message):
        Encoder(write_model(tmp_path, model).read_bytes(), encoder_spec, 4)


def test_external_weights_are_refused(tmp_path):
    path = tmp_path / "encoder.onnx"
    onnx.save_model(graph(size=1000), path, save_as_external_data=True, location="weights.bin")
    with pytest.raises(GraphError, match="got weights in another file"):
        Encoder(path.read_bytes(), spec(), 1000)


def test_encoders_with_same_content_share_memory(tmp_path):
    path = write_model(tmp_path, graph())
    content = path.read_bytes()
    file = FileSpec(sha256=sha256(content).hexdigest(), size=len(content))
    encoder = shared_encoder(path, file, spec(), 4)
    assert shared_encoder(tmp_path / "moved", file, spec(), 4) is encoder
    assert shared_encoder(path, file, spec(2), 4) is not encoder
    del encoder
    gc.collect()
    with pytest.raises(GraphError):  # no longer cached, so the file is read
        shared_encoder(tmp_path / "moved", file, spec(), 4)


def test_file_swapped_after_verification_is_refused(tmp_path):
    path = write_model(tmp_path, graph())
    content = path.read_bytes()
    file = FileSpec(sha256=sha256(content).hexdigest(), size=len(content))
    write_model(tmp_path, graph(size=5))
    with pytest.raises(GraphError, match=r"as in the manifest|SHA-256"):
        shared_encoder(path, file, spec(), 4)


MEASURE = """
import sys
from pathlib import Path
from model_store.artifacts.manifest import EncoderSpec
from model_store.inference.encoder import Encoder

def peak_bytes():
    return next(1024 * int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))

before = peak_bytes()
encoder = Encoder(Path(sys.argv[1]).read_bytes(), EncoderSpec(outputs=2048, rows_at_once=1), 2048)
print(peak_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_loading_large_encoder_takes_up_to_three_times_its_size(tmp_path):
    weights = np.random.default_rng(0).normal(size=(25, 2048, 2048)).astype(np.float32) / 45
    names = ["x", *(f"h{i}" for i in range(24)), "encoded"]
    nodes = [
        helper.make_node("MatMul", [a, f"w{i}"], [b]) for i, (a, b) in enumerate(pairwise(names))
    ]
    proto = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 2048])],
        [helper.make_tensor_value_info("encoded", TensorProto.FLOAT, ["rows", 2048])],
        [numpy_helper.from_array(layer, f"w{i}") for i, layer in enumerate(weights)],
    )
    path = write_model(
        tmp_path,
        helper.make_model(proto, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]),
    )
    size = path.stat().st_size
    assert size > 400e6
    completed = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    assert int(completed.stdout) < 3.1 * size
