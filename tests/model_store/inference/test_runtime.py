import dataclasses

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact
from model_store.inference import runtime as runtimes
from model_store.inference.graphs import OPERATORS, GraphError
from model_store.inference.model import Model
from model_store.inference.noise import standard_normal
from model_store.inference.runtime import CHUNK_ROWS, CUDA, PROCESSORS, DrawSet, Runtime, run_graph

INPUTS, CLASSES, NOISE = 3, 4, 5
MATRIX = np.random.default_rng(0).normal(size=(NOISE, CLASSES)).astype(np.float32)
SHIFT = np.arange(CLASSES, dtype=np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(INPUTS, CLASSES)).astype(np.float32)


@pytest.fixture(scope="module")
def model(digits_store):
    return Model.load(ModelStore(digits_store).open("digits", "1"))


@pytest.fixture(scope="module")
def reference_run(model, digits_rows):
    theta = model.runtime.draw(3, 0, 130)
    return digits_rows[:40], theta, *model.runtime.run(digits_rows[:40], theta[:, None])


@pytest.fixture
def requested_providers(monkeypatch):
    requests = []
    available = ["TensorrtExecutionProvider", CUDA, PROCESSORS]
    monkeypatch.setattr(ort, "get_available_providers", lambda: available)
    original_session = ort.InferenceSession

    def create_session(content, options, providers):
        requests.append([name for name, _ in providers])
        return original_session(content, options, providers=[PROCESSORS])

    monkeypatch.setattr(ort, "InferenceSession", create_session)
    return requests


# Computation


def test_sampler_computes_theta_from_noise():
    theta = make_runtime().draw(7, 2, 6)
    np.testing.assert_allclose(
        theta, standard_normal(7, 2, 6, NOISE) @ MATRIX + SHIFT, rtol=1e-5, atol=1e-5
    )


def test_runtime_falls_back_to_cpu_if_gpu_does_not_start(requested_providers, caplog):
    runtime = Runtime(sampler().SerializeToString(), network().SerializeToString(), NOISE, 3)
    assert requested_providers == 3 * [[CUDA, PROCESSORS]]
    assert runtime.threads == 3
    assert "is not available; using the CPU" in caplog.text


def test_on_processors_requests_only_the_cpu(requested_providers):
    graphs = sampler().SerializeToString(), network().SerializeToString()
    Runtime(*graphs, NOISE, on_processors=True)
    assert requested_providers == 3 * [[PROCESSORS]]


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize("draws", [1, 5, CHUNK_ROWS // 4 + 1])
@pytest.mark.parametrize("paired", [False, True])
def test_log_probabilities_and_density_match_the_network(rows, draws, paired):
    generator = np.random.default_rng(2)
    x = generator.normal(size=(rows, INPUTS)).astype(np.float32)
    theta = generator.normal(size=(draws, rows if paired else 1, CLASSES)).astype(np.float32)
    log_probs, density = make_runtime().run(x, theta)
    logits = (x @ WEIGHTS)[None] * theta
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=2, keepdims=True))
    np.testing.assert_allclose(log_probs, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(density, np.square(x).sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 32 << 20])
def test_each_draw_is_computed_once_for_many_rows(monkeypatch, paired, chunk_bytes):
    counts = []

    def count_draws(session, outputs, values):
        if "theta" in values:
            counts.append(len(values["theta"]) * len(values[next(iter(values))]))
        return run_graph(session, outputs, values)

    monkeypatch.setattr(runtimes, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(runtimes, "run_graph", count_draws)
    graphs = sampler().SerializeToString(), network().SerializeToString()
    runtime = Runtime(*graphs, NOISE, threads=2, paired=paired)
    rows, draws = 300, 10
    x = np.zeros((rows, INPUTS), dtype=np.float32)
    runtime.run_set(x, runtime.draw_set(0, draws))
    assert sum(counts) == rows * draws


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("largest_result", "max_rows"), [(1, 128), (1 << 18, 16), (1 << 30, 4)])
def test_chunks_have_fewer_rows_if_results_are_large(paired, largest_result, max_rows):
    graph = network()
    graph.metadata_props.add(key="largest_result", value=str(largest_result))
    runtime = Runtime(
        sampler().SerializeToString(), graph.SerializeToString(), NOISE, paired=paired
    )
    assert runtime.chunk_rows == (CHUNK_ROWS if paired and largest_result == 1 else max_rows)


@pytest.mark.parametrize("key", ["largest_result", "weights_per_draw"])
@pytest.mark.parametrize("value", ["-1", "many", "9" * 5000])
def test_invalid_number_in_metadata_is_refused(key, value):
    graph = network()
    graph.metadata_props.add(key=key, value=value)
    with pytest.raises(GraphError, match=f"network.onnx: expected a number as {key}"):
        Runtime(sampler().SerializeToString(), graph.SerializeToString(), NOISE)


@pytest.mark.parametrize("draws_at_once", [1, 3, 100])
def test_draws_beyond_memory_are_recomputed_with_the_same_bits(monkeypatch, draws_at_once):
    monkeypatch.setattr("model_store.inference.runtime.CHUNK_BYTES", 4 * CLASSES * draws_at_once)
    runtime = make_runtime()
    x = np.random.default_rng(2).normal(size=(5, INPUTS)).astype(np.float32)
    cached, _ = runtime.run_set(x, DrawSet(11, 9, runtime.draw(11, 0, 9)))
    recomputed, _ = runtime.run_set(x, DrawSet(11, 9, None))
    assert recomputed.tobytes() == cached.tobytes()
    assert len(recomputed) == 9


# Refused graphs


@pytest.mark.parametrize("content", [b"", b"not ONNX at all", b"\x00" * 100])
@pytest.mark.parametrize("file", ["sampler.onnx", "network.onnx"])
def test_invalid_graph_bytes_are_refused(file, content):
    assert_refused(file, content, "")


@pytest.mark.parametrize("location", ["initialiser", "constant", "branch"])
def test_external_weights_are_refused_anywhere_in_the_graph(location):
    weight = numpy_helper.from_array(MATRIX, "A")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="elsewhere.bin")
    graph = sampler().graph
    del graph.initializer[0]
    if location == "initialiser":
        graph.initializer.append(weight)
    elif location == "constant":
        graph.node.insert(0, helper.make_node("Constant", [], ["A"], value=weight))
    else:
        outputs = [make_value("A", NOISE, CLASSES)]
        constant = helper.make_node("Constant", [], ["A"], value=weight)
        branches = [
            helper.make_graph([constant], branch, [], outputs) for branch in ("then", "else")
        ]
        condition = numpy_helper.from_array(np.array(True), "yes")
        graph.initializer.append(condition)
        node = helper.make_node(
            "If", ["yes"], ["A"], then_branch=branches[0], else_branch=branches[1]
        )
        graph.node.insert(0, node)
    assert_refused("sampler.onnx", serialize_graph(graph), "got weights in another file")


@pytest.mark.parametrize("file", ["sampler.onnx", "network.onnx"])
@pytest.mark.parametrize("side", ["input", "output"])
def test_graphs_with_unexpected_inputs_or_outputs_are_refused(file, side):
    graph = (sampler() if file == "sampler.onnx" else network()).graph
    getattr(graph, side).append(make_value("more", 1))
    assert_refused(file, serialize_graph(graph), "expected inputs")
    del getattr(graph, side)[:]
    assert_refused(file, serialize_graph(graph), "expected inputs")


def test_theta_length_must_be_fixed_and_can_be_one():
    graphs = sampler().SerializeToString(), network_with_theta_length(1)
    assert Runtime(*graphs, NOISE, threads=1).theta_dimension == 1
    assert_refused(
        "network.onnx",
        network_with_theta_length(None),
        "expected theta with 3 axes, the last of fixed length",
    )


def test_sampler_is_refused_as_network():
    assert_refused("network.onnx", sampler().SerializeToString(), "expected inputs")


@pytest.mark.parametrize("file", ["sampler.onnx", "network.onnx"])
@pytest.mark.parametrize(
    ("domain", "operator"),
    [
        ("", "NoSuchOperator"),
        ("", "RandomNormalLike"),
        ("", "Dropout"),
        ("", "StringConcat"),
        ("", "ImageDecoder"),
        ("", "SequenceEmpty"),
        ("", "Optional"),
        ("ai.onnx.ml", "TreeEnsemble"),
        ("com.microsoft", "BeamSearch"),
        ("com.microsoft", "Add"),
        ("of.mine", "Add"),
    ],
)
def test_error_names_unsupported_operator(file, domain, operator):
    model = sampler() if file == "sampler.onnx" else network()
    model.graph.node[0].op_type, model.graph.node[0].domain = operator, domain
    name = f"{domain}.{operator}" if domain else operator
    assert_refused(file, model.SerializeToString(), f"expected supported operators, got {name}")


@pytest.mark.parametrize("operator", ["If", "Loop", "Scan"])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_control_flow_is_refused_even_if_no_output_needs_it(operator, is_hidden):
    body = helper.make_graph([], "body", [], [])
    names = {"If": ["then_branch", "else_branch"]}.get(operator, ["body"])
    node = helper.make_node(operator, ["eps"], ["aside"], **dict.fromkeys(names, body))
    model = sampler()
    if is_hidden:
        inner = helper.make_graph([node], "inner", [], [])
        node = helper.make_node("Identity", ["eps"], ["aside"], body=inner)
    model.graph.node.append(node)
    assert_refused("sampler.onnx", model.SerializeToString(), f"got {operator}")


def test_function_that_redefines_an_operator_is_refused():
    model = sampler()
    body = helper.make_node("Mul", ["a", "b"], ["c"])
    imports = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("", "Add", ["a", "b"], ["c"], [body], imports))
    assert_refused("sampler.onnx", model.SerializeToString(), "expected no functions, got Add")


def test_errors_show_graph_names_short_and_printable():
    model = sampler()
    model.graph.node[0].op_type = "No\n\x1b[31m\u202e" + "o" * 1000
    with pytest.raises(GraphError) as exc_info:
        Runtime(model.SerializeToString(), network().SerializeToString(), NOISE, threads=1)
    assert exc_info.value.reason.isascii()
    assert exc_info.value.reason.isprintable()
    assert len(exc_info.value.reason) < 300


def test_supported_operators_are_deterministic_tensor_operators():
    for name in OPERATORS - {"com.microsoft.MatMulIntegerToFloat"}:
        schema = onnx.defs.get_schema(name)
        assert onnx.defs.OpSchema.AttrType.GRAPH not in {
            a.type for a in schema.attributes.values()
        }, name
        assert "seed" not in schema.attributes, name
        types = {kind for value in (*schema.inputs, *schema.outputs) for kind in value.types}
        assert types & {"tensor(float)", "tensor(int8)", "tensor(uint8)", "tensor(bool)"}, name
        if name not in ("Identity", "Shape", "Size"):
            assert not any(kind.startswith(("seq(", "optional(")) for kind in types), name


# Refused artifacts


@pytest.mark.parametrize("file", ["sampler.onnx", "network.onnx", "calibration.safetensors"])
@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_error_names_unusable_file_of_artifact(digits_store, file, content):
    artifact = ModelStore(digits_store).open("digits", "1")
    with pytest.raises(BrokenArtifact, match=f"model digits version 1: {file}: ") as exc_info:
        Model.load(dataclasses.replace(artifact, files={**artifact.files, file: content}))
    assert exc_info.value.file == file


@pytest.mark.parametrize(
    ("part", "changes", "file"),
    [
        ("noise", {"algorithm": "another"}, "manifest.json"),
        ("noise", {"dimension": 7}, "sampler.onnx"),
        ("input", {"shape": (63,)}, "network.onnx"),
        ("output", {"classes": ("only", "two")}, "calibration.safetensors"),
        ("detectors", {"density": ()}, "network.onnx"),
        ("detectors", {"combined": ("unheard-of",)}, "calibration.safetensors"),
        ("detectors", {"attributed": ()}, "network.onnx"),
        ("detectors", {"attributed": ("residual",)}, "network.onnx"),
    ],
)
def test_artifact_with_mismatched_manifest_is_refused(digits_store, part, changes, file):
    artifact = ModelStore(digits_store).open("digits", "1")
    section = getattr(artifact.manifest, part).model_copy(update=changes)
    manifest = artifact.manifest.model_copy(update={part: section})
    with pytest.raises(BrokenArtifact, match="model digits version 1: ") as exc_info:
        Model.load(dataclasses.replace(artifact, manifest=manifest))
    assert exc_info.value.file == file


# Independence of rows and draws


@pytest.mark.parametrize("draws", [1, 2, 26, 100, 130])
def test_row_has_same_bits_in_batches_of_any_size(model, reference_run, draws):
    x, theta, log_probs, density = reference_run
    for rows in range(1, 41):
        for batch_theta in (theta[:draws, None], np.repeat(theta[:draws, None], rows, axis=1)):
            actual, actual_density = model.runtime.run(x[:rows], batch_theta)
            assert np.array_equal(actual, log_probs[:draws, :rows]), rows
            assert np.array_equal(actual_density, density[:rows]), rows


def test_row_has_same_bits_at_any_batch_position(model, reference_run):
    x, theta, log_probs, density = reference_run
    for n in range(40):
        actual, actual_density = model.runtime.run(x[n : n + 1], theta[:9, None])
        assert np.array_equal(actual, log_probs[:9, n : n + 1])
        assert np.array_equal(actual_density, density[n : n + 1])
    order = np.random.default_rng(0).permutation(40)
    actual, _ = model.runtime.run(x[order], theta[:, None])
    assert np.array_equal(actual, log_probs[:, order])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17, 40])
def test_rows_with_separate_draws_have_same_bits_as_single_rows(model, reference_run, rows):
    x = reference_run[0][:rows]
    theta = np.stack([model.runtime.draw(seed, 0, 30) for seed in range(rows)], axis=1)
    batch, _ = model.runtime.run(x, theta)
    for n in range(rows):
        single, _ = model.runtime.run(x[n : n + 1], theta[:, n : n + 1])
        assert np.array_equal(batch[:, n : n + 1], single)


def test_draw_has_same_bits_in_chunks_of_any_size(model, reference_run):
    theta = reference_run[1]
    for draws in range(1, 131):
        assert np.array_equal(model.runtime.draw(3, 0, draws), theta[:draws])
        first = 130 - draws
        assert np.array_equal(model.runtime.draw(3, first, draws), theta[first:])


def test_results_do_not_depend_on_thread_count(digits_store, reference_run):
    x, theta, log_probs, density = reference_run
    single = Model.load(ModelStore(digits_store).open("digits", "1"), threads=1).runtime
    assert np.array_equal(single.draw(3, 0, 130), theta)
    actual, actual_density = single.run(x, theta[:, None])
    assert np.array_equal(actual, log_probs)
    assert np.array_equal(actual_density, density)


@pytest.mark.parametrize("draws", [1, 2, 9, 100, 130])
def test_prediction_has_same_bits_in_batches_of_any_size(model, reference_run, draws):
    x, theta = reference_run[0], reference_run[1][:draws]
    batch = collect_values(model, model.predict(x, theta))
    for size in (1, 2, 3, 7, 32):
        parts = [
            collect_values(model, model.predict(x[start : start + size], theta))
            for start in range(0, 40, size)
        ]
        for name, values in batch.items():
            assert np.concatenate([part[name] for part in parts]).tobytes() == values.tobytes(), (
                size,
                name,
            )


def test_extra_draws_use_calibration_of_first_100_draws(model, reference_run):
    x, theta = reference_run[:2]
    first_100, all_draws = model.predict(x, theta[:100]), model.predict(x, theta)
    assert (all_draws.scores.num_draws == 130).all()
    assert all_draws.rank_tables.num_draws == 100
    assert all_draws.p_values.p_value.tolist() == first_100.p_values.p_value.tolist()
    assert (
        all_draws.calibrated_scores.probabilities.tobytes()
        == first_100.scores.probabilities.tobytes()
    )
    assert all(
        all_draws.detected[name].tobytes() == values.tobytes()
        for name, values in first_100.detected.items()
    )
    probs = np.exp(model.runtime.run(x, theta[:, None])[0].astype(np.float64)).mean(axis=0)
    np.testing.assert_allclose(all_draws.scores.probabilities, probs, rtol=1e-12)


# Helpers


def make_value(name, *shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def serialize_graph(graph):
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    ).SerializeToString()


def sampler():
    """Build theta = eps A + b."""
    nodes = [
        helper.make_node("MatMul", ["eps", "A"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["theta"]),
    ]
    constants = [numpy_helper.from_array(MATRIX, "A"), numpy_helper.from_array(SHIFT, "b")]
    graph = helper.make_graph(
        nodes,
        "sampler",
        [make_value("eps", "K", NOISE)],
        [make_value("theta", "K", CLASSES)],
        constants,
    )
    return onnx.load_model_from_string(serialize_graph(graph))


def network_with_theta_length(length):
    model = network()
    (theta,) = (candidate for candidate in model.graph.input if candidate.name == "theta")
    theta.CopyFrom(make_value("theta", "K", "P", "D" if length is None else length))
    return model.SerializeToString()


def network():
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["features"]),
        helper.make_node("Mul", ["features", "theta"], ["logits"]),
        helper.make_node("LogSoftmax", ["logits"], ["log_probs"], axis=-1),
        helper.make_node("ReduceSumSquare", ["x", "last"], ["density"], keepdims=1),
    ]
    constants = [
        numpy_helper.from_array(WEIGHTS, "W"),
        numpy_helper.from_array(np.array([1]), "last"),
    ]
    inputs = [make_value("x", "N", INPUTS), make_value("theta", "K", "P", CLASSES)]
    outputs = [
        make_value("log_probs", "K", "N", CLASSES),
        make_value("features", "N", CLASSES),
        make_value("density", "N", 1),
    ]
    return onnx.load_model_from_string(
        serialize_graph(helper.make_graph(nodes, "network", inputs, outputs, constants))
    )


def make_runtime():
    return Runtime(sampler().SerializeToString(), network().SerializeToString(), NOISE, threads=1)


def assert_refused(file, content, reason):
    graphs = {
        "sampler.onnx": sampler().SerializeToString(),
        "network.onnx": network().SerializeToString(),
    }
    graphs[file] = content
    with pytest.raises(GraphError) as exc_info:
        Runtime(graphs["sampler.onnx"], graphs["network.onnx"], NOISE, threads=1)
    assert exc_info.value.file == file
    assert reason in exc_info.value.reason


def collect_values(model, prediction):
    scores = prediction.scores
    errors = {f"error of {name}": values for name, values in (scores.standard_error or {}).items()}
    p_values = {
        f"p of {name}": values for name, values in prediction.p_values.detector_p_values.items()
    }
    return {
        **{name: getattr(scores, name) for name in ("probabilities", "expected_entropy")},
        **scores.by_name(),
        **errors,
        **p_values,
        **prediction.detected,
        "judged": prediction.calibrated_scores.probabilities,
        "p": prediction.p_values.p_value,
        "set": prediction.prediction_sets(0.9),
    }
