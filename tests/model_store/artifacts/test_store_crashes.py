"""A disk that stops between any two changes, and readers in the middle: versions are there whole,
or not at all."""

import shutil

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from model_store.artifacts.signature import SIGNATURE
from model_store.artifacts.store import ModelStore
from model_store.errors import NotFound
from tests.support.disk import LOSSES, stopping
from tests.support.stores import tiny_description, tiny_files

DESCRIPTION = tiny_description()
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
EVER = 1000  # changes: more than any of these takes
BUDGET = settings(max_examples=10, stateful_step_count=8)

# Of a store with versions 1 to 3, of which `champion` names 1: what is done to it.
CHANGES = {
    "publish": lambda store: store.publish("m", DESCRIPTION, tiny_files()),
    "publish another model": lambda store: store.publish("other", DESCRIPTION, tiny_files()),
    "new alias": lambda store: store.set_alias("m", "candidate", "2"),
    "move an alias": lambda store: store.set_alias("m", "champion", "2"),
    "roll back": lambda store: store.set_alias("m", "latest", "1"),
    "keep": lambda store: store.keep("m", 1),
    "sign": lambda store: store.sign("m", "2", KEY),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A store that is copied before each change."""
    store = ModelStore(tmp_path_factory.mktemp("before") / "models")
    for _ in range(3):
        store.publish("m", DESCRIPTION, tiny_files())
    store.set_alias("m", "champion", "1")
    return store


def read(store):
    """All that a store says, every version read and verified; a signature that is there, too."""
    trusting = ModelStore(store.root, KEY.public_key())

    def version_of(name, version):
        is_signed = (store.root / name / version / SIGNATURE).exists()
        return (trusting if is_signed else store).open(name, version).files | {SIGNATURE: is_signed}

    return {
        name: (
            {version: version_of(name, version) for version in store.versions(name)},
            store.aliases(name),
        )
        for name in store.names()
    }


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_disk_that_stops_between_any_two_changes_leaves_what_was_or_what_should_be(
    tmp_path, before, change, loss
):
    was = read(before)
    after = copy(before, tmp_path / "after")
    CHANGES[change](after)
    legal = [was, read(after)]
    if change == "publish":  # the version is whole, and `latest` does not name it yet
        legal.append({"m": (legal[1]["m"][0], was["m"][1])})
    if change == "keep":  # a version after the other
        legal.append(
            {"m": ({v: files for v, files in was["m"][0].items() if v != "1"}, was["m"][1])}
        )
    found = []
    for at in range(1, EVER):
        store = copy(before, tmp_path / "models")
        with stopping(store.root, at, loss) as disk:
            CHANGES[change](store)
        now = read(store)
        assert now in legal, f"stopped at change {at}"
        found.append(legal.index(now))
        next_version = store.publish("m", DESCRIPTION, tiny_files()).version
        assert store.resolve("m") == next_version == max(store.versions("m"), key=int)
        assert store.open("m", next_version).files == tiny_files()
        assert [path for path in (store.root / "m").rglob(".*") if path.name != ".lock"] == []
        if disk.calls < at:
            break
    assert {0, 1} <= set(found)
    assert found[-1] == 1  # once it has returned it is on the disk


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_published_first_is_on_the_disk_too(tmp_path, loss):
    store = ModelStore(tmp_path / "somewhere" / "models")
    with stopping(tmp_path, None, loss):
        store.publish("m", DESCRIPTION, tiny_files())
        store.set_alias("m", "champion", "1")
    assert read(store) == {
        "m": ({"1": {**tiny_files(), SIGNATURE: False}}, {"latest": "1", "champion": "1"})
    }
    assert (store.root / "m" / "aliases" / "champion").exists()


def copy(store, root):
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(store.root, root)
    return ModelStore(root)


class AnyChanges(RuleBasedStateMachine):
    """Publications, aliases and deletions one after the other, each with a reader before every
    change to the disk, some stopped in the middle; against a dictionary."""

    factory: pytest.TempPathFactory

    def __init__(self):
        super().__init__()
        self.store = ModelStore(self.factory.mktemp("any") / "models")
        self.versions, self.aliases, self.published = {}, {}, 0

    def change(self, do, stop, loss, *legal):
        """Do it, perhaps not to its end; readers in the middle see one of the legal states, or the
        present one."""
        legal = [*legal, (self.versions, self.aliases)]

        def look():
            assert self.seen() in legal

        with stopping(self.store.root.parent, stop, loss, look):
            do()
            assert self.seen() == legal[0]
        now = self.seen()
        assert now in legal
        self.versions, self.aliases = now

    def seen(self):
        versions, aliases = read(self.store).get("m", ({}, {}))
        return {
            version: files["weights.safetensors"] for version, files in versions.items()
        }, aliases

    stops = st.none() | st.integers(1, 60)
    losses = st.sampled_from(LOSSES)

    @rule(stop=stops, loss=losses)
    def publish(self, stop, loss):
        self.published += 1
        content = f"publication {self.published}".encode()
        version = str(max(map(int, self.versions), default=0) + 1)
        versions = {**self.versions, version: content}
        whole = (versions, {**self.aliases, "latest": version})
        files = {**tiny_files(), "weights.safetensors": content}
        before = (versions, self.aliases or {"latest": version})
        self.change(lambda: self.store.publish("m", DESCRIPTION, files), stop, loss, whole, before)

    @rule(alias=st.sampled_from(["latest", "a", "b"]), data=st.data(), stop=stops, loss=losses)
    def set_alias(self, alias, data, stop, loss):
        if not self.versions:
            with pytest.raises(NotFound):
                self.store.set_alias("m", alias, "1")
            return
        target = data.draw(st.sampled_from([*self.versions, *self.aliases]))
        moved = {**self.aliases, alias: self.aliases.get(target, target)}
        self.change(
            lambda: self.store.set_alias("m", alias, target), stop, loss, (self.versions, moved)
        )

    @rule(newest=st.integers(1, 3), stop=stops, loss=losses)
    def keep(self, newest, stop, loss):
        if not self.versions:
            return
        numbers = sorted(self.versions, key=int)
        kept = {*numbers[-newest:], *self.aliases.values()}
        deleted = [number for number in numbers if number not in kept]
        states = [
            ({v: c for v, c in self.versions.items() if v not in deleted[:count]}, self.aliases)
            for count in range(len(deleted), 0, -1)
        ] or [(self.versions, self.aliases)]
        self.change(lambda: self.store.keep("m", newest), stop, loss, *states)

    @invariant()
    def reads_as_it_should(self):
        assert self.seen() == (self.versions, self.aliases)


def test_any_changes_with_readers_in_the_middle_and_stops(tmp_path_factory):
    machine = type("AnyChangesHere", (AnyChanges,), {"factory": tmp_path_factory})
    run_state_machine_as_test(machine, settings=BUDGET)
