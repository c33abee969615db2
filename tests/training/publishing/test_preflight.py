import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from model_store.artifacts.manifest import FILES, ClassSpec, Description
from model_store.artifacts.store import ModelStore
from training.publishing.draft import Draft, PreflightError, publish_draft


@pytest.fixture
def draft(digits_store):
    artifact = ModelStore(digits_store).open("digits", "1")
    description = Description(
        **{field: getattr(artifact.manifest, field) for field in Description.model_fields}
    )
    return Draft(description, {file: artifact.files[file] for file in FILES})


def described(draft, **changes):
    return Draft(draft.description.model_copy(update=changes), draft.files)


def refused(store, draft):
    with pytest.raises(PreflightError) as raised:
        publish_draft(store, "m", draft)
    assert store.versions("m") == []
    assert list(store.root.iterdir()) == []
    message = str(raised.value)
    assert message.startswith("model m is not published, because the service could not load it: ")
    assert "\n" not in message
    return message


def test_what_the_service_can_load_is_published_soon_and_nothing_else_is_left(store, draft):
    start = time.monotonic()
    assert publish_draft(store, "m", draft).version == "1"
    assert time.monotonic() - start < 10
    assert [path.name for path in store.root.iterdir()] == ["m"]
    assert store.open("m", "1").files == draft.files


def test_a_network_of_another_width_than_the_classes_is_not_published(store, draft):
    graph = onnx.load_from_string(draft.files["network.onnx"])
    outputs = graph.graph.output[0].name
    for node in graph.graph.node:
        node.output[:] = ["ten" if name == outputs else name for name in node.output]
    last = numpy_helper.from_array(np.array([0], dtype=np.int64), "last")
    graph.graph.initializer.append(last)
    graph.graph.node.append(helper.make_node("Gather", ["ten", "last"], ["eleventh"], axis=2))
    graph.graph.node.append(helper.make_node("Concat", ["ten", "eleventh"], [outputs], axis=2))
    graph.graph.output[0].type.CopyFrom(
        helper.make_tensor_type_proto(TensorProto.FLOAT, ["draws", "rows", 11])
    )
    message = refused(
        store, Draft(draft.description, {**draft.files, "network.onnx": graph.SerializeToString()})
    )
    assert "network.onnx: expected 10 outputs per row (classes), got 11" in message


def test_a_graph_with_an_operator_that_is_not_served_is_not_published(store, draft):
    graph = onnx.load_from_string(draft.files["sampler.onnx"])
    body = helper.make_graph([], "body", [], [])
    graph.graph.node.append(helper.make_node("Loop", ["", ""], ["aside"], body=body))
    message = refused(
        store, Draft(draft.description, {**draft.files, "sampler.onnx": graph.SerializeToString()})
    )
    assert "sampler.onnx: expected supported operators, got Loop" in message


def test_a_version_whose_calibration_is_of_other_classes_is_not_published(store, draft):
    message = refused(store, described(draft, output=ClassSpec(classes=("one", "two"))))
    assert "calibration.safetensors: " in message


def test_what_training_has_in_memory_does_not_help(store, draft, monkeypatch):
    monkeypatch.setattr("model_store.inference.model.ALGORITHMS", ("known-here",))
    noise = draft.description.noise.model_copy(update={"algorithm": "known-here"})
    assert "manifest.json: noise.algorithm: expected one of" in refused(
        store, described(draft, noise=noise)
    )


def test_a_model_that_does_not_answer_in_time_is_not_published(store, draft, monkeypatch):
    monkeypatch.setattr("training.publishing.draft.PREFLIGHT_S", 0.01)
    assert "expected a prediction within 0.01 s, got none" in refused(store, draft)


def test_a_row_whose_scores_are_not_numbers_keeps_a_version_from_being_published(store, draft):
    graph = onnx.load_from_string(draft.files["network.onnx"])
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim == 2:
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(values, np.nan), tensor.name))
    message = refused(
        store, Draft(draft.description, {**draft.files, "network.onnx": graph.SerializeToString()})
    )
    assert "network.onnx: " in message
