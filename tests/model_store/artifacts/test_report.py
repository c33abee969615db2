import pytest

from model_store.artifacts.report import PAGE, evaluation_report, publish_report
from model_store.artifacts.storage import REPORT
from model_store.errors import BrokenArtifact, NotFound


def test_only_report_files_can_be_read(published):
    publish_report(published, "m", "1", {}, b"1")
    report = evaluation_report(published, "m", "1")
    folder = published.root / report.path
    (folder / "secret").write_bytes(b"secret")
    for file in ("secret", "../../../1/manifest.json", "/etc/passwd", "", ".", f"{PAGE}/"):
        with pytest.raises(NotFound):
            report.read(file)
    (folder / PAGE).unlink()
    (folder / PAGE).symlink_to(folder / "secret")
    with pytest.raises(NotFound):
        report.read(PAGE)


def test_unknown_versions_are_refused_without_writing(published):
    for version in ("2", "latest", "../1"):
        with pytest.raises(NotFound):
            publish_report(published, "m", version if version != "latest" else "3", {}, b"")
        with pytest.raises(NotFound):
            evaluation_report(published, "m", version)
    assert evaluation_report(published, "m", "1") is None


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_error_names_damaged_report(published, content):
    report = publish_report(published, "m", "1", {}, b"")
    (published.root / report.path / REPORT).write_bytes(content)
    with pytest.raises(BrokenArtifact, match=r"m version 1: report\.json"):
        evaluation_report(published, "m", "1")
