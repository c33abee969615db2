import pytest

from model_store.artifacts.report import evaluation_report, publish_report
from model_store.artifacts.storage import REPORT
from model_store.errors import BrokenArtifact, NotFound
from tests.support.refusals import refused


def test_only_files_of_the_report_are_read(published):
    publish_report(published, "m", "1", {}, {"a.png": b"1"})
    actual = evaluation_report(published, "m", "1")
    folder = published.root / actual.path
    (folder / "secret").write_bytes(b"secret")
    for file in ("secret", "../../../1/manifest.json", "/etc/passwd", "", ".", "a.png/"):
        with pytest.raises(NotFound):
            actual.read(file)
    (folder / "a.png").unlink()
    (folder / "a.png").symlink_to(folder / "secret")
    with pytest.raises(NotFound):
        actual.read("a.png")


def test_invalid_names_and_versions_are_refused_and_nothing_is_written(published):
    for name in ("../a", "a/b", ".hidden", REPORT, ""):
        refused(lambda name=name: publish_report(published, "m", "1", {}, {name: b""}), "files")
    for version in ("2", "latest", "../1"):
        with pytest.raises(NotFound):
            publish_report(published, "m", version if version != "latest" else "3", {}, {})
        with pytest.raises(NotFound):
            evaluation_report(published, "m", version)
    assert evaluation_report(published, "m", "1") is None


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"files": ["../a"]}', b'{"files": 3}', b"\xff"])
def test_a_damaged_report_is_named(published, content):
    actual = publish_report(published, "m", "1", {}, {})
    (published.root / actual.path / REPORT).write_bytes(content)
    with pytest.raises(BrokenArtifact, match=r"m version 1: report\.json"):
        evaluation_report(published, "m", "1")
