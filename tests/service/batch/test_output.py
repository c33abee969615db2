import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from service.batch.job_process import JobRows
from service.batch.output import ResultRecords
from tests.support.disk import LOSSES, crashing_disk

ROWS = {
    "score": np.linspace(0, 1, 7),
    "label": np.array(["a", "bc", "d", "a", "bc", "d", "a"]),
    "set": np.arange(21).reshape(7, 3) % 2 == 0,
}


def select(rows):
    return {name: column[rows] for name, column in ROWS.items()}


def has_rows(results, rows):
    columns = results.columns()
    assert list(columns) == list(ROWS)
    return all(np.array_equal(columns[name], column[:rows]) for name, column in ROWS.items())


def test_files_and_folders_are_synced_around_each_rename(tmp_path, monkeypatch):
    steps = []

    def record(name, function, get_path):
        def wrapper(*arguments, **options):
            result = function(*arguments, **options)
            steps.append((name, Path(get_path(*arguments)).name))
            return result

        return wrapper

    monkeypatch.setattr(
        os, "fsync", record("sync", os.fsync, lambda f: Path(f"/proc/self/fd/{f}").readlink())
    )
    for name in ("rename", "replace"):
        move = record("move", getattr(Path, name), lambda _, to: to)
        monkeypatch.setattr(Path, name, move)
    results = ResultRecords(tmp_path / "rows")
    results.append(select(slice(0, 3)))
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


def test_reopened_results_continue_after_the_last_synced_row(tmp_path):
    results = ResultRecords(tmp_path / "rows")
    results.append(select(slice(0, 3)))
    results.note["seen"] = 1
    results.sync()
    results.append(select(slice(3, 5)))  # not synced
    results.close()
    reopened = ResultRecords(tmp_path / "rows")
    assert (reopened.rows, reopened.note) == (3, {"seen": 1})
    assert has_rows(reopened, 3)
    reopened.append(select(slice(3, 7)))
    reopened.sync()
    assert has_rows(reopened, 7)
    reopened.close()


@pytest.mark.parametrize("loss", LOSSES)
def test_synced_rows_survive_power_loss(tmp_path, loss):
    with crashing_disk(tmp_path, None, loss):
        results = ResultRecords(tmp_path / "rows")
        results.append(select(slice(0, 4)))
        results.sync()
    results.close()
    reopened = ResultRecords(tmp_path / "rows")
    assert reopened.rows == 4
    assert has_rows(reopened, 4)
    reopened.close()


def test_results_that_were_never_synced_start_empty(tmp_path):
    results = ResultRecords(tmp_path / "rows")
    results.append(select(slice(0, 3)))
    results.close()
    reopened = ResultRecords(tmp_path / "rows")
    assert reopened.rows == 0
    reopened.append(select(slice(0, 7)))
    reopened.sync()
    assert has_rows(reopened, 7)
    reopened.close()
