import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from model_store.artifacts.signature import TrustedKeys
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, StoreUnreachable
from tests.support.disk import DISK_FULL, LOSSES, crashing_disk
from tests.support.environment import ROOT
from tests.support.faulty_bucket import FaultyBucket, Killed
from tests.support.stores import tiny_description, tiny_files

DESCRIPTION = tiny_description()
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
MAX_CHANGES = 1000  # exceeds the number that any operation makes

# Operations on a store with versions 1 to 3 of `m`; the alias `champion` points to version 1.
OPERATIONS = {
    "publish": lambda store: store.publish("m", DESCRIPTION, tiny_files()),
    "new alias": lambda store: store.set_alias("m", "candidate", "2"),
    "move an alias": lambda store: store.set_alias("m", "champion", "2"),
    "roll back": lambda store: store.set_alias("m", "latest", "1"),
    "keep": lambda store: store.keep("m", 1),
    "delete": lambda store: store.delete("m", "1", force=True),
    "sign": lambda store: store.sign("m", "2", KEY),
}


class FolderWithFaults:
    def __init__(self, folder, loss):
        self.folder, self.loss = folder, loss

    def fill(self):
        original = self.folder.with_name("original")
        if not original.exists():
            _publish_three(ModelStore(original))
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(original, self.folder / "models")

    def open(self, trusted=None):
        return ModelStore(self.folder / "models", trusted)

    def fail_at(self, position, operation):
        with crashing_disk(self.folder, position, self.loss) as disk:
            operation(self.open())
        return disk.calls < position

    def find_leftovers(self):
        paths = (self.folder / "models" / "m").rglob(".*")
        return [path for path in paths if path.name not in (".lock", ".last-deleted")]


class BucketWithFaults:
    def __init__(self, folder, fault):
        self.folder, self.fault = folder, fault

    def fill(self):
        self.server = FaultyBucket()
        _publish_three(self.open())

    def open(self, trusted=None):
        return ModelStore(self.server.bucket(self.folder / "cache"), trusted)

    def fail_at(self, position, operation):
        self.server.changes = 0
        setattr(self.server, self.fault, position)
        with suppress(Killed, StoreUnreachable):
            operation(self.open())
        setattr(self.server, self.fault, None)
        return self.server.changes < position

    def find_leftovers(self):
        return []  # a later writer deletes leftovers after a day


FAULTS = {
    **{
        loss: lambda folder, loss=loss: FolderWithFaults(folder, loss)
        for loss in (*LOSSES, DISK_FULL)
    },
    "writer killed": lambda folder: BucketWithFaults(folder, "kill_at"),
    "answer lost": lambda folder: BucketWithFaults(folder, "lose_response_at"),
}


def _publish_three(store):
    for _ in range(3):
        store.publish("m", DESCRIPTION, tiny_files())
    store.set_alias("m", "champion", "1")


def read_state(open_store):
    store, strict_store = open_store(), open_store(TrustedKeys((KEY.public_key(),)))

    def read_version(name, version):
        try:
            return strict_store.open(name, version).files | {"signed": True}
        except BrokenArtifact:
            return store.open(name, version).files | {"signed": False}

    return {
        name: (
            {version: read_version(name, version) for version in store.versions(name)},
            store.aliases(name),
        )
        for name in store.names()
    }


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_failed_operation_leaves_state_before_or_after(tmp_path, operation, fault):
    target = FAULTS[fault](tmp_path / "place")
    target.fill()
    before = read_state(target.open)
    OPERATIONS[operation](target.open())
    after = read_state(target.open)
    allowed_states = [before, after]
    if operation == "publish":  # the version appears before `latest` moves
        allowed_states.append({"m": (after["m"][0], before["m"][1])})
    if operation == "keep":  # versions are deleted one by one
        remaining = {number: files for number, files in before["m"][0].items() if number != "1"}
        allowed_states.append({"m": (remaining, before["m"][1])})
    if operation == "delete":
        allowed_states.append({"m": (before["m"][0], after["m"][1])})
    outcomes = []
    for position in range(1, MAX_CHANGES):
        target.fill()
        is_complete = target.fail_at(position, OPERATIONS[operation])
        state = read_state(target.open)
        assert state in allowed_states, f"failed at change {position}"
        outcomes.append(allowed_states.index(state))
        store = target.open()
        version = store.publish("m", DESCRIPTION, tiny_files()).version
        assert store.resolve("m") == version == max(store.versions("m"), key=int)
        assert store.open("m", version).files == tiny_files()
        assert target.find_leftovers() == []
        if is_complete:
            break
    assert {*outcomes} >= {0, 1} or fault == "answer lost"
    assert outcomes[-1] == 1  # a completed operation is durable


@pytest.mark.parametrize("loss", LOSSES)
def test_first_version_of_new_store_is_durable(tmp_path, loss):
    store = ModelStore(tmp_path / "somewhere" / "models")
    with crashing_disk(tmp_path, None, loss):
        store.publish("m", DESCRIPTION, tiny_files())
    assert store.open("m", store.resolve("m")).files == tiny_files()


WRITER = """
import os, sys
from pathlib import Path
from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import ModelStore

store = ModelStore(Path(sys.argv[1]))
description = Description.model_validate_json(sys.argv[2])
while True:
    version = store.publish("m", description, {file: os.urandom(100_000) for file in FILES}).version
    store.set_alias("m", "champion", version)
    store.keep("m", 3)
    print(version, flush=True)
"""


def test_killed_writers_leave_complete_versions(store):
    command = [sys.executable, "-c", WRITER, str(store.root), DESCRIPTION.model_dump_json()]
    writers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    numbers = [int(writer.stdout.readline()) for writer in writers for _ in range(3)]
    assert len({*numbers}) == 6
    for writer in writers:
        writer.kill()
        writer.communicate()
        assert writer.returncode == -signal.SIGKILL
    for version in {*store.versions("m"), *store.aliases("m").values()}:
        store.open("m", version)
    assert store.publish("m", DESCRIPTION, tiny_files()).version == store.resolve("m")
