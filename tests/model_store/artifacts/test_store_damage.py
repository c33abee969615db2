"""What is damaged, linked or badly named in a store is refused, and named."""

import json
import os
import shutil
import tracemalloc
from contextlib import nullcontext

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from model_store.artifacts.manifest import FILES
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, NotFound, UnsupportedFormat
from tests.support.stores import tiny_description, tiny_files

CONTENT, DESCRIPTION = tiny_files(), tiny_description()


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
    for content in [CONTENT[file][:length] for length in range(len(CONTENT[file]))] + [
        CONTENT[file] + b"\0"
    ]:
        path.write_bytes(content)
        assert_broken(
            published,
            file,
            f"expected {len(CONTENT[file])} bytes as in the manifest, got {len(content)}",
        )


def test_a_file_that_is_not_wanted_is_verified_all_the_same_and_in_little_memory(store):
    file, large = "weights.safetensors", bytes(32 << 20)
    store.publish("m", DESCRIPTION, {**CONTENT, file: large})
    path = store.root / "m" / "1" / file
    tracemalloc.start()
    assert file not in store.open("m", "1", wanted=()).files
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    path.write_bytes(b"x" + large[1:])
    with pytest.raises(BrokenArtifact, match=f"{file}: its SHA-256"):
        store.open("m", "1", wanted=())
    for size in (len(large) - 1, len(large) + 1, 0):
        with path.open("r+b") as changed:
            changed.truncate(size)
        with pytest.raises(
            BrokenArtifact,
            match=f"{file}: expected {len(large)} bytes as in the manifest, got {size}",
        ):
            store.open("m", "1", wanted=())


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


def test_every_changed_byte_of_the_manifest_is_found(published):
    path = published.root / "m" / "1" / "manifest.json"
    text = path.read_bytes()
    for position in range(len(text)):
        changed = bytearray(text)
        changed[position] ^= 1 << (position % 8)
        path.write_bytes(changed)
        with pytest.raises((BrokenArtifact, UnsupportedFormat), match=r"manifest\.json"):
            published.manifest("m", "1")


def test_a_manifest_with_another_digit_in_a_number_is_broken(published):
    edit_manifest(published, quality={"accuracy": 0.75})
    assert_broken(published, "manifest.json", "its SHA-256 is not its digest")


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


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", "not JSON", "{}", "[" * 100_000], ids=lambda text: text[:9]
)
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
    for use in (
        published.versions,
        published.resolve,
        lambda name: published.publish(name, DESCRIPTION, CONTENT),
    ):
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


SMALL_FILES = ("1/manifest.json", "1/manifest.sig", "aliases/huge", "aliases/.last-deleted")


@pytest.mark.parametrize("file", [*(f"1/{file}" for file in FILES), *SMALL_FILES])
def test_no_file_of_gigabytes_is_read_beyond_what_it_may_have(published, file):
    key = Ed25519PrivateKey.generate()
    published.sign("m", "1", key)
    (published.root / "m" / "aliases").mkdir(exist_ok=True)
    with (published.root / "m" / file).open("wb") as opened:
        opened.truncate(8 << 30)  # sparse
    is_of_version = file.startswith("1/")
    tracemalloc.start()
    try:
        assert published.aliases("m")["latest"] == "1"
        with pytest.raises(BrokenArtifact) if is_of_version else nullcontext():
            ModelStore(published.root, key.public_key()).open("m", "1")
        with published.storage.writing("m"):
            assert published.storage.last_number("m") == 1
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_linked_alias_is_not_followed(published, tmp_path):
    (tmp_path / "elsewhere").write_text("1")
    (published.root / "m" / "aliases" / "champion").symlink_to(tmp_path / "elsewhere")
    assert published.aliases("m") == {"latest": "1"}


def test_a_linked_folder_of_aliases_is_not_followed(published, tmp_path):
    published.publish("m", DESCRIPTION, CONTENT)
    (published.root / "m" / "aliases").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "latest").write_text("1")
    (published.root / "m" / "aliases").symlink_to(tmp_path / "elsewhere")
    assert published.aliases("m") == {"latest": "2"}


def test_the_longest_name_is_good(store):
    store.publish("a" * 64, DESCRIPTION, CONTENT)
    assert store.names() == ["a" * 64]


# Helpers


def assert_broken(store, file, reason):
    with pytest.raises(BrokenArtifact) as raised:
        store.open("m", "1")
    assert raised.value.file == file
    assert str(raised.value).startswith(f"model m version 1: {file}: ")
    assert reason in str(raised.value)
    assert str(store.root) not in str(raised.value)


def edit_manifest(store, **changes):
    path = store.root / "m" / "1" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
