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
def wide(model, digits_rows):
    theta = model.runtime.draw(3, 0, 130)
    return digits_rows[:40], theta, *model.runtime.run(digits_rows[:40], theta[:, None])


@pytest.fixture
def providers_asked(monkeypatch):
    request = []
    available = ["TensorrtExecutionProvider", CUDA, PROCESSORS]
    monkeypatch.setattr(ort, "get_available_providers", lambda: available)
    created = ort.InferenceSession

    def session(content, options, providers):
        request.append([name for name, _ in providers])
        return created(content, options, providers=[PROCESSORS])

    monkeypatch.setattr(ort, "InferenceSession", session)
    return request


# What a runtime computes


def test_theta_is_the_samplers_function_of_the_noise():
    theta = tiny().draw(7, 2, 6)
    np.testing.assert_allclose(
        theta, standard_normal(7, 2, 6, NOISE) @ MATRIX + SHIFT, rtol=1e-5, atol=1e-5
    )


def test_a_gpu_that_does_not_start_leaves_the_work_to_all_processors(providers_asked, caplog):
    runtime = Runtime(sampler().SerializeToString(), network().SerializeToString(), NOISE, 3)
    assert providers_asked == 3 * [[CUDA, PROCESSORS]]
    assert runtime.threads == 3
    assert "is not available; using the CPU" in caplog.text


def test_what_is_published_is_checked_on_processors(providers_asked):
    graphs = sampler().SerializeToString(), network().SerializeToString()
    Runtime(*graphs, NOISE, on_processors=True)
    assert providers_asked == 3 * [[PROCESSORS]]


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize("draws", [1, 5, CHUNK_ROWS // 4 + 1])
@pytest.mark.parametrize("paired", [False, True])
def test_log_probabilities_and_density_are_the_networks(rows, draws, paired):
    generator = np.random.default_rng(2)
    x = generator.normal(size=(rows, INPUTS)).astype(np.float32)
    theta = generator.normal(size=(draws, rows if paired else 1, CLASSES)).astype(np.float32)
    log_probs, density = tiny().run(x, theta)
    logits = (x @ WEIGHTS)[None] * theta
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=2, keepdims=True))
    np.testing.assert_allclose(log_probs, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(density, np.square(x).sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 32 << 20])
def test_many_rows_compute_each_draw_once(monkeypatch, paired, chunk_bytes):
    computed = []

    def counted(session, outputs, values):
        if "theta" in values:
            computed.append(len(values["theta"]) * len(values[next(iter(values))]))
        return run_graph(session, outputs, values)

    monkeypatch.setattr(runtimes, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(runtimes, "run_graph", counted)
    graphs = sampler().SerializeToString(), network().SerializeToString()
    runtime = Runtime(*graphs, NOISE, threads=2, paired=paired)
    rows, draws = 300, 10
    x = np.zeros((rows, INPUTS), dtype=np.float32)
    runtime.run_set(x, runtime.draw_set(0, draws))
    assert sum(computed) == rows * draws


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("largest", "most"), [(1, 128), (1 << 18, 16), (1 << 30, 4)])
def test_a_run_has_fewer_rows_and_draws_where_results_are_large(paired, largest, most):
    graph = network()
    graph.metadata_props.add(key="largest_result", value=str(largest))
    runtime = Runtime(
        sampler().SerializeToString(), graph.SerializeToString(), NOISE, paired=paired
    )
    assert runtime.chunk_rows == (CHUNK_ROWS if paired and largest == 1 else most)


@pytest.mark.parametrize("key", ["largest_result", "weights_per_draw"])
@pytest.mark.parametrize("value", ["-1", "many", "9" * 5000])
def test_a_number_of_the_metadata_that_is_none_is_refused(key, value):
    graph = network()
    graph.metadata_props.add(key=key, value=value)
    with pytest.raises(GraphError, match=f"network.onnx: expected a number as {key}"):
        Runtime(sampler().SerializeToString(), graph.SerializeToString(), NOISE)


@pytest.mark.parametrize("draws_at_once", [1, 3, 100])
def test_draws_too_many_to_hold_are_made_again_as_they_are(monkeypatch, draws_at_once):
    monkeypatch.setattr("model_store.inference.runtime.CHUNK_BYTES", 4 * CLASSES * draws_at_once)
    runtime = tiny()
    x = np.random.default_rng(2).normal(size=(5, INPUTS)).astype(np.float32)
    stored, _ = runtime.run_set(x, DrawSet(11, 9, runtime.draw(11, 0, 9)))
    remade, _ = runtime.run_set(x, DrawSet(11, 9, None))
    assert remade.tobytes() == stored.tobytes()
    assert len(remade) == 9


# Graphs that are refused


@pytest.mark.parametrize("content", [b"", b"not ONNX at all", b"\x00" * 100])
@pytest.mark.parametrize("file", ["sampler.onnx", "network.onnx"])
def test_bytes_that_are_no_graph_are_refused(file, content):
    assert_refused(file, content, "")


@pytest.mark.parametrize("place", ["initialiser", "constant", "branch"])
def test_weights_in_another_file_are_refused_wherever_they_hide(place):
    weight = numpy_helper.from_array(MATRIX, "A")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="elsewhere.bin")
    graph = sampler().graph
    del graph.initializer[0]
    if place == "initialiser":
        graph.initializer.append(weight)
    elif place == "constant":
        graph.node.insert(0, helper.make_node("Constant", [], ["A"], value=weight))
    else:
        created = [value("A", NOISE, CLASSES)]
        constant = helper.make_node("Constant", [], ["A"], value=weight)
        branches = [
            helper.make_graph([constant], branch, [], created) for branch in ("then", "else")
        ]
        condition = numpy_helper.from_array(np.array(True), "yes")
        graph.initializer.append(condition)
        node = helper.make_node(
            "If", ["yes"], ["A"], then_branch=branches[0], else_branch=branches[1]
        )
        graph.node.insert(0, node)
    assert_refused("sampler.onnx", packed(graph), "got weights in another file")


@pytest.mark.parametrize("file", ["sampler.onnx", "network.onnx"])
@pytest.mark.parametrize("side", ["input", "output"])
def test_graphs_with_other_inputs_or_outputs_are_refused(file, side):
    graph = (sampler() if file == "sampler.onnx" else network()).graph
    getattr(graph, side).append(value("more", 1))
    assert_refused(file, packed(graph), "expected inputs")
    del getattr(graph, side)[:]
    assert_refused(file, packed(graph), "expected inputs")


def test_a_draw_has_a_fixed_number_of_numbers_and_may_have_one():
    graphs = sampler().SerializeToString(), with_theta_length(1)
    assert Runtime(*graphs, NOISE, threads=1).theta_dimension == 1
    assert_refused(
        "network.onnx",
        with_theta_length(None),
        "expected theta with 3 axes, the last of fixed length",
    )


def test_a_sampler_is_not_a_network():
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
def test_an_operator_that_is_not_on_the_list_is_refused_by_name(file, domain, operator):
    model = sampler() if file == "sampler.onnx" else network()
    model.graph.node[0].op_type, model.graph.node[0].domain = operator, domain
    name = f"{domain}.{operator}" if domain else operator
    assert_refused(file, model.SerializeToString(), f"expected supported operators, got {name}")


@pytest.mark.parametrize("operator", ["If", "Loop", "Scan"])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_what_chooses_or_repeats_graphs_is_refused_also_where_no_output_needs_it(
    operator, is_hidden
):
    body = helper.make_graph([], "body", [], [])
    names = {"If": ["then_branch", "else_branch"]}.get(operator, ["body"])
    node = helper.make_node(operator, ["eps"], ["aside"], **dict.fromkeys(names, body))
    model = sampler()
    if is_hidden:
        inner = helper.make_graph([node], "inner", [], [])
        node = helper.make_node("Identity", ["eps"], ["aside"], body=inner)
    model.graph.node.append(node)
    assert_refused("sampler.onnx", model.SerializeToString(), f"got {operator}")


def test_a_function_that_gives_an_operator_another_meaning_is_refused():
    model = sampler()
    inside = helper.make_node("Mul", ["a", "b"], ["c"])
    imports = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("", "Add", ["a", "b"], ["c"], [inside], imports))
    assert_refused("sampler.onnx", model.SerializeToString(), "expected no functions, got Add")


def test_a_name_out_of_a_graph_is_shown_short_and_printable():
    model = sampler()
    model.graph.node[0].op_type = "No\n\x1b[31m\u202e" + "o" * 1000
    with pytest.raises(GraphError) as raised:
        Runtime(model.SerializeToString(), network().SerializeToString(), NOISE, threads=1)
    assert raised.value.reason.isascii()
    assert raised.value.reason.isprintable()
    assert len(raised.value.reason) < 300


def test_no_operator_on_the_list_repeats_graphs_or_is_random_or_of_another_kind_of_values():
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


# Artifacts that are refused


@pytest.mark.parametrize("file", ["sampler.onnx", "network.onnx", "calibration.safetensors"])
@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_an_artifact_with_a_file_that_cannot_be_used_is_refused_by_its_name(
    digits_store, file, content
):
    artifact = ModelStore(digits_store).open("digits", "1")
    with pytest.raises(BrokenArtifact, match=f"model digits version 1: {file}: ") as raised:
        Model.load(dataclasses.replace(artifact, files={**artifact.files, file: content}))
    assert raised.value.file == file


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
def test_an_artifact_whose_manifest_describes_another_model_is_refused(
    digits_store, part, changes, file
):
    artifact = ModelStore(digits_store).open("digits", "1")
    changed = getattr(artifact.manifest, part).model_copy(update=changes)
    manifest = artifact.manifest.model_copy(update={part: changed})
    with pytest.raises(BrokenArtifact, match="model digits version 1: ") as raised:
        Model.load(dataclasses.replace(artifact, manifest=manifest))
    assert raised.value.file == file


# Rows and draws do not see each other


@pytest.mark.parametrize("draws", [1, 2, 26, 100, 130])
def test_a_row_gives_the_same_bits_in_a_batch_of_any_size(model, wide, draws):
    x, theta, log_probs, density = wide
    for rows in range(1, 41):
        for shared in (theta[:draws, None], np.repeat(theta[:draws, None], rows, axis=1)):
            received, got_density = model.runtime.run(x[:rows], shared)
            assert np.array_equal(received, log_probs[:draws, :rows]), rows
            assert np.array_equal(got_density, density[:rows]), rows


def test_a_row_gives_the_same_bits_wherever_it_stands(model, wide):
    x, theta, log_probs, density = wide
    for n in range(40):
        received, got_density = model.runtime.run(x[n : n + 1], theta[:9, None])
        assert np.array_equal(received, log_probs[:9, n : n + 1])
        assert np.array_equal(got_density, density[n : n + 1])
    order = np.random.default_rng(0).permutation(40)
    received, _ = model.runtime.run(x[order], theta[:, None])
    assert np.array_equal(received, log_probs[:, order])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17, 40])
def test_rows_with_draws_of_their_own_give_the_same_bits_as_each_alone(model, wide, rows):
    x = wide[0][:rows]
    theta = np.stack([model.runtime.draw(seed, 0, 30) for seed in range(rows)], axis=1)
    together, _ = model.runtime.run(x, theta)
    for n in range(rows):
        alone, _ = model.runtime.run(x[n : n + 1], theta[:, n : n + 1])
        assert np.array_equal(together[:, n : n + 1], alone)


def test_a_draw_gives_the_same_bits_in_a_chunk_of_any_size(model, wide):
    theta = wide[1]
    for draws in range(1, 131):
        assert np.array_equal(model.runtime.draw(3, 0, draws), theta[:draws])
        first = 130 - draws
        assert np.array_equal(model.runtime.draw(3, first, draws), theta[first:])


def test_the_number_of_threads_does_not_show(digits_store, wide):
    x, theta, log_probs, density = wide
    single = Model.load(ModelStore(digits_store).open("digits", "1"), threads=1).runtime
    assert np.array_equal(single.draw(3, 0, 130), theta)
    received, got_density = single.run(x, theta[:, None])
    assert np.array_equal(received, log_probs)
    assert np.array_equal(got_density, density)


@pytest.mark.parametrize("draws", [1, 2, 9, 100, 130])
def test_a_row_is_predicted_with_the_same_bits_alone_and_in_any_batch(model, wide, draws):
    x, theta = wide[0], wide[1][:draws]
    together = numbers(model, model.predict(x, theta))
    for size in (1, 2, 3, 7, 32):
        parts = [
            numbers(model, model.predict(x[start : start + size], theta))
            for start in range(0, 40, size)
        ]
        for name, values in together.items():
            assert np.concatenate([part[name] for part in parts]).tobytes() == values.tobytes(), (
                size,
                name,
            )


def test_more_draws_than_calibrated_are_judged_by_the_first(model, wide):
    x, theta = wide[:2]
    hundred, extra = model.predict(x, theta[:100]), model.predict(x, theta)
    assert (extra.scores.num_draws == 130).all()
    assert extra.rank_tables.num_draws == 100
    assert extra.p_values.p_value.tolist() == hundred.p_values.p_value.tolist()
    assert extra.calibrated_scores.probabilities.tobytes() == hundred.scores.probabilities.tobytes()
    assert all(
        extra.detected[name].tobytes() == values.tobytes()
        for name, values in hundred.detected.items()
    )
    probs = np.exp(model.runtime.run(x, theta[:, None])[0].astype(np.float64)).mean(axis=0)
    np.testing.assert_allclose(extra.scores.probabilities, probs, rtol=1e-12)


# Helpers


def value(name, *shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def packed(graph):
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    ).SerializeToString()


def sampler():
    """theta = eps A + b."""
    nodes = [
        helper.make_node("MatMul", ["eps", "A"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["theta"]),
    ]
    constants = [numpy_helper.from_array(MATRIX, "A"), numpy_helper.from_array(SHIFT, "b")]
    graph = helper.make_graph(
        nodes, "sampler", [value("eps", "K", NOISE)], [value("theta", "K", CLASSES)], constants
    )
    return onnx.load_model_from_string(packed(graph))


def with_theta_length(length):
    created = network()
    (theta,) = (options for options in created.graph.input if options.name == "theta")
    theta.CopyFrom(value("theta", "K", "P", "D" if length is None else length))
    return created.SerializeToString()


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
    inputs = [value("x", "N", INPUTS), value("theta", "K", "P", CLASSES)]
    outputs = [
        value("log_probs", "K", "N", CLASSES),
        value("features", "N", CLASSES),
        value("density", "N", 1),
    ]
    return onnx.load_model_from_string(
        packed(helper.make_graph(nodes, "network", inputs, outputs, constants))
    )


def tiny():
    return Runtime(sampler().SerializeToString(), network().SerializeToString(), NOISE, threads=1)


def assert_refused(file, content, reason):
    graphs = {
        "sampler.onnx": sampler().SerializeToString(),
        "network.onnx": network().SerializeToString(),
    }
    graphs[file] = content
    with pytest.raises(GraphError) as raised:
        Runtime(graphs["sampler.onnx"], graphs["network.onnx"], NOISE, threads=1)
    assert raised.value.file == file
    assert reason in raised.value.reason


def numbers(model, prediction):
    scores = prediction.scores
    errors = {f"error of {name}": values for name, values in (scores.standard_error or {}).items()}
    detected = {
        f"p of {name}": values for name, values in prediction.p_values.detector_p_values.items()
    }
    return {
        **{name: getattr(scores, name) for name in ("probabilities", "expected_entropy")},
        **scores.by_name(),
        **errors,
        **detected,
        **prediction.detected,
        "judged": prediction.calibrated_scores.probabilities,
        "p": prediction.p_values.p_value,
        "set": prediction.prediction_sets(0.9),
    }
