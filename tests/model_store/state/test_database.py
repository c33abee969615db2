"""The state's database: whole transactions or none, between processes, on full disks, in folders
that cannot be."""

import sqlite3
import stat
import subprocess
import sys

import pytest

from model_store.errors import NoSpace, StateUnusable
from model_store.state.database import FILE, Database

JOB = "INSERT INTO jobs (id, kind, state, owner, request, created) VALUES (?, 'acquire', 'queued', '', '{}', 0)"


@pytest.fixture
def database(tmp_path):
    database = Database(tmp_path / "state")
    yield database
    database.close()


def ids(database):
    with database.reading() as connection:
        return [row["id"] for row in connection.execute("SELECT id FROM jobs ORDER BY id")]


def test_what_a_transaction_wrote_is_there_for_another_process_and_what_failed_is_not(
    database, tmp_path
):
    with database.writing() as connection:
        connection.execute(JOB, ("a",))
    with pytest.raises(KeyError), database.writing() as connection:
        connection.execute(JOB, ("b",))
        raise KeyError
    other = Database(tmp_path / "state")
    assert ids(other) == ["a"]
    other.close()


def test_a_process_that_is_killed_in_a_transaction_leaves_nothing_of_it(database, tmp_path):
    dying = f"""
import os
from pathlib import Path
from model_store.state.database import Database
with Database(Path({str(tmp_path / "state")!r})).writing() as connection:
    connection.execute({JOB!r}, ("half",))
    os._exit(1)
"""
    assert subprocess.run([sys.executable, "-c", dying], timeout=60, check=False).returncode == 1
    assert ids(database) == []


def test_only_its_owner_may_read_it(database, tmp_path):
    assert stat.S_IMODE((tmp_path / "state" / FILE).stat().st_mode) == 0o600


def test_a_full_disk_is_told_and_the_transaction_is_undone(database):
    with database.writing() as connection:
        connection.execute(JOB, ("a",))
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(NoSpace, match="no space is left"), database.writing() as connection:
        for i in range(1000):
            connection.execute(JOB, (f"b{i}",))
    assert ids(database) == ["a"]


def test_a_folder_that_is_a_file_and_a_database_that_is_none_are_told(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(StateUnusable, match=r"the service's state .* cannot be read or written"):
        Database(tmp_path / "file")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(StateUnusable, match="not a database"):
        Database(tmp_path / "state")


def test_a_database_of_a_later_format_is_not_touched(database, tmp_path):
    with sqlite3.connect(tmp_path / "state" / FILE) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StateUnusable, match="expected format 1 or older, got 99"):
        Database(tmp_path / "state")
