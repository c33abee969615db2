from types import SimpleNamespace

from benchmarks import common


def test_written_page_keeps_its_hand_written_part(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    options, page = SimpleNamespace(write=True), tmp_path / "speed.md"
    common.report(options, "speed", "# Speed\n")
    assert page.read_text() == "# Speed\n"
    page.write_text(f"# Speed\n\n{common.NOTES}\nA remark.\n")
    common.report(options, "speed", "# Speed, again\n")
    assert page.read_text() == f"# Speed, again\n\n{common.NOTES}\nA remark.\n"
    assert "again" in capsys.readouterr().out
