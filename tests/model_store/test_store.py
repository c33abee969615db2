"""The model store: round trips, aliases, corruption, links, names, killed writers, writers at once, a full disk."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model_store.errors import BrokenArtifact, InvalidInput, NotFound, UnsupportedFormat
from model_store.manifest import FILES, Description
from model_store.store import ModelStore

ROOT = Path(__file__).parent.parent.parent
CONTENT = {file: f"the bytes of {file}".encode() for file in FILES}
DESCRIPTION = Description.model_validate(
    {
        "method": "test",
        "task": "classification",
        "input": {"shape": [2, 3], "minimum": 0, "maximum": 1},
        "output": {"classes": ["no", "yes"]},
        "noise": {
            "algorithm": "none",
            "dimension": 1,
            "theta_dimension": 1,
            "paired": True,
            "default_draws": 3,
        },
        "detectors": {
            "density": [],
            "combined": ["bald"],
            "draw_counts": [1, 3],
            "reference_rows": 10,
            "ranking_rows": 10,
            "smallest_fpr": 1 / 11,
        },
        "training": {"note": "Ünïcode", "nested": {"steps": [1, 2.5, None]}},
        "quality": {"test_accuracy": 0.5},
        "parity": {"theta": 0.0},
    }
)


@pytest.fixture
def store(tmp_path):
    return ModelStore(tmp_path / "models")


@pytest.fixture
def published(store):
    store.publish("m", DESCRIPTION, CONTENT)
    return store


# Publishing and reading


def test_what_was_published_is_what_is_opened(store):
    manifest = store.publish("m", DESCRIPTION, CONTENT)
    artifact = store.open("m", store.resolve("m"))
    assert artifact.manifest == manifest
    assert artifact.files == CONTENT
    assert Description.model_validate({k: getattr(manifest, k) for k in Description.model_fields}) == DESCRIPTION
    assert {file: spec.size for file, spec in manifest.files.items()} == {f: len(c) for f, c in CONTENT.items()}
    assert all(spec.sha256 == hashlib.sha256(CONTENT[file]).hexdigest() for file, spec in manifest.files.items())


def test_only_wanted_files_are_kept(published):
    assert published.open("m", "1", wanted=("network.onnx",)).files == {"network.onnx": CONTENT["network.onnx"]}


def test_a_version_holds_its_five_files_and_nothing_else(published):
    assert {entry.name for entry in (published.root / "m").iterdir()} == {".lock", "1", "aliases"}
    assert {entry.name for entry in (published.root / "m" / "1").iterdir()} == {*FILES, "manifest.json"}


def test_version_numbers_grow_and_sort_as_numbers(store):
    for number in range(1, 12):
        assert store.publish("m", DESCRIPTION, CONTENT).version == str(number)
    assert store.versions("m") == [str(number) for number in range(1, 12)]
    assert store.resolve("m") == "11"


def test_a_number_is_not_given_again_while_a_later_version_stands(store):
    for _ in range(3):
        store.publish("m", DESCRIPTION, CONTENT)
    assert store.keep("m", 1) == ["1", "2"]
    assert store.publish("m", DESCRIPTION, CONTENT).version == "4"


def test_an_empty_store_has_no_models(store):
    assert store.names() == []
    assert store.versions("m") == []
    assert store.aliases("m") == {}
    with pytest.raises(NotFound, match=r"model: expected one of \[\], got 'm'"):
        store.resolve("m")


def test_models_are_listed_by_name(store):
    for name in ("b", "a.2-x_Y", "0"):
        store.publish(name, DESCRIPTION, CONTENT)
    (store.root / "empty").mkdir()
    (store.root / "file").write_text("")
    assert store.names() == ["0", "a.2-x_Y", "b"]


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_set_of_files_that_is_not_the_formats_is_refused(store, change):
    files = dict(CONTENT)
    if change == "missing":
        del files["sampler.onnx"]
    else:
        files["extra.bin"] = b""
    with pytest.raises(InvalidInput, match="files: expected"):
        store.publish("m", DESCRIPTION, files)
    assert store.names() == []


# Aliases


def test_latest_follows_publishing_and_can_be_rolled_back(store):
    for _ in range(2):
        store.publish("m", DESCRIPTION, CONTENT)
    store.set_alias("m", "latest", "1")
    assert store.resolve("m") == store.resolve("m", "latest") == "1"
    store.publish("m", DESCRIPTION, CONTENT)
    assert store.resolve("m") == "3"


def test_an_alias_moves_and_may_name_what_another_names(store):
    for _ in range(3):
        store.publish("m", DESCRIPTION, CONTENT)
    store.set_alias("m", "champion", "2")
    store.set_alias("m", "candidate", "champion")
    store.set_alias("m", "champion", "1")
    assert store.aliases("m") == {"latest": "3", "champion": "1", "candidate": "2"}
    assert store.resolve("m", "candidate") == "2"


@pytest.mark.parametrize("alias", ["", "3", ".hidden", "a/b", "../x", "a" * 65, "new\nline"])
def test_an_alias_that_is_no_name_or_a_number_is_refused(published, alias):
    with pytest.raises(InvalidInput, match="alias: expected"):
        published.set_alias("m", alias, "1")


@pytest.mark.parametrize("version", ["2", "0", "01", "unknown", "", "..", "1/"])
def test_an_alias_of_nothing_and_an_unknown_version_are_refused(published, version):
    with pytest.raises(NotFound, match=r"version: expected one of \['1', 'latest'\] of model m"):
        published.set_alias("m", "champion", version)
    with pytest.raises(NotFound, match="version: expected one of"):
        published.resolve("m", version)


def test_an_alias_that_names_no_version_is_as_if_it_were_not_there(published):
    (published.root / "m" / "aliases" / "champion").write_text("7")
    (published.root / "m" / "aliases" / "latest").write_bytes(b"\xff\xfe")
    assert published.aliases("m") == {"latest": "1"}


# The keep rule


def test_keeping_deletes_all_but_the_newest_and_those_with_an_alias(store):
    for _ in range(6):
        store.publish("m", DESCRIPTION, CONTENT)
    store.set_alias("m", "champion", "2")
    assert store.keep("m", 2) == ["1", "3", "4"]
    assert store.versions("m") == ["2", "5", "6"]
    assert store.keep("m", 2) == []
    assert not [entry for entry in (store.root / "m").iterdir() if entry.name.startswith(".deleted")]


def test_keeping_spares_what_latest_was_rolled_back_to(store):
    for _ in range(3):
        store.publish("m", DESCRIPTION, CONTENT)
    store.set_alias("m", "latest", "1")
    assert store.keep("m", 1) == ["2"]
    assert store.resolve("m") == "1"


def test_keeping_none_or_of_no_model_is_refused(published):
    with pytest.raises(InvalidInput, match="newest: expected at least 1, got 0"):
        published.keep("m", 0)
    with pytest.raises(NotFound, match="model: expected one of"):
        published.keep("other", 1)


# Corruption


@pytest.mark.parametrize("file", FILES)
def test_every_changed_byte_is_found(published, file):
    path = published.root / "m" / "1" / file
    for position in range(len(CONTENT[file])):
        content = bytearray(CONTENT[file])
        content[position] ^= 1 << (position % 8)
        path.write_bytes(content)
        assert_broken(published, file, "SHA-256")


@pytest.mark.parametrize("file", FILES)
def test_every_truncation_and_lengthening_is_found(published, file):
    path = published.root / "m" / "1" / file
    for content in [CONTENT[file][:length] for length in range(len(CONTENT[file]))] + [CONTENT[file] + b"\0"]:
        path.write_bytes(content)
        assert_broken(published, file, f"expected {len(CONTENT[file])} bytes as in the manifest, got {len(content)}")


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_a_missing_file_is_found(published, file):
    (published.root / "m" / "1" / file).unlink()
    assert_broken(published, file, "No such file")


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_a_folder_or_a_pipe_in_place_of_a_file_is_refused_without_waiting(published, file):
    path = published.root / "m" / "1" / file
    path.unlink()
    path.mkdir()
    assert_broken(published, file, "directory")
    path.rmdir()
    os.mkfifo(path)
    assert_broken(published, file, "")


def test_every_truncation_of_the_manifest_is_found(published):
    path = published.root / "m" / "1" / "manifest.json"
    text = path.read_bytes()
    for length in range(0, len(text), 7):
        path.write_bytes(text[:length])
        assert_broken(published, "manifest.json", "is not valid JSON")


def test_a_manifest_too_large_to_be_one_is_refused(published):
    (published.root / "m" / "1" / "manifest.json").write_bytes(b" " * (1 << 20) + b" {}")
    assert_broken(published, "manifest.json", "")


@pytest.mark.parametrize("format_version", [0, 2, 999])
def test_an_unknown_format_is_told_from_a_broken_artifact(published, format_version):
    edit_manifest(published, format_version=format_version, a_field_of_that_format={})
    for read in (published.open, published.manifest):
        with pytest.raises(
            UnsupportedFormat,
            match=f"model m version 1: manifest.json: format_version: expected 1, got {format_version}",
        ):
            read("m", "1")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "other"}, "it describes other version 1"),
        ({"version": "2"}, "it describes m version 2"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"method": None}, "method: Input should be a valid string"),
        ({"format_version": "1.0"}, "format_version"),
        ({"created": "2026-01-01T00:00:00"}, "created"),
        ({"files": {}}, "files"),
    ],
)
def test_a_manifest_that_says_the_wrong_thing_is_refused(published, changes, reason):
    edit_manifest(published, **changes)
    assert_broken(published, "manifest.json", reason)


def test_a_manifest_cannot_name_files_elsewhere(published):
    files = json.loads((published.root / "m" / "1" / "manifest.json").read_text())["files"]
    edit_manifest(published, files={**files, "../../secret": files["sampler.onnx"]})
    assert_broken(published, "manifest.json", "files: expected")


@pytest.mark.parametrize("text", ["[]", "null", "3", "not JSON", "{}"])
def test_a_manifest_that_is_not_one_is_refused(published, text):
    (published.root / "m" / "1" / "manifest.json").write_text(text)
    assert_broken(published, "manifest.json", "")


def test_other_versions_stay_readable_beside_a_broken_one(published):
    published.publish("m", DESCRIPTION, CONTENT)
    (published.root / "m" / "1" / "network.onnx").write_bytes(b"")
    assert published.open("m", "2").files == CONTENT


# Links and names


def test_a_linked_model_is_not_there(published):
    (published.root / "link").symlink_to(published.root / "m")
    assert published.names() == ["m"]
    for use in (published.versions, published.resolve, lambda name: published.publish(name, DESCRIPTION, CONTENT)):
        with pytest.raises(NotFound, match="link is a symbolic link"):
            use("link")


def test_a_linked_version_is_not_there(published):
    (published.root / "m" / "2").symlink_to(published.root / "m" / "1")
    assert published.versions("m") == ["1"]
    with pytest.raises(NotFound, match="version: expected one of"):
        published.resolve("m", "2")


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_a_linked_file_is_refused(published, tmp_path, file):
    path = published.root / "m" / "1" / file
    shutil.copy(path, tmp_path / "elsewhere")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert_broken(published, file, "symbolic link")


def test_a_linked_alias_is_not_followed(published, tmp_path):
    (tmp_path / "elsewhere").write_text("1")
    (published.root / "m" / "aliases" / "champion").symlink_to(tmp_path / "elsewhere")
    assert published.aliases("m") == {"latest": "1"}


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/tmp", ".hidden", "-x", "a" * 65, "a b", "a\n", "ä"])
def test_bad_names_are_refused(store, name):
    with pytest.raises(InvalidInput, match="name: expected a name matching"):
        store.publish(name, DESCRIPTION, CONTENT)
    for read in (store.versions, store.aliases, store.resolve):
        with pytest.raises(NotFound, match="model: expected a name matching"):
            read(name)
    assert not store.root.exists()


def test_the_longest_name_is_good(store):
    store.publish("a" * 64, DESCRIPTION, CONTENT)
    assert store.names() == ["a" * 64]


# Writers that are killed, that write at once, that run out of space


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
from model_store.manifest import FILES, Description
from model_store.store import ModelStore

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
    """A process forks writers that publish, move an alias and delete without end, and kills each at random."""
    program = PUBLISHER + (
        "left = 0\n"
        "publish(10)\n"
        "for round in range(50):\n"
        "    writer = os.fork()\n"
        "    while writer == 0:\n"
        "        version = publish(100_000)\n"
        "        store.set_alias('m', 'champion', version)\n"
        "        store.keep('m', 3)\n"
        "    time.sleep(random.uniform(0.0, 0.06))\n"
        "    os.kill(writer, signal.SIGKILL)\n"
        "    os.waitpid(writer, 0)\n"
        "    left += any(store.root.glob('m/.d*')) or any(store.root.glob('m/aliases/.d*'))\n"
        "    versions = store.versions('m')\n"
        "    assert versions\n"
        "    for version in {*versions, *map(lambda a: store.resolve('m', a), store.aliases('m'))}:\n"
        "        store.open('m', version)\n"
        "print(left, versions[-1])\n"
    )
    process = start(program, store)
    output, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    left, newest = map(int, output.split())
    assert left > 0  # some writer was in the middle of something
    assert newest > 1
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


def assert_broken(store, file, reason):
    with pytest.raises(BrokenArtifact) as raised:
        store.open("m", "1")
    assert raised.value.file == file
    assert str(raised.value).startswith(f"model m version 1: {file}: ")
    assert reason in str(raised.value)
    assert str(store.root) not in str(raised.value)


def assert_all_whole(store):
    for version in store.versions("m"):
        assert store.open("m", version).manifest.version == version


def edit_manifest(store, **changes):
    path = store.root / "m" / "1" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def start(program, store):
    command = [sys.executable, "-c", program, str(store.root), DESCRIPTION.model_dump_json()]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
