import io
import sys

import pytest

from training.progress import Bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
@pytest.mark.parametrize("quiet", [False, True])
def test_bar_is_drawn_in_terminal_and_lines_are_logged_otherwise(
    monkeypatch, caplog, stream, quiet
):
    stream.seek(0)
    stream.truncate()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("training.progress.LINE_S", 0.0)
    with caplog.at_level("INFO", logger="dubito.training"), Bar(400, "step", quiet) as bar:
        for step in range(400):
            bar.update()
            if step % 100 == 99:
                bar.report(f"step {step + 1}")
    is_drawn = stream.isatty() and not quiet
    assert ("400/400" in stream.getvalue()) == is_drawn
    is_logged = not stream.isatty() and not quiet
    assert caplog.messages == [f"step {n}" for n in (100, 200, 300, 400)] * is_logged


def test_log_lines_are_rate_limited(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level("INFO", logger="dubito.training"), Bar(10, "step", quiet=False) as bar:
        bar.report("soon")
    assert caplog.messages == []
