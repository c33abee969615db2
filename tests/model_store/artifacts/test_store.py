"""The model store: round trips, aliases, the keep rule."""

import hashlib

import pytest

from model_store.artifacts.manifest import FILES, Description
from model_store.errors import InvalidInput, NotFound
from tests.support.stores import tiny_description, tiny_files

CONTENT, DESCRIPTION = tiny_files(), tiny_description()


# Publishing and reading


def test_what_was_published_is_what_is_opened(store):
    manifest = store.publish("m", DESCRIPTION, CONTENT)
    artifact = store.open("m", store.resolve("m"))
    assert artifact.manifest == manifest
    assert artifact.files == CONTENT
    assert (
        Description.model_validate({k: getattr(manifest, k) for k in Description.model_fields})
        == DESCRIPTION
    )
    assert {file: spec.size for file, spec in manifest.files.items()} == {
        f: len(c) for f, c in CONTENT.items()
    }
    assert all(
        spec.sha256 == hashlib.sha256(CONTENT[file]).hexdigest()
        for file, spec in manifest.files.items()
    )


def test_only_wanted_files_are_kept(published):
    assert published.open("m", "1", wanted=("network.onnx",)).files == {
        "network.onnx": CONTENT["network.onnx"]
    }


def test_a_version_holds_its_five_files_and_nothing_else(published):
    assert {entry.name for entry in (published.root / "m").iterdir()} == {".lock", "1", "aliases"}
    assert {entry.name for entry in (published.root / "m" / "1").iterdir()} == {
        *FILES,
        "manifest.json",
    }


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
    assert not [
        entry for entry in (store.root / "m").iterdir() if entry.name.startswith(".deleted")
    ]


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


def test_a_version_published_under_another_alias_leaves_latest_where_it_is(store):
    store.publish("m", DESCRIPTION, CONTENT)
    (
        store.root / "m" / "aliases" / "latest"
    ).unlink()  # as after a kill between the version and its alias
    assert store.publish("m", DESCRIPTION, CONTENT, alias="candidate").version == "2"
    assert store.aliases("m") == {"latest": "1", "candidate": "2"}
    store.publish("n", DESCRIPTION, CONTENT, alias="candidate")
    assert store.aliases("n") == {"latest": "1", "candidate": "1"}
