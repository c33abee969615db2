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
    return tiny.published(tmp_path / "models", versions=2)


@pytest.fixture
def watcher(store):
    watcher = get_watcher(store)
    watcher.refresh()
    return watcher


@pytest.fixture
def models(watcher):
    return watcher.models


def get_watcher(store, trusted=None):
    ours, ending = (Settings(store=store.root, threads=1, preflight_timeout_s=0), threading.Event())
    preflights = Preflights(ours, ending)
    preflights.store.trusted = trusted
    return Watcher(Models(ours, threading.Event(), preflights), ending)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


@pytest.mark.parametrize("leaves", ["an empty folder", "none"])
def test_what_is_loaded_is_served_while_the_mount_of_the_store_is_gone(
    store, models, watcher, caplog, leaves
):
    result = models.aliases("tiny")
    store.root.rename(store.root.with_name("unmounted"))
    if leaves == "an empty folder":
        store.root.mkdir()
    watcher.refresh()
    assert (models.aliases("tiny"), watcher.is_reachable) == (result, False)
    assert models.get("tiny", "latest").version == "2"
    assert "is gone, or empty; serving the versions of the last read" in caplog.text
    if leaves == "an empty folder":
        store.root.rmdir()
    store.root.with_name("unmounted").rename(store.root)
    watcher.refresh()
    assert (models.aliases("tiny"), watcher.is_reachable) == (result, True)


def test_the_store_counts_as_seen_when_all_of_it_was(monkeypatch, models, watcher):
    clock = Clock()
    monkeypatch.setattr("service.models.watcher.time", clock)
    watcher.refresh()
    assert watcher.last_read == clock.now
    clock.now += 60

    def unreadable(_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as changes:
        changes.setattr(models.store, "read_aliases", unreadable)
        watcher.refresh()
        assert watcher.last_read == clock.now - 60
    watcher.refresh()
    assert watcher.last_read == clock.now


def test_a_broken_version_is_refused_from_memory_for_half_a_minute_and_then_tried_again(
    monkeypatch, store, models
):
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


def test_a_version_that_several_want_at_once_is_loaded_once(monkeypatch, models):
    """The first is kept at it until all others wait, or a moment has passed: they must not begin as
    well."""
    load, start = Model.load, []

    def slow(*arguments):
        start.append(threading.current_thread())
        rest.wait(0.5)
        return load(*arguments)

    rest = threading.Event()
    monkeypatch.setattr(Model, "load", slow)
    with ThreadPoolExecutor(4) as threads:
        result = list(threads.map(lambda _: models.get("tiny", "1"), range(4)))
    assert len(start) == 1
    assert len({id(item) for item in result}) == 1


def test_what_is_deleted_is_forgotten_with_all_that_was_known_of_it(store, models, watcher):
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


def test_an_encoder_that_several_versions_have_counts_once_towards_the_bound_of_memory(
    store, models
):
    plain = [store.manifest("tiny", version) for version in ("1", "2")]

    def with_encoder(manifest, content):
        files = {**manifest.files, ENCODER: FileSpec(sha256=64 * content, size=1_000_000)}
        return manifest.model_copy(update={"files": files})

    bare = models._total_bytes(plain)
    shared, different = (
        models._total_bytes([with_encoder(plain[0], "a"), with_encoder(plain[1], second)])
        for second in "ab"
    )
    item = encoder_bytes(with_encoder(plain[0], "a").files[ENCODER])
    assert shared == bare + item
    assert different == bare + 2 * item


def test_another_version_under_a_number_used_before_has_a_new_drift_test(store, models, watcher):
    before = models.get("tiny", "2")
    store.set_alias("tiny", "latest", "1")
    shutil.rmtree(store.root / "tiny" / "2")
    watcher.refresh()
    assert tiny.publish(store) == "2"
    watcher.refresh()
    assert models.get("tiny", "2").drift is not before.drift


def test_a_signature_that_is_taken_away_or_changed_counts_when_the_version_is_next_loaded(store):
    key = Ed25519PrivateKey.generate()
    for version in ("1", "2"):
        store.sign("tiny", version, key)
    signatures = [store.root / "tiny" / version / "manifest.sig" for version in ("1", "2")]
    before = get_watcher(store, TrustedKeys((key.public_key(),)))
    before.refresh()
    signed = signatures[1].read_bytes()
    for unsigned in (None, signatures[0].read_bytes(), signed[:-1], bytes(64)):
        signatures[1].unlink(missing_ok=True)
        if unsigned is not None:
            signatures[1].write_bytes(unsigned)
        before.refresh_now()
        assert before.models.get("tiny").version == "2"
        assert "manifest.sig" in before.problems["tiny", "latest"]
        after = get_watcher(store, TrustedKeys((key.public_key(),)))
        after.refresh()
        assert after.models.aliases("tiny") == {}
        assert "manifest.sig" in after.problems["tiny", "latest"]
        with pytest.raises(BrokenArtifact, match=r"manifest\.sig"):
            after.models.get("tiny", "2")
    signatures[1].write_bytes(signed)
    after.refresh_now()
    assert (after.models.get("tiny").version, after.problems) == ("2", {})


def test_a_store_that_cannot_be_written_is_served(monkeypatch, store):
    opened = os.open

    def read_only(path, flags, *arguments, **options):
        is_there = not isinstance(path, int) and str(path).startswith(str(store.root))
        if is_there and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *arguments, **options)

    def no_change(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    for name in ("mkdir", "rename", "unlink", "chmod", "link"):
        monkeypatch.setattr(os, name, no_change)
    watcher = get_watcher(store)
    watcher.refresh()
    assert watcher.models.get("tiny").version == "2"
    assert watcher.models.get("tiny", "1").version == "1"
    assert watcher.problems == {}


def test_what_is_in_memory_is_administered_though_its_version_was_deleted(store, models):
    models.get("tiny", "1")
    shutil.rmtree(store.root / "tiny" / "1")
    assert models.reset_drift("tiny", "1")[0] == "1"


class AnyStore(RuleBasedStateMachine):
    factory: pytest.TempPathFactory

    def __init__(self):
        super().__init__()
        self.store = ModelStore(self.factory.mktemp("any") / "models")
        self.watcher = get_watcher(self.store)
        self.models = self.watcher.models
        self.digests, self.damaged, self.serves = {}, set(), {}
        self.is_known = False  # whether a look has seen the model

    @rule(is_whole=st.booleans())
    def publish(self, is_whole):
        number = tiny.publish(self.store)
        self.digests[number] = self.store.manifest("tiny", number).digest
        self.damaged.discard(number)
        if not is_whole:
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
        in_memory, before = self._in_memory(), dict(self.serves)
        self.watcher.refresh_now()
        if not self._published():
            return
        for alias, expected in self.store.aliases("tiny").items():
            is_later = not before and alias != "latest"  # loaded when a request wants it
            full = [n for n in self._published() if n in in_memory or n not in self.damaged]
            if is_later or expected in full:
                self.serves[alias] = expected
        self.is_known = True
        assert self._in_memory() - in_memory <= {*self.serves.values()}

    @precondition(lambda self: self.is_known)
    @rule(data=st.data())
    def get(self, data):
        names = self.store.aliases("tiny")
        expected = data.draw(st.sampled_from(sorted({*names, *self.serves, *self.digests})))
        there = self._in_memory() | {*self._published()}
        candidates = [
            number
            for number in (self.serves.get(expected), names.get(expected), expected)
            if number in there
        ]
        in_memory, is_refused = self._in_memory(), {*self.models.errors("tiny")} | self.damaged
        if not candidates:
            with pytest.raises(NotFound):
                self.models.get("tiny", expected)
        elif candidates[0] in is_refused - in_memory:
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


def test_whatever_becomes_of_the_store_what_is_served_is_whole_and_what_its_alias_named(
    tmp_path_factory,
):
    machine = type("AnyStoreHere", (AnyStore,), {"factory": tmp_path_factory})
    budget = settings(max_examples=20, stateful_step_count=15)
    run_state_machine_as_test(machine, settings=budget)
