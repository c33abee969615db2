from itertools import count

import pytest

from model_store.artifacts.manifest import FILES
from model_store.artifacts.store import ModelStore
from model_store.errors import InvalidInput, NotFound
from tests.support.faulty_bucket import FaultyBucket
from tests.support.storage_properties import PROPERTIES
from tests.support.stores import tiny_description, tiny_files


@pytest.fixture(params=["folder", "bucket"])
def make(request, tmp_path):
    if request.param == "folder":
        return lambda: ModelStore(tmp_path / "models")
    server, numbers = FaultyBucket(), count()
    return lambda: server.store(tmp_path / str(next(numbers)))


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_a_store_has_the_property(make, check):
    check(make)


def test_a_folder_holds_only_the_files_of_the_format_and_ignores_others(published):
    folder = published.root / "m"
    assert {entry.name for entry in folder.iterdir()} == {".lock", "1", "aliases"}
    assert {entry.name for entry in (folder / "1").iterdir()} == {*FILES, "manifest.json"}
    (published.root / "empty").mkdir()
    (published.root / "file").write_text("")
    (folder / "aliases" / "champion").write_text("7")
    (folder / "aliases" / "latest").write_bytes(b"\xff\xfe")
    assert published.names() == ["m"]
    assert published.aliases("m") == {"latest": "1"}


@pytest.mark.parametrize("alias", ["", "3", ".hidden", "a/b", "../x", "a" * 65, "new\nline"])
def test_an_invalid_alias_is_refused(published, alias):
    with pytest.raises(InvalidInput, match="alias: expected"):
        published.set_alias("m", alias, "1")


@pytest.mark.parametrize("version", ["2", "0", "01", "unknown", "", "..", "1/"])
def test_an_unknown_version_is_refused(published, version):
    for use in (
        lambda: published.set_alias("m", "champion", version),
        lambda: published.resolve("m", version),
    ):
        with pytest.raises(
            NotFound, match=r"version: expected one of \['1', 'latest'\] of model m"
        ):
            use()


def test_a_publication_under_another_alias_leaves_latest_in_place(store):
    store.publish("m", tiny_description(), tiny_files())
    # A writer that was killed between the version and its alias leaves no `latest`.
    (store.root / "m" / "aliases" / "latest").unlink()
    store.publish("m", tiny_description(), tiny_files(), alias="candidate")
    assert store.aliases("m") == {"latest": "1", "candidate": "2"}
