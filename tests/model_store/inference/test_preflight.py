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


def test_preflight_limits_draws_per_chunk_like_the_service(tmp_path, monkeypatch):
    model, requests, draw = tiny.load_model(tmp_path, paired=False), [], Runtime.draw

    def record_draw(self, seed, first_draw, num_draws):
        requests.append(range(first_draw, first_draw + num_draws))
        return draw(self, seed, first_draw, num_draws)

    monkeypatch.setattr(runtime, "MAX_DRAW_SET_BYTES", tiny.DRAWS * model.runtime.draw_bytes - 1)
    monkeypatch.setattr(runtime, "CHUNK_BYTES", 3 * model.runtime.draw_bytes)
    monkeypatch.setattr(Runtime, "draw", record_draw)
    preflight.predict(model)
    assert max(len(draws) for draws in requests) == 3
    assert {k for draws in requests for k in draws} == set(range(tiny.DRAWS))


def test_out_of_memory_in_draws_is_reported_as_broken_artifact(tmp_path, monkeypatch):
    model = tiny.load_model(tmp_path)

    def raise_memory_error(*_):
        raise MemoryError

    monkeypatch.setattr(Runtime, "draw", raise_memory_error)
    with pytest.raises(BrokenArtifact, match="it does not predict a row: MemoryError") as exc_info:
        preflight.predict(model)
    assert preflight.is_out_of_memory(exc_info.value)


def test_network_undefined_at_zero_loads_without_warning(tmp_path):
    graph = onnx.load_model_from_string(tiny.network())
    graph.graph.node[0].input[0] = "kept"
    for node in (
        helper.make_node("Mul", ["x", "one"], ["kept"]),
        helper.make_node("Div", ["x", "x"], ["one"]),
    ):
        graph.graph.node.insert(0, node)
    files = {**tiny.files(), "network.onnx": graph.SerializeToString()}
    description = tiny.description().model_dump()
    description["input"]["minimum"] = 0
    store = ModelStore(tmp_path)
    store.publish("tiny", Description.model_validate(description), files)
    model = Model.load(store.open("tiny", "1", NEEDED), threads=1)
    with pytest.warns(RuntimeWarning, match="invalid value"):
        model.predict(np.zeros((1, tiny.INPUTS), dtype=np.float32), model.runtime.draw(0, 0, 1))
