import json
import os
import shutil
import tracemalloc
from contextlib import nullcontext
from itertools import islice

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from model_store.artifacts.manifest import FILES, NO_DIGEST, manifest_digest
from model_store.artifacts.signature import TrustedKeys
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, NotFound, UnsupportedFormat
from tests.support.stores import tiny_description, tiny_files

CONTENT, DESCRIPTION = tiny_files(), tiny_description()
MANIFEST = "manifest.json"


def _link(path):
    shutil.copy(path, path.parent.parent / "elsewhere")
    path.unlink()
    path.symlink_to(path.parent.parent / "elsewhere")


def _replace_by(create):
    def damage(path):
        path.unlink()
        create(path)

    return damage


# Ways to damage any file of a version, including the manifest, and the reason in the error.
DAMAGES = {
    "missing": (lambda path: path.unlink(), "No such file"),
    "folder": (_replace_by(lambda path: path.mkdir()), "directory"),
    "pipe": (_replace_by(os.mkfifo), ""),
    "link": (_link, "symbolic link"),
}


@pytest.mark.parametrize("file", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_missing_or_irregular_file_is_refused(published, damage, file):
    damage_file, reason = DAMAGES[damage]
    damage_file(published.root / "m" / "1" / file)
    assert_broken(published, file, reason)


@pytest.mark.parametrize("file", FILES)
def test_any_changed_byte_or_length_is_refused(published, file):
    path, content = published.root / "m" / "1" / file, CONTENT[file]
    for variant in flip_each_byte(content):
        path.write_bytes(variant)
        assert_broken(published, file, "SHA-256")
    for variant in [*(content[:length] for length in range(len(content))), content + b"\0"]:
        path.write_bytes(variant)
        reason = f"expected {len(content)} bytes as in the manifest, got {len(variant)}"
        assert_broken(published, file, reason)


def test_corrupt_or_truncated_manifest_is_refused(published):
    path = published.root / "m" / "1" / MANIFEST
    text = path.read_bytes()
    for variant in islice(flip_each_byte(text), 0, None, 5):
        path.write_bytes(variant)
        with pytest.raises((BrokenArtifact, UnsupportedFormat), match=r"manifest\.json"):
            published.manifest("m", "1")
    for length in range(0, len(text), 31):
        path.write_bytes(text[:length])
        assert_broken(published, MANIFEST, "is not valid JSON")


TEXTS = ["[]", "null", "3", "not JSON", "{}", "[" * 100_000, " " * (1 << 20) + " {}"]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:9])
def test_malformed_manifest_is_refused(published, text):
    (published.root / "m" / "1" / MANIFEST).write_text(text)
    assert_broken(published, MANIFEST, "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quality": {"accuracy": 0.75}}, "its SHA-256 is not its digest"),
        ({"quality": {"odd": 10**40}}, ""),
        ({"quality": {"odd": "\ud800"}}, ""),
        ({"name": "other"}, "it describes other version 1"),
        ({"version": "2"}, "it describes m version 2"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"method": None}, "method: Input should be a valid string"),
        ({"format_version": "1.0"}, "format_version"),
        ({"created": "2026-01-01T00:00:00"}, "created"),
        ({"files": {}}, "files"),
        ({"files": {"../../secret": {"sha256": "0" * 64, "size": 1}}}, "files"),
    ],
)
def test_manifest_with_invalid_field_is_refused(published, changes, reason):
    edit_manifest(published, **changes)
    assert_broken(published, MANIFEST, reason)


def edit_and_seal(store, **changes):
    """Edit the manifest of version 1 and update its digest."""
    edit_manifest(store, **changes, digest=NO_DIGEST)
    text = (store.root / "m" / "1" / MANIFEST).read_bytes()
    edit_manifest(store, digest=manifest_digest(text, NO_DIGEST))


def test_unknown_fields_of_newer_minor_format_are_ignored(published):
    manifest = published.manifest("m", "1")
    noise = {**manifest.noise.model_dump(), "colour": "white"}
    column = {"name": "a", "kind": "categorical", "categories": ["b"], "origin": "c"}
    spec = {**manifest.input.model_dump(), "shape": [2], "columns": [column]}
    edit_and_seal(published, format_minor=1, hints={"a": [1]}, noise=noise, input=spec)
    actual = published.manifest("m", "1")
    assert (actual.noise, actual.input.columns[0].name) == (manifest.noise, "a")
    edit_and_seal(published, format_minor=1, method=7)
    with pytest.raises(UnsupportedFormat, match="format_minor: expected up to 0, got 1"):
        published.manifest("m", "1")
    edit_and_seal(published, format_minor=0, method="mle", hints={})
    with pytest.raises(BrokenArtifact, match="Extra inputs are not permitted"):
        published.manifest("m", "1")


def test_error_names_unknown_format_version(published):
    edit_manifest(published, format_version=999, a_field_of_that_format={})
    message = "model m version 1: manifest.json: format_version: expected 1, got 999"
    for read in (published.open, published.manifest):
        with pytest.raises(UnsupportedFormat, match=message):
            read("m", "1")


def test_verifying_unloaded_file_takes_little_memory(store):
    file, large = "weights.safetensors", bytes(32 << 20)
    store.publish("m", DESCRIPTION, {**CONTENT, file: large})
    tracemalloc.start()
    assert file not in store.open("m", "1", files=()).files
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    (store.root / "m" / "1" / file).write_bytes(b"x" + large[1:])
    with pytest.raises(BrokenArtifact, match=f"{file}: its SHA-256"):
        store.open("m", "1", files=())


SMALL_FILES = ("1/manifest.json", "1/manifest.sig", "aliases/huge", "aliases/.last-deleted")


@pytest.mark.parametrize("file", [*(f"1/{file}" for file in FILES), *SMALL_FILES])
def test_huge_file_is_not_read_beyond_its_limit(published, file):
    key = Ed25519PrivateKey.generate()
    published.sign("m", "1", key)
    with (published.root / "m" / file).open("wb") as stream:
        stream.truncate(8 << 30)  # sparse
    tracemalloc.start()
    try:
        assert published.aliases("m")["latest"] == "1"
        with pytest.raises(BrokenArtifact) if file.startswith("1/") else nullcontext():
            ModelStore(published.root, TrustedKeys((key.public_key(),))).open("m", "1")
        assert published.publish("m", DESCRIPTION, CONTENT).version == "2"
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_symlinked_models_versions_and_aliases_are_ignored(published, tmp_path):
    folder, elsewhere = published.root / "m", tmp_path / "elsewhere"
    elsewhere.write_text("1")
    (published.root / "link").symlink_to(folder)
    (folder / "2").symlink_to(folder / "1")
    (folder / "aliases" / "champion").symlink_to(elsewhere)
    assert published.names() == ["m"]
    assert published.versions("m") == ["1"]
    assert published.aliases("m") == {"latest": "1"}
    with pytest.raises(NotFound, match="version: expected one of"):
        published.resolve("m", "2")
    for operation in (
        published.versions,
        published.resolve,
        lambda name: published.publish(name, DESCRIPTION, CONTENT),
    ):
        with pytest.raises(NotFound, match="a symbolic link"):
            operation("link")


def test_symlinked_alias_folder_is_not_followed(published, tmp_path):
    published.publish("m", DESCRIPTION, CONTENT)
    (published.root / "m" / "aliases").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "latest").write_text("1")
    (published.root / "m" / "aliases").symlink_to(tmp_path / "elsewhere")
    assert published.aliases("m") == {}


def flip_each_byte(content):
    for position in range(len(content)):
        variant = bytearray(content)
        variant[position] ^= 1 << (position % 8)
        yield bytes(variant)


def assert_broken(store, file, reason):
    with pytest.raises(BrokenArtifact) as exc_info:
        store.open("m", "1")
    assert exc_info.value.file == file
    assert str(exc_info.value).startswith(f"model m version 1: {file}: ")
    assert reason in str(exc_info.value)
    assert str(store.root) not in str(exc_info.value)


def edit_manifest(store, **changes):
    path = store.root / "m" / "1" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
