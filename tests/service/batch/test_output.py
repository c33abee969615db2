import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from service.batch.job_process import JobRows
from service.batch.output import ColumnFiles
from tests.support.disk import LOSSES, stopping

ROWS = {
    "score": np.linspace(0, 1, 7),
    "label": np.array(["a", "bc", "d", "a", "bc", "d", "a"]),
    "set": np.arange(21).reshape(7, 3) % 2 == 0,
}


def some(rows):
    return {name: column[rows] for name, column in ROWS.items()}


def equal(columns, rows):
    return all(np.array_equal(columns.column(name), column[:rows]) for name, column in ROWS.items())


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
    columns = ColumnFiles(tmp_path / "columns")
    columns.append(some(slice(0, 3)))
    columns.sync()
    assert steps[-3:] == [
        ("sync", ".draft-columns.json"),
        ("move", "columns.json"),
        ("sync", "columns"),
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
    columns.close()


def test_rows_that_were_synced_are_taken_up_and_later_ones_come_again(tmp_path):
    columns = ColumnFiles(tmp_path / "columns")
    columns.append(some(slice(0, 3)))
    columns.note["seen"] = 1
    columns.sync()
    columns.append(some(slice(3, 5)))  # not synced
    columns.close()
    again = ColumnFiles(tmp_path / "columns")
    assert (again.rows, again.note, again.names) == (3, {"seen": 1}, list(ROWS))
    assert equal(again, 3)
    again.append(some(slice(3, 7)))
    again.sync()
    assert equal(again, 7)
    again.close()


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_that_were_synced_are_there_after_a_loss_of_power(tmp_path, loss):
    with stopping(tmp_path, None, loss):
        columns = ColumnFiles(tmp_path / "columns")
        columns.append(some(slice(0, 4)))
        columns.sync()
    columns.close()
    actual = ColumnFiles(tmp_path / "columns")
    assert actual.rows == 4
    assert equal(actual, 4)
    actual.close()


def test_what_was_never_synced_is_begun_anew(tmp_path):
    columns = ColumnFiles(tmp_path / "columns")
    columns.append(some(slice(0, 3)))
    columns.close()
    again = ColumnFiles(tmp_path / "columns")
    assert again.rows == 0
    again.append(some(slice(0, 7)))
    assert equal(again, 7)
    again.close()


def test_rows_of_another_kind_are_refused(tmp_path):
    columns = ColumnFiles(tmp_path / "columns")
    columns.append(some(slice(0, 3)))
    with pytest.raises(ValueError, match="score: expected float64"):
        columns.append({**some(slice(3, 4)), "score": np.zeros(1, dtype=np.float32)})
    columns.close()
