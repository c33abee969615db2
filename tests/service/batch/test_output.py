import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from service.batch.job_process import JobRows
from service.batch.output import ResultRecords
from tests.support.disk import LOSSES, stopping

ROWS = {
    "score": np.linspace(0, 1, 7),
    "label": np.array(["a", "bc", "d", "a", "bc", "d", "a"]),
    "set": np.arange(21).reshape(7, 3) % 2 == 0,
}


def some(rows):
    return {name: column[rows] for name, column in ROWS.items()}


def equal(results, rows):
    columns = results.columns()
    assert list(columns) == list(ROWS)
    return all(np.array_equal(columns[name], column[:rows]) for name, column in ROWS.items())


def test_what_takes_another_s_place_is_on_the_disk_with_its_name_before_it_counts(
    tmp_path, monkeypatch
):
    steps = []

    def noted(name, act, place):
        def instead(*arguments, **options):
            completed = act(*arguments, **options)
            steps.append((name, Path(place(*arguments)).name))
            return completed

        return instead

    monkeypatch.setattr(
        os, "fsync", noted("sync", os.fsync, lambda f: Path(f"/proc/self/fd/{f}").readlink())
    )
    for name in ("rename", "replace"):
        move = noted("move", getattr(Path, name), lambda _, to: to)
        monkeypatch.setattr(Path, name, move)
    results = ResultRecords(tmp_path / "rows")
    results.append(some(slice(0, 3)))
    results.sync()
    assert steps[-3:] == [
        ("sync", ".draft-layout.json"),
        ("move", "layout.json"),
        ("sync", "rows"),
    ]
    job = SimpleNamespace(
        folder=tmp_path, work=1, _report=lambda *_: steps.append(("report", "work"))
    )
    JobRows.write(job, "answer.json", lambda path: path.write_text("{}"))
    assert steps[-4:] == [
        ("sync", "answer.json.draft"),
        ("move", "answer.json"),
        ("sync", tmp_path.name),
        ("report", "work"),
    ]
    results.close()


def test_rows_that_were_synced_are_taken_up_and_later_ones_come_again(tmp_path):
    results = ResultRecords(tmp_path / "rows")
    results.append(some(slice(0, 3)))
    results.note["seen"] = 1
    results.sync()
    results.append(some(slice(3, 5)))  # not synced
    results.close()
    again = ResultRecords(tmp_path / "rows")
    assert (again.rows, again.note) == (3, {"seen": 1})
    assert equal(again, 3)
    again.append(some(slice(3, 7)))
    again.sync()
    assert equal(again, 7)
    again.close()


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_that_were_synced_are_there_after_a_loss_of_power(tmp_path, loss):
    with stopping(tmp_path, None, loss):
        results = ResultRecords(tmp_path / "rows")
        results.append(some(slice(0, 4)))
        results.sync()
    results.close()
    actual = ResultRecords(tmp_path / "rows")
    assert actual.rows == 4
    assert equal(actual, 4)
    actual.close()


def test_what_was_never_synced_is_begun_anew(tmp_path):
    results = ResultRecords(tmp_path / "rows")
    results.append(some(slice(0, 3)))
    results.close()
    again = ResultRecords(tmp_path / "rows")
    assert again.rows == 0
    again.append(some(slice(0, 7)))
    again.sync()
    assert equal(again, 7)
    again.close()
