import os
import sqlite3
import stat
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random
from re import finditer
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from model_store.errors import DubitoError, NoSpace, StateUnusable
from model_store.state.database import FILE, MIGRATIONS, Database
from model_store.state.jobs import Jobs
from model_store.state.labels import (
    AcquiredRow,
    Acquisition,
    Label,
    accept,
    candidates,
    control_labels,
    labelled_rows,
    save_acquired,
    save_candidate,
)
from model_store.state.live import live_figures

PLENTY = 1 << 30  # bytes

JOB = "INSERT INTO jobs (id, kind, state, owner, request, created) VALUES (?, 'acquire', 'queued', '', '{}', 0)"


@pytest.fixture
def database(tmp_path):
    database = Database(tmp_path / "state")
    yield database
    database.close()


def ids(database):
    with database.reading() as connection:
        return [row["id"] for row in connection.execute("SELECT id FROM jobs ORDER BY id")]


def test_other_connections_see_only_committed_transactions(database, tmp_path):
    with database.writing() as connection:
        connection.execute(JOB, ("a",))
    with pytest.raises(KeyError), database.writing() as connection:
        connection.execute(JOB, ("b",))
        raise KeyError
    reader = Database(tmp_path / "state")
    assert ids(reader) == ["a"]
    reader.close()


READ_ONLY = """
import os, sys
from pathlib import Path
from model_store.errors import StateUnusable
from model_store.state.database import Database
from model_store.state.jobs import Jobs
folder = Path(sys.argv[1])
if os.geteuid() == 0:
    os.setuid(65534)
database = Database(folder)
jobs = Jobs(database)
name, _ = jobs.new_folder()
(folder / "jobs" / name / "rows.npy").touch()
jobs.add(name, "acquire", "", "", {}, 1, lambda _: True, 1)
jobs.cancel(name)
for part in (folder, folder / "jobs", folder / "jobs" / name):
    part.chmod(0o500)
calls = jobs.new_folder, jobs.clear_ended, jobs.slot(0).__enter__, database.probe
(folder / "state.sqlite").chmod(0o400)
for call in (*calls, lambda: Database(folder)):
    try:
        call()
    except StateUnusable as error:
        print(error)
"""


def test_read_only_state_folder_is_reported():
    with TemporaryDirectory() as name:
        folder = Path(name) / "state"
        folder.mkdir()
        if os.geteuid() == 0:
            Path(name).chmod(0o755)
            os.chown(folder, 65534, -1)
        command = [sys.executable, "-c", READ_ONLY, str(folder)]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        for path in (folder, *folder.glob("jobs"), *folder.glob("jobs/*")):
            path.chmod(0o700)
    *first, last = completed.stdout.splitlines()
    expected = "the service's state (DUBITO_STATE) cannot be read or written"
    assert first == [f"{expected}: Permission denied"] * 4, completed.stderr
    assert last == f"{expected}: attempt to write a readonly database"


def test_only_the_owner_can_read_the_database(database, tmp_path):
    assert stat.S_IMODE((tmp_path / "state" / FILE).stat().st_mode) == 0o600


def test_full_disk_is_reported_and_rolls_back_the_transaction(database):
    with database.writing() as connection:
        connection.execute(JOB, ("a",))
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(NoSpace, match="no space is left"), database.writing() as connection:
        for i in range(1000):
            connection.execute(JOB, (f"b{i}",))
    assert ids(database) == ["a"]


def test_invalid_state_folder_or_database_is_reported(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(StateUnusable, match=r"the service's state .* cannot be read or written"):
        Database(tmp_path / "file")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(StateUnusable, match="not a database"):
        Database(tmp_path / "state")


def test_damaged_database_is_reported_by_every_operation(tmp_path):
    database, answer = Database(tmp_path), {"probabilities": {"3": 0.5, "4": 0.5}, "set": ["3"]}
    jobs, row = Jobs(database), np.zeros(4, np.float32)
    ids = [jobs.new_folder()[0] for _ in range(8)]
    for name in ids:
        jobs.add(name, "acquire", "me", "me", {"model": "m"}, 10, lambda _: True, PLENTY)
    jobs.finish(jobs.claim(0).id, "failed", "why")
    ranking = Acquisition("m", "1", "format", "bald", 1, 10)
    save_acquired(
        database, ranking, [AcquiredRow(str(i), i, 0.1, row, True, answer) for i in range(20)]
    )
    accept(database, "m", "format", [Label(str(i), "3") for i in range(20)])
    save_candidate(database, "m", "2", "1", 10, 5, True, {"reason": "no worse"})
    database.close()
    content, random, errors = (tmp_path / FILE).read_bytes(), Random(0), Counter()
    operations = {
        "list": lambda database: Jobs(database).all("me"),
        "claim": lambda database: Jobs(database).claim(0),
        "add": lambda database: add(database),
        "cancel": lambda database: Jobs(database).cancel(ids[3]),
        "clear": lambda database: Jobs(database).clear_ended(),
        "orphans": lambda database: Jobs(database).requeue_orphans(),
        "rows": lambda database: labelled_rows(database, "m", "format", 4),
        "candidates": lambda database: candidates(database, "m"),
        "figures": lambda database: live_figures([r[1:] for r in control_labels(database, "m")]),
        "accept": lambda database: accept(database, "m", "format", [Label("2", "4")], replace=True),
    }

    def add(database):
        name, _ = Jobs(database).new_folder()
        return Jobs(database).add(
            name, "acquire", "me", "me", {"model": "m"}, 10, lambda _: True, PLENTY
        )

    offsets = [match.start() for match in finditer(rb'"|model|queued|failed|format|turn', content)]
    for case in range(30):
        damaged = bytearray(content)
        for _ in range(1 if case % 2 else 30):
            offset = random.choice(offsets) if case % 3 else random.randrange(len(content))
            damaged[offset] = random.choice((0, 0x41, 0xC3, 0xFF))
        (tmp_path / FILE).write_bytes(damaged)
        for name, operation in operations.items():
            try:
                with closing(Database(tmp_path)) as database:
                    operation(database)
            except StateUnusable as error:
                assert str(error).startswith("the service's state (DUBITO_STATE) cannot be read")
                errors[name] += 1
            except DubitoError:
                pass
    assert set(errors) == set(operations)


def test_database_of_a_later_format_is_refused(database, tmp_path):
    with sqlite3.connect(tmp_path / "state" / FILE) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StateUnusable, match="expected format 1 or older, got 99"):
        Database(tmp_path / "state")


def test_database_of_an_earlier_format_is_migrated(monkeypatch, tmp_path):
    Database(tmp_path).close()
    migration = "ALTER TABLE labels ADD COLUMN extra TEXT"
    monkeypatch.setattr("model_store.state.database.MIGRATIONS", (*MIGRATIONS, migration))
    with closing(Database(tmp_path)) as database:
        assert database.query("SELECT extra FROM labels") == []
