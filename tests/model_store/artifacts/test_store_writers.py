"""Writers that are killed, that write at once, that run out of space."""

import re
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.environment import ROOT
from tests.support.stores import tiny_description, tiny_files

CONTENT, DESCRIPTION = tiny_files(), tiny_description()


def test_what_killed_writers_left_is_not_seen_and_cleared_by_the_next(published):
    folder = published.root / "m"
    for left in (".draft-abc", ".deleted-9"):
        shutil.copytree(folder / "1", folder / left)
    (folder / "aliases" / ".draft-xyz").write_text("9")
    assert published.versions("m") == ["1"]
    assert published.aliases("m") == {"latest": "1"}
    published.publish("m", DESCRIPTION, CONTENT)
    left = [path for path in folder.rglob(".*") if path.name != ".lock"]
    assert left == []


PUBLISHER = """
import os, signal, sys, time, random, resource
from pathlib import Path
from model_store.errors import DubitoError
from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import ModelStore

store = ModelStore(Path(sys.argv[1]))
description = Description.model_validate_json(sys.argv[2])

def publish(size):
    return store.publish("m", description, {file: os.urandom(size) for file in FILES}).version
"""


def test_writers_at_once_publish_different_whole_versions(store):
    program = PUBLISHER + "sys.stdin.read()\nprint([publish(1000) for _ in range(8)])\n"
    with start(program, store) as one, start(program, store) as other:
        for writer in (one, other):
            writer.stdin.close()  # both begin now
        said = [writer.stdout.read() for writer in (one, other)]
    assert one.returncode == other.returncode == 0
    given = [re.findall(r"\d+", text) for text in said]
    assert sorted(map(int, given[0] + given[1])) == list(range(1, 17))
    assert store.versions("m") == [str(number) for number in range(1, 17)]
    assert store.resolve("m") == "16"
    assert_all_whole(store)


def test_writers_killed_at_any_moment_leave_no_partial_version(store):
    """A process forks writers that publish, move an alias and delete without end, and kills each at
    random."""
    program = PUBLISHER + (
        "left = 0\n"
        "publish(10)\n"
        "began = time.monotonic()\n"
        "publish(100_000)\n"
        "took = time.monotonic() - began\n"
        "for round in range(50):\n"
        "    writer = os.fork()\n"
        "    while writer == 0:\n"
        "        version = publish(100_000)\n"
        "        store.set_alias('m', 'champion', version)\n"
        "        store.keep('m', 3)\n"
        "    time.sleep(random.uniform(0.0, 3 * took))\n"
        "    os.kill(writer, signal.SIGKILL)\n"
        "    os.waitpid(writer, 0)\n"
        "    left += any(store.root.glob('m/.d*')) or any(store.root.glob('m/aliases/.d*'))\n"
        "    versions = store.versions('m')\n"
        "    assert versions\n"
        "    for version in {*versions, *map(lambda a: store.resolve('m', a), "
        "store.aliases('m'))}:\n"
        "        store.open('m', version)\n"
        "print(left, versions[-1])\n"
    )
    process = start(program, store)
    output, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    left, newest = map(int, output.split())
    assert left > 0  # some writer was in the middle of something
    assert newest > 2  # some writer came to the end of something
    store.publish("m", DESCRIPTION, CONTENT)
    assert_all_whole(store)
    assert [path for path in (store.root / "m").rglob(".*") if path.name != ".lock"] == []


def test_a_writer_that_runs_out_of_space_leaves_nothing_to_see(store):
    program = PUBLISHER + (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "try:\n"
        "    publish(3001)\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    process = start(program, store)
    output, error = process.communicate(timeout=60)
    assert output.strip() == "File too large", error
    assert store.names() == []
    assert store.versions("m") == []
    assert store.publish("m", DESCRIPTION, CONTENT).version == "1"
    assert_all_whole(store)
    assert [path for path in (store.root / "m").rglob(".*") if path.name != ".lock"] == []


# Helpers


def assert_all_whole(store):
    for version in store.versions("m"):
        assert store.open("m", version).manifest.version == version


def start(program, store):
    command = [sys.executable, "-c", program, str(store.root), DESCRIPTION.model_dump_json()]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_latest_never_names_what_it_was_moved_away_from_while_others_publish(published):
    legal = [{"1"}]  # what `latest` may name, from one step of the writer to the next

    def write():
        newest = "1"
        for _ in range(100):
            legal.append({newest, "1"})
            published.set_alias("m", "latest", "1")
            following = str(int(newest) + 1)
            legal.append({"1", following})
            newest = published.publish("m", DESCRIPTION, CONTENT).version
            assert newest == following

    writer = threading.Thread(target=write)
    writer.start()
    wrong = []
    while writer.is_alive():
        first = len(legal) - 1
        named = published.aliases("m")["latest"]
        if named not in set().union(*legal[first:]):
            wrong.append(named)
    assert legal[-1] == {"1", "101"}
    assert wrong == []


@pytest.mark.parametrize("step", range(4))
def test_a_deletion_killed_at_any_step_leaves_latest_on_a_version_that_is_there(
    store, monkeypatch, step
):
    for _ in range(3):
        store.publish("m", tiny_description(), tiny_files())
    store.set_alias("m", "champion", "3")
    steps, rename = iter(range(4)), Path.rename

    def killed(path, target):
        if next(steps) == step:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as changes:
        changes.setattr(Path, "rename", killed)
        with suppress(KeyboardInterrupt):
            store.delete("m", "3", force=True)
    versions, aliases = store.versions("m"), store.aliases("m")
    assert ("3" in versions) == (step < 3)  # the number, `latest` and the version are renamed
    assert set(aliases.values()) <= {*versions}
    assert aliases["latest"] == ("3" if step < 2 else "2")
    for version in versions:
        store.open("m", version)
    if "3" in versions:
        store.delete("m", "3", force=True)
    assert store.aliases("m") == {"latest": "2"}
    assert store.publish("m", tiny_description(), tiny_files()).version == "4"
