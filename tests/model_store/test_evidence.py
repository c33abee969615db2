"""Evidence cards: beside the version, whole or not at all, replaced as a whole, gone with the version."""

import shutil

import pytest
from conftest import refused

from model_store.errors import BrokenArtifact, NotFound
from model_store.evidence import CARD, evidence, publish_evidence
from model_store.manifest import FILES, Description
from model_store.store import ModelStore


@pytest.fixture
def store(tmp_path, digits_store):
    shutil.copytree(digits_store, tmp_path / "models")
    return ModelStore(tmp_path / "models")


def test_a_card_comes_back_and_the_stores_listing_stays(store):
    before = store.names(), store.versions("digits"), store.aliases("digits"), store.manifest("digits", "1")
    assert evidence(store, "digits", "1") is None
    publish_evidence(store, "digits", "1", {"seed": 3}, {"evidence.md": b"text", "roc.png": b"picture"})
    found = evidence(store, "digits", "1")
    assert found.card == {"seed": 3, "files": ["evidence.md", "roc.png"]}
    assert found.files == (CARD, "evidence.md", "roc.png")
    assert found.read("roc.png") == b"picture"
    assert (store.names(), store.versions("digits"), store.aliases("digits"), store.manifest("digits", "1")) == before
    store.open("digits", "1")


def test_a_later_card_takes_the_place_of_an_earlier_one_as_a_whole(store):
    publish_evidence(store, "digits", "1", {"seed": 1}, {"old.png": b"1"})
    before = evidence(store, "digits", "1")
    publish_evidence(store, "digits", "1", {"seed": 2}, {"new.png": b"2"})
    after = evidence(store, "digits", "1")
    assert (after.card["seed"], after.files) == (2, (CARD, "new.png"))
    assert [path.name for path in (store.root / "digits" / "evidence" / "1").iterdir()] == ["2"]
    with pytest.raises(NotFound):
        before.read("old.png")


def test_a_writer_killed_half_way_leaves_the_old_card(store):
    publish_evidence(store, "digits", "1", {"seed": 1}, {})
    draft = store.root / "digits" / ".draft-killed"
    draft.mkdir()
    (draft / "roc.png").write_bytes(b"half")
    assert evidence(store, "digits", "1").card["seed"] == 1
    publish_evidence(store, "digits", "1", {"seed": 2}, {})
    assert not draft.exists()


def test_files_that_are_not_on_the_card_are_not_read(store):
    publish_evidence(store, "digits", "1", {}, {"a.png": b"1"})
    found = evidence(store, "digits", "1")
    (found.folder / "secret").write_bytes(b"secret")
    for file in ("secret", "../../../1/manifest.json", "/etc/passwd", "", ".", "a.png/"):
        with pytest.raises(NotFound):
            found.read(file)
    (found.folder / "a.png").unlink()
    (found.folder / "a.png").symlink_to(found.folder / "secret")
    with pytest.raises(NotFound):
        found.read("a.png")


def test_names_that_are_not_files_are_refused_and_nothing_is_written(store):
    for name in ("../a", "a/b", ".hidden", CARD, ""):
        refused(lambda name=name: publish_evidence(store, "digits", "1", {}, {name: b""}), "files")
    for version in ("2", "latest", "../1"):
        with pytest.raises(NotFound):
            publish_evidence(store, "digits", version if version != "latest" else "3", {}, {})
        with pytest.raises(NotFound):
            evidence(store, "digits", version)
    assert evidence(store, "digits", "1") is None


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"files": ["../a"]}', b'{"files": 3}', b"\xff", None])
def test_a_damaged_card_is_named(store, content):
    found = publish_evidence(store, "digits", "1", {}, {})
    (found.folder / CARD).unlink()
    if content is not None:
        (found.folder / CARD).write_bytes(content)
    with pytest.raises(BrokenArtifact, match=r"digits version 1: evidence\.json"):
        evidence(store, "digits", "1")


def test_a_card_goes_with_its_version(store):
    artifact = store.open("digits", "1")
    description = Description.model_validate(artifact.manifest.model_dump(include=set(Description.model_fields)))
    store.publish("digits", description, {file: artifact.files[file] for file in FILES})
    for version in ("1", "2"):
        publish_evidence(store, "digits", version, {"of": version}, {})
    assert store.keep("digits", 1) == ["1"]
    assert [path.name for path in (store.root / "digits" / "evidence").iterdir()] == ["2"]
    assert evidence(store, "digits", "2").card["of"] == "2"
