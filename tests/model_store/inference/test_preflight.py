import numpy as np
import onnx
import pytest
from onnx import helper

from model_store.artifacts.manifest import Description
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact
from model_store.inference import preflight, runtime
from model_store.inference.model import NEEDED, Model
from model_store.inference.runtime import Runtime
from tests.support import tiny


def test_a_preflight_makes_no_more_draws_at_once_than_the_service_does(tmp_path, monkeypatch):
    model, request, draw = tiny.loaded(tmp_path, paired=False), [], Runtime.draw

    def recorded(self, seed, first_draw, num_draws):
        request.append(range(first_draw, first_draw + num_draws))
        return draw(self, seed, first_draw, num_draws)

    monkeypatch.setattr(runtime, "MAX_DRAW_SET_BYTES", tiny.DRAWS * model.runtime.draw_bytes - 1)
    monkeypatch.setattr(runtime, "CHUNK_BYTES", 3 * model.runtime.draw_bytes)
    monkeypatch.setattr(Runtime, "draw", recorded)
    preflight.predict(model)
    assert max(len(some) for some in request) == 3
    assert {k for some in request for k in some} == set(range(tiny.DRAWS))


def test_draws_that_cannot_be_made_are_the_version_s_fault(tmp_path, monkeypatch):
    model = tiny.loaded(tmp_path)

    def none_left(*_):
        raise MemoryError

    monkeypatch.setattr(Runtime, "draw", none_left)
    with pytest.raises(BrokenArtifact, match="it does not predict a row: MemoryError") as broken:
        preflight.predict(model)
    assert preflight.is_out_of_memory(broken.value)


def test_a_network_that_has_no_answer_for_zeros_is_loaded_without_a_warning(tmp_path):
    graph = onnx.load_model_from_string(tiny.network())
    graph.graph.node[0].input[0] = "kept"
    for node in (
        helper.make_node("Mul", ["x", "one"], ["kept"]),
        helper.make_node("Div", ["x", "x"], ["one"]),
    ):
        graph.graph.node.insert(0, node)
    files = {**tiny.files(), "network.onnx": graph.SerializeToString()}
    described = tiny.description().model_dump()
    described["input"]["minimum"] = 0
    store = ModelStore(tmp_path)
    store.publish("tiny", Description.model_validate(described), files)
    model = Model.load(store.open("tiny", "1", NEEDED), threads=1)
    with pytest.warns(RuntimeWarning, match="invalid value"):
        model.predict(np.zeros((1, tiny.INPUTS), dtype=np.float32), model.runtime.draw(0, 0, 1))
