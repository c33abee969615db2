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


def update(draft, **changes):
    return Draft(draft.description.model_copy(update=changes), draft.files)


def publish_error(store, draft):
    with pytest.raises(PreflightError) as raised:
        publish_draft(store, "m", draft)
    assert store.versions("m") == []
    assert list(store.root.iterdir()) == []
    message = str(raised.value)
    assert message.startswith("model m is not published, because the service could not load it: ")
    assert "\n" not in message
    return message


def test_loadable_draft_is_published_quickly_without_leftover_files(store, draft):
    start = time.monotonic()
    assert publish_draft(store, "m", draft).version == "1"
    assert time.monotonic() - start < 10
    assert [path.name for path in store.root.iterdir()] == ["m"]
    assert store.open("m", "1").files == draft.files


def test_network_with_wrong_output_count_is_not_published(store, draft):
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
    message = publish_error(
        store, Draft(draft.description, {**draft.files, "network.onnx": graph.SerializeToString()})
    )
    assert "network.onnx: expected 10 outputs per row (classes), got 11" in message


def test_graph_with_unsupported_operator_is_not_published(store, draft):
    graph = onnx.load_from_string(draft.files["sampler.onnx"])
    body = helper.make_graph([], "body", [], [])
    graph.graph.node.append(helper.make_node("Loop", ["", ""], ["aside"], body=body))
    message = publish_error(
        store, Draft(draft.description, {**draft.files, "sampler.onnx": graph.SerializeToString()})
    )
    assert "sampler.onnx: expected supported operators, got Loop" in message


def test_version_with_calibration_for_other_classes_is_not_published(store, draft):
    message = publish_error(store, update(draft, output=ClassSpec(classes=("one", "two"))))
    assert "calibration.safetensors: " in message


def test_preflight_ignores_state_of_training_process(store, draft, monkeypatch):
    monkeypatch.setattr("model_store.inference.model.ALGORITHMS", ("known-here",))
    noise = draft.description.noise.model_copy(update={"algorithm": "known-here"})
    assert "manifest.json: noise.algorithm: expected one of" in publish_error(
        store, update(draft, noise=noise)
    )


def test_model_that_exceeds_preflight_timeout_is_not_published(store, draft, monkeypatch):
    monkeypatch.setattr("training.publishing.draft.PREFLIGHT_S", 0.01)
    assert "expected a prediction within 0.01 s, got none" in publish_error(store, draft)


def test_version_with_nan_scores_is_not_published(store, draft):
    graph = onnx.load_from_string(draft.files["network.onnx"])
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim == 2:
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(values, np.nan), tensor.name))
    message = publish_error(
        store, Draft(draft.description, {**draft.files, "network.onnx": graph.SerializeToString()})
    )
    assert "network.onnx: " in message
