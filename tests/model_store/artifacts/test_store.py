import shutil
from itertools import count

import pytest

from model_store.artifacts.manifest import FILES
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenAlias, InvalidInput, NotFound
from tests.support.faulty_bucket import FaultyBucket
from tests.support.storage_properties import PROPERTIES
from tests.support.stores import tiny_description, tiny_files


@pytest.fixture(params=["folder", "bucket"])
def make_store(request, tmp_path):
    if request.param == "folder":
        return lambda: ModelStore(tmp_path / "models")
    server, numbers = FaultyBucket(), count()
    return lambda: server.store(tmp_path / str(next(numbers)))


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_store_property(make_store, check):
    check(make_store)


def test_folder_contains_only_format_files_and_ignores_others(published):
    folder = published.root / "m"
    assert {entry.name for entry in folder.iterdir()} == {".lock", "1", "aliases"}
    assert {entry.name for entry in (folder / "1").iterdir()} == {*FILES, "manifest.json"}
    (published.root / "empty").mkdir()
    (published.root / "file").write_text("")
    assert published.names() == ["m"]


@pytest.mark.parametrize(
    "content", [b"", b"v1", b"1.0", b"999", b"\xef\xbb\xbf1", b"\xff\xfe", b"one", b"01", b"-1"]
)
def test_corrupt_alias_is_reported_and_never_guessed(published, content):
    published.publish("m", tiny_description(), tiny_files())
    (published.root / "m" / "aliases" / "latest").write_bytes(content)
    aliases = published.read_aliases("m")
    assert (aliases.versions, list(aliases.problems)) == ({}, ["latest"])
    with pytest.raises(BrokenAlias, match="model m: alias latest"):
        published.resolve("m")
    with pytest.raises(InvalidInput, match="alias latest"):
        published.keep("m", 1)
    published.publish("m", tiny_description(), tiny_files(), alias="candidate")
    assert published.aliases("m") == {"candidate": "3"}
    published.set_alias("m", "latest", "2")
    assert published.aliases("m") == {"candidate": "3", "latest": "2"}


def test_model_without_aliases_has_no_latest_version(published):
    shutil.rmtree(published.root / "m" / "aliases")
    assert published.read_aliases("m").problems == {"latest": "alias latest is missing"}
    assert not published.was_deleted("m")
    with pytest.raises(BrokenAlias, match="alias latest is missing"):
        published.resolve("m")


@pytest.mark.parametrize("alias", ["", "3", ".hidden", "a/b", "../x", "a" * 65, "new\nline"])
def test_invalid_alias_name_is_refused(published, alias):
    with pytest.raises(InvalidInput, match="alias: expected"):
        published.set_alias("m", alias, "1")


@pytest.mark.parametrize("version", ["2", "0", "01", "unknown", "", "..", "1/"])
def test_unknown_version_is_refused(published, version):
    for operation in (
        lambda: published.set_alias("m", "champion", version),
        lambda: published.resolve("m", version),
    ):
        with pytest.raises(NotFound, match=r"version: expected one of 1, latest of model m"):
            operation()


def test_publishing_under_another_alias_does_not_set_latest(store):
    store.publish("m", tiny_description(), tiny_files(), alias="candidate")
    assert store.aliases("m") == {"candidate": "1"}
    with pytest.raises(NotFound, match="version: expected one of"):
        store.resolve("m")
