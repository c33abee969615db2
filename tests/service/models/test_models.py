import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from model_store.artifacts.manifest import ENCODER, FileSpec
from model_store.artifacts.signature import TrustedKeys
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, NotFound
from model_store.inference.encoder import encoder_bytes
from model_store.inference.model import Model
from service.models.models import Models
from service.models.preflights import Preflights
from service.models.watcher import Watcher
from service.settings import Settings
from tests.support import tiny


@pytest.fixture
def store(tmp_path):
    return tiny.create_store(tmp_path / "models", versions=2)


@pytest.fixture
def watcher(store):
    watcher = get_watcher(store)
    watcher.refresh()
    return watcher


@pytest.fixture
def models(watcher):
    return watcher.models


def get_watcher(store, trusted=None):
    config, ending = (
        Settings(store=store.root, threads=1, preflight_timeout_s=0),
        threading.Event(),
    )
    preflights = Preflights(config, ending)
    preflights.store.trusted = trusted
    return Watcher(Models(config, threading.Event(), preflights), ending)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


@pytest.mark.parametrize("leftover", ["an empty folder", "none"])
def test_loaded_models_keep_serving_if_the_store_disappears(
    store, models, watcher, caplog, leftover
):
    aliases = models.aliases("tiny")
    store.root.rename(store.root.with_name("unmounted"))
    if leftover == "an empty folder":
        store.root.mkdir()
    watcher.refresh()
    assert (models.aliases("tiny"), watcher.is_reachable) == (aliases, False)
    assert models.get("tiny", "latest").version == "2"
    assert "is gone, or empty; serving the versions of the last read" in caplog.text
    if leftover == "an empty folder":
        store.root.rmdir()
    store.root.with_name("unmounted").rename(store.root)
    watcher.refresh()
    assert (models.aliases("tiny"), watcher.is_reachable) == (aliases, True)


def test_last_read_is_updated_only_by_a_complete_read(monkeypatch, models, watcher):
    clock = Clock()
    monkeypatch.setattr("service.models.watcher.time", clock)
    watcher.refresh()
    assert watcher.last_read == clock.now
    clock.now += 60

    def deny(_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(models.store, "read_aliases", deny)
        watcher.refresh()
        assert watcher.last_read == clock.now - 60
    watcher.refresh()
    assert watcher.last_read == clock.now


def test_broken_version_is_retried_after_half_a_minute(monkeypatch, store, models):
    clock = Clock()
    monkeypatch.setattr("service.models.models.time", clock)
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
    assert models.errors("tiny") == {}


def test_concurrent_requests_load_a_version_once(monkeypatch, models):
    """The load is slow enough for the other threads to request the same version."""
    load, loading_threads = Model.load, []

    def load_slowly(*arguments):
        loading_threads.append(threading.current_thread())
        delay.wait(0.5)
        return load(*arguments)

    delay = threading.Event()
    monkeypatch.setattr(Model, "load", load_slowly)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: models.get("tiny", "1"), range(4)))
    assert len(loading_threads) == 1
    assert len({id(result) for result in results}) == 1


def test_deleted_versions_are_unloaded_with_their_errors_and_drift(store, models, watcher):
    (store.root / "tiny" / "1" / "network.onnx").write_bytes(b"nothing")
    with pytest.raises(BrokenArtifact):
        models.get("tiny", "1")
    third = tiny.publish(store)
    manifest = models.get("tiny").model.manifest
    assert manifest.version == "2"
    assert models.drift(manifest) is not None
    assert models.errors("tiny").keys() == {"1"}
    store.keep("tiny", 1)
    watcher.refresh()
    assert models.get("tiny").version == third
    assert models.errors("tiny") == {}
    assert models.drift(manifest) is None
    assert [result.version for result in models.loaded()] == [third]
    store.delete("tiny", force=True)
    tiny.publish(store, "other")
    watcher.refresh()
    assert models.names() == ["other"]
    assert models.latest("tiny") is None
    with pytest.raises(NotFound):
        models.get("tiny")


def test_shared_encoder_counts_once_towards_the_memory_limit(store, models):
    manifests = [store.manifest("tiny", version) for version in ("1", "2")]

    def with_encoder(manifest, content):
        files = {**manifest.files, ENCODER: FileSpec(sha256=64 * content, size=1_000_000)}
        return manifest.model_copy(update={"files": files})

    base_bytes = models._total_bytes(manifests)
    shared, different = (
        models._total_bytes([with_encoder(manifests[0], "a"), with_encoder(manifests[1], second)])
        for second in "ab"
    )
    size_bytes = encoder_bytes(with_encoder(manifests[0], "a").files[ENCODER])
    assert shared == base_bytes + size_bytes
    assert different == base_bytes + 2 * size_bytes


def test_reused_version_number_gets_a_new_drift_test(store, models, watcher):
    before = models.get("tiny", "2")
    store.set_alias("tiny", "latest", "1")
    shutil.rmtree(store.root / "tiny" / "2")
    watcher.refresh()
    assert tiny.publish(store) == "2"
    watcher.refresh()
    assert models.get("tiny", "2").drift is not before.drift


def test_missing_or_changed_signature_prevents_the_next_load(store):
    key = Ed25519PrivateKey.generate()
    for version in ("1", "2"):
        store.sign("tiny", version, key)
    signatures = [store.root / "tiny" / version / "manifest.sig" for version in ("1", "2")]
    running = get_watcher(store, TrustedKeys((key.public_key(),)))
    running.refresh()
    signature = signatures[1].read_bytes()
    for content in (None, signatures[0].read_bytes(), signature[:-1], bytes(64)):
        signatures[1].unlink(missing_ok=True)
        if content is not None:
            signatures[1].write_bytes(content)
        running.refresh_now()
        assert running.models.get("tiny").version == "2"
        assert "manifest.sig" in running.problems["tiny", "latest"]
        restarted = get_watcher(store, TrustedKeys((key.public_key(),)))
        restarted.refresh()
        assert restarted.models.aliases("tiny") == {}
        assert "manifest.sig" in restarted.problems["tiny", "latest"]
        with pytest.raises(BrokenArtifact, match=r"manifest\.sig"):
            restarted.models.get("tiny", "2")
    signatures[1].write_bytes(signature)
    restarted.refresh_now()
    assert (restarted.models.get("tiny").version, restarted.problems) == ("2", {})


def test_read_only_store_is_served(monkeypatch, store):
    real_open = os.open

    def read_only(path, flags, *arguments, **options):
        is_in_store = not isinstance(path, int) and str(path).startswith(str(store.root))
        if is_in_store and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *arguments, **options)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    for name in ("mkdir", "rename", "unlink", "chmod", "link"):
        monkeypatch.setattr(os, name, refuse)
    watcher = get_watcher(store)
    watcher.refresh()
    assert watcher.models.get("tiny").version == "2"
    assert watcher.models.get("tiny", "1").version == "1"
    assert watcher.problems == {}


def test_drift_of_a_loaded_version_can_be_reset_after_its_deletion(store, models):
    models.get("tiny", "1")
    shutil.rmtree(store.root / "tiny" / "1")
    assert models.reset_drift("tiny", "1")[0] == "1"


class StoreMachine(RuleBasedStateMachine):
    factory: pytest.TempPathFactory

    def __init__(self):
        super().__init__()
        self.store = ModelStore(self.factory.mktemp("any") / "models")
        self.watcher = get_watcher(self.store)
        self.models = self.watcher.models
        self.digests, self.damaged, self.serving = {}, set(), {}
        self.is_known = False  # whether a refresh has found the model

    @rule(is_intact=st.booleans())
    def publish(self, is_intact):
        number = tiny.publish(self.store)
        self.digests[number] = self.store.manifest("tiny", number).digest
        self.damaged.discard(number)
        if not is_intact:
            self._damage(number)

    @precondition(lambda self: self._published())
    @rule(data=st.data())
    def damage_or_repair(self, data):
        number = data.draw(st.sampled_from(self._published()))
        if number in self.damaged:
            self._file(number).write_bytes(tiny.files()["network.onnx"])
            self.damaged.discard(number)
        else:
            self._damage(number)

    @precondition(lambda self: self._published())
    @rule(alias=st.sampled_from(["latest", "a"]), data=st.data())
    def set_alias(self, alias, data):
        self.store.set_alias("tiny", alias, data.draw(st.sampled_from(self._published())))

    @precondition(lambda self: self._published())
    @rule(newest=st.integers(1, 2))
    def keep(self, newest):
        self.store.keep("tiny", newest)

    @rule()
    def refresh(self):
        in_memory, before = self._in_memory(), dict(self.serving)
        self.watcher.refresh_now()
        if not self._published():
            return
        for alias, expected in self.store.aliases("tiny").items():
            is_lazy = not before and alias != "latest"  # loaded by the first request
            usable = [n for n in self._published() if n in in_memory or n not in self.damaged]
            if is_lazy or expected in usable:
                self.serving[alias] = expected
        self.is_known = True
        assert self._in_memory() - in_memory <= {*self.serving.values()}

    @precondition(lambda self: self.is_known)
    @rule(data=st.data())
    def get(self, data):
        names = self.store.aliases("tiny")
        expected = data.draw(st.sampled_from(sorted({*names, *self.serving, *self.digests})))
        available = self._in_memory() | {*self._published()}
        candidates = [
            number
            for number in (self.serving.get(expected), names.get(expected), expected)
            if number in available
        ]
        in_memory, broken = self._in_memory(), {*self.models.errors("tiny")} | self.damaged
        if not candidates:
            with pytest.raises(NotFound):
                self.models.get("tiny", expected)
        elif candidates[0] in broken - in_memory:
            with pytest.raises(BrokenArtifact):
                self.models.get("tiny", expected)
        else:
            result = self.models.get("tiny", expected)
            assert result.version == candidates[0]
            assert result.model.manifest.digest == self.digests[result.version]

    def _published(self):
        return self.store.versions("tiny")

    def _in_memory(self):
        return {result.version for result in self.models.loaded()}

    def _file(self, number):
        return self.store.root / "tiny" / number / "network.onnx"

    def _damage(self, number):
        self._file(number).write_bytes(b"nothing")
        self.damaged.add(number)


def test_served_versions_are_intact_and_match_their_alias(
    tmp_path_factory,
):
    machine = type("StoreMachineWithFactory", (StoreMachine,), {"factory": tmp_path_factory})
    budget = settings(max_examples=20, stateful_step_count=15)
    run_state_machine_as_test(machine, settings=budget)
