"""The models in memory: what is broken is tried again, what is wanted by several is loaded once, what is gone is
forgotten."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from model_store.errors import BrokenArtifact, NotFound
from model_store.inference.model import Model
from service.registry.models import Models
from service.settings import Settings
from tests.support import tiny


@pytest.fixture
def store(tmp_path):
    return tiny.published(tmp_path / "models", versions=2)


@pytest.fixture
def models(store):
    models = Models(Settings(store=store.root, threads=1, ready_draw_sets=0), threading.Event())
    models.refresh()
    return models


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


def test_a_broken_version_is_refused_from_memory_for_half_a_minute_and_then_tried_again(monkeypatch, store, models):
    clock = Clock()
    monkeypatch.setattr("service.registry.models.time", clock)
    file = store.root / "tiny" / "1" / "network.onnx"
    content = file.read_bytes()
    file.write_bytes(b"nothing")
    with pytest.raises(BrokenArtifact, match=r"network\.onnx"):
        models.get("tiny", "1")
    file.write_bytes(content)
    clock.now += 29.0
    with pytest.raises(BrokenArtifact, match=r"network\.onnx"):
        models.get("tiny", "1")
    clock.now += 2.0
    assert models.get("tiny", "1").version == "1"
    assert models.broken("tiny") == {}


def test_a_look_at_the_store_tries_broken_versions_at_once(store, models):
    file = store.root / "tiny" / "1" / "network.onnx"
    content = file.read_bytes()
    file.write_bytes(b"nothing")
    with pytest.raises(BrokenArtifact):
        models.get("tiny", "1")
    file.write_bytes(content)
    models.look()
    assert models.get("tiny", "1").version == "1"


def test_a_version_that_several_want_at_once_is_loaded_once(monkeypatch, models):
    """The first is kept at it until all others wait, or a moment has passed: they must not begin as well."""
    load, begun = Model.load, []

    def slow(*arguments):
        begun.append(threading.current_thread())
        others.wait(0.5)
        return load(*arguments)

    others = threading.Event()  # never set: nobody else may come this far meanwhile
    monkeypatch.setattr(Model, "load", slow)
    with ThreadPoolExecutor(4) as threads:
        served = list(threads.map(lambda _: models.get("tiny", "1"), range(4)))
    assert len(begun) == 1
    assert len({id(one) for one in served}) == 1


def test_what_is_deleted_is_forgotten_with_all_that_was_known_of_it(store, models):
    (store.root / "tiny" / "1" / "network.onnx").write_bytes(b"nothing")
    with pytest.raises(BrokenArtifact):
        models.get("tiny", "1")
    third = tiny.publish(store)
    manifest = models.get("tiny").model.manifest
    assert manifest.version == "2"
    assert models.drift(manifest) is not None
    assert models.broken("tiny").keys() == {"1"}
    store.keep("tiny", 1)
    models.refresh()
    assert models.get("tiny").version == third
    assert models.broken("tiny") == {}
    assert models.drift(manifest) is None
    assert [served.version for served in models.loaded()] == [third]
    shutil.rmtree(store.root / "tiny")
    tiny.publish(store, "other")
    models.refresh()
    assert models.names() == ["other"]
    assert models.latest("tiny") is None
    with pytest.raises(NotFound):
        models.get("tiny")


def test_a_version_published_anew_under_a_number_given_before_begins_with_no_drift(store, models):
    """Where the newest is deleted by hand its number is given again, and nothing of the old one counts for it."""
    before = models.get("tiny", "2")
    shutil.rmtree(store.root / "tiny" / "2")
    models.refresh()
    assert tiny.publish(store) == "2"
    models.refresh()
    assert models.get("tiny", "2").drift is not before.drift
