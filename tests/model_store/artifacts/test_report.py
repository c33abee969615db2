"""Evaluation reports: next to the version, whole or not at all, replaced as a whole, gone with the
version."""

import pytest

from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.report import evaluation_report, publish_report
from model_store.artifacts.storage import REPORT
from model_store.errors import BrokenArtifact, NotFound
from tests.support.refusals import refused


def test_a_card_comes_back_and_the_stores_listing_stays(own_store):
    before = (
        own_store.names(),
        own_store.versions("digits"),
        own_store.aliases("digits"),
        own_store.manifest("digits", "1"),
    )
    assert evaluation_report(own_store, "digits", "1") is None
    publish_report(
        own_store, "digits", "1", {"seed": 3}, {"report.html": b"text", "roc.png": b"picture"}
    )
    found = evaluation_report(own_store, "digits", "1")
    assert found.report == {"seed": 3, "files": ["report.html", "roc.png"]}
    assert found.files == (REPORT, "report.html", "roc.png")
    assert found.read("roc.png") == b"picture"
    assert (
        own_store.names(),
        own_store.versions("digits"),
        own_store.aliases("digits"),
        own_store.manifest("digits", "1"),
    ) == before
    own_store.open("digits", "1")


def test_a_later_card_takes_the_place_of_an_earlier_one_as_a_whole(own_store):
    publish_report(own_store, "digits", "1", {"seed": 1}, {"old.png": b"1"})
    before = evaluation_report(own_store, "digits", "1")
    publish_report(own_store, "digits", "1", {"seed": 2}, {"new.png": b"2"})
    after = evaluation_report(own_store, "digits", "1")
    assert (after.report["seed"], after.files) == (2, (REPORT, "new.png"))
    assert [path.name for path in (own_store.root / "digits" / "reports" / "1").iterdir()] == ["2"]
    with pytest.raises(NotFound):
        before.read("old.png")


def test_a_writer_killed_half_way_leaves_the_old_card(own_store):
    publish_report(own_store, "digits", "1", {"seed": 1}, {})
    draft = own_store.root / "digits" / ".draft-killed"
    draft.mkdir()
    (draft / "roc.png").write_bytes(b"half")
    assert evaluation_report(own_store, "digits", "1").report["seed"] == 1
    publish_report(own_store, "digits", "1", {"seed": 2}, {})
    assert not draft.exists()


def test_files_that_are_not_on_the_card_are_not_read(own_store):
    publish_report(own_store, "digits", "1", {}, {"a.png": b"1"})
    found = evaluation_report(own_store, "digits", "1")
    (found.folder / "secret").write_bytes(b"secret")
    for file in ("secret", "../../../1/manifest.json", "/etc/passwd", "", ".", "a.png/"):
        with pytest.raises(NotFound):
            found.read(file)
    (found.folder / "a.png").unlink()
    (found.folder / "a.png").symlink_to(found.folder / "secret")
    with pytest.raises(NotFound):
        found.read("a.png")


def test_names_that_are_not_files_are_refused_and_nothing_is_written(own_store):
    for name in ("../a", "a/b", ".hidden", REPORT, ""):
        refused(
            lambda name=name: publish_report(own_store, "digits", "1", {}, {name: b""}), "files"
        )
    for version in ("2", "latest", "../1"):
        with pytest.raises(NotFound):
            publish_report(own_store, "digits", version if version != "latest" else "3", {}, {})
        with pytest.raises(NotFound):
            evaluation_report(own_store, "digits", version)
    assert evaluation_report(own_store, "digits", "1") is None


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"files": ["../a"]}', b'{"files": 3}', b"\xff", None]
)
def test_a_damaged_card_is_named(own_store, content):
    found = publish_report(own_store, "digits", "1", {}, {})
    (found.folder / REPORT).unlink()
    if content is not None:
        (found.folder / REPORT).write_bytes(content)
    with pytest.raises(BrokenArtifact, match=r"digits version 1: report\.json"):
        evaluation_report(own_store, "digits", "1")


def test_a_card_goes_with_its_version(own_store):
    artifact = own_store.open("digits", "1")
    description = Description.model_validate(
        artifact.manifest.model_dump(include=set(Description.model_fields))
    )
    own_store.publish("digits", description, {file: artifact.files[file] for file in FILES})
    for version in ("1", "2"):
        publish_report(own_store, "digits", version, {"of": version}, {})
    assert own_store.keep("digits", 1) == ["1"]
    assert [path.name for path in (own_store.root / "digits" / "reports").iterdir()] == ["2"]
    assert evaluation_report(own_store, "digits", "2").report["of"] == "2"
