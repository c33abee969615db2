"""The SQLite database for jobs and labels, which all processes on a machine share."""

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from model_store.artifacts.disk import make_folder, sync_folder, write_synced
from model_store.errors import NoSpace, StateUnusable

FILE = "state.sqlite"
PROBE, PROBE_BYTES = "probe", 1 << 16
NO_SPACE = "no space is left for the service's state (DUBITO_STATE)"
UNUSABLE = "the service's state (DUBITO_STATE) cannot be read or written"
BUSY_S = 10.0  # to wait for another process's transaction
# Script n migrates format n to n + 1; a new database has format 0
MIGRATIONS = (
    """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,               -- acquire, predict or candidate
    state TEXT NOT NULL,              -- queued, running, done, failed or cancelled
    owner TEXT NOT NULL,              -- name of the request's key, or empty
    request TEXT NOT NULL,            -- JSON, with defaults filled in
    created REAL NOT NULL,            -- times are seconds since 1970
    started REAL,
    ended REAL,
    slot INTEGER,                     -- locked by the job's process
    deaths INTEGER NOT NULL DEFAULT 0,   -- since the last progress
    work INTEGER NOT NULL DEFAULT 0,  -- total rows x draws, 0 if unknown
    done INTEGER NOT NULL DEFAULT 0,  -- rows x draws
    worked_s REAL NOT NULL DEFAULT 0,
    cancel INTEGER NOT NULL DEFAULT 0,
    outcome TEXT,                     -- JSON: the name of the result file, or the error
    client TEXT NOT NULL DEFAULT '',  -- for fair shares: the owner or an address
    turn REAL NOT NULL DEFAULT 0,     -- the lowest is next: rows x draws queued before it
    bytes INTEGER NOT NULL DEFAULT 0, -- size of its files
    cleared INTEGER NOT NULL DEFAULT 0 -- boolean: only the result is left
) STRICT;
CREATE INDEX jobs_by_state ON jobs (state, created);
CREATE INDEX jobs_by_owner ON jobs (owner);
CREATE TABLE acquired (
    model TEXT NOT NULL,
    id TEXT NOT NULL,
    version TEXT NOT NULL,
    acquisition TEXT NOT NULL,
    seed INTEGER NOT NULL,
    num_samples INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    score REAL,                       -- null for control rows
    control INTEGER NOT NULL,         -- boolean
    prediction TEXT,                  -- JSON, for control rows
    row BLOB NOT NULL,                -- float32, little-endian
    format TEXT NOT NULL,             -- `row_format`
    time REAL NOT NULL,
    PRIMARY KEY (model, id)
) STRICT;
CREATE TABLE labels (
    model TEXT NOT NULL,
    id TEXT NOT NULL,
    label TEXT,                       -- classification
    target REAL,                      -- regression
    row BLOB,                         -- unless the row was acquired
    format TEXT NOT NULL,
    key TEXT,                         -- name of the request's API key, if any
    time REAL NOT NULL,
    comment TEXT,
    PRIMARY KEY (model, id)
) STRICT;
CREATE TABLE replaced (  -- former labels
    model TEXT NOT NULL,
    id TEXT NOT NULL,
    label TEXT,
    target REAL,
    key TEXT,
    time REAL NOT NULL,
    ended REAL NOT NULL,
    ended_by TEXT,                    -- name of the API key that replaced or deleted the label
    comment TEXT
) STRICT;
CREATE TABLE candidates (
    model TEXT NOT NULL,
    version TEXT NOT NULL,
    parent TEXT NOT NULL,             -- version it was compared with
    labels INTEGER NOT NULL,          -- number used in the fit
    control INTEGER NOT NULL,         -- number used in the comparison
    promoted INTEGER NOT NULL,
    outcome TEXT NOT NULL,            -- JSON: the reason and both versions' figures
    time REAL NOT NULL,
    PRIMARY KEY (model, version)
) STRICT;
""",
)


class Database:
    """A thread-safe connection in WAL mode to the database, which is created if necessary."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        with as_state_errors():
            make_folder(folder)
            path = folder / FILE
            # Only the owner can read the file
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            self._connection = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                self._migrate()
            sync_folder(folder)

    def _migrate(self) -> None:
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            expected = f"format {len(MIGRATIONS)} or older"
            raise StateUnusable(f"{UNUSABLE}: expected {expected}, got {version}")
        for script in MIGRATIONS[version:]:
            for statement in script.split(";\n"):
                self._connection.execute(statement)
        self._connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, as_state_errors():
            yield self._connection

    def query(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        with self.reading() as connection:
            return connection.execute(sql, values).fetchall()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Lock the connection and start a transaction that is committed on exit."""
        with self._lock, as_state_errors(), self._transaction():
            yield self._connection

    def probe(self) -> None:
        """Write and delete a test file to detect a full disk."""
        path = self.folder / PROBE
        with as_state_errors():
            try:
                write_synced(path, bytes(PROBE_BYTES))
            finally:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite rolls back by itself on a full disk
                self._connection.execute("ROLLBACK")
            raise


def check_writable(folder: Path) -> None:
    """Raise StateUnusable if a database cannot be created in the folder."""
    with as_state_errors():
        path = folder.absolute()
        parent = next(p for p in (path, *path.parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise StateUnusable(f"{UNUSABLE}: its folder is not writable")


@contextmanager
def may_be_damaged(record: str) -> Iterator[None]:
    """Convert errors from decoding a record to StateUnusable."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise StateUnusable(f"{UNUSABLE}: {record} is damaged in {FILE}") from error


@contextmanager
def as_state_errors() -> Iterator[None]:
    """Convert SQLite errors and disk errors to StateUnusable."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, IndexError) as error:  # IndexError: a missing column
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise NoSpace(NO_SPACE) from error
        raise StateUnusable(f"{UNUSABLE}: {error}") from error
    except OSError as error:
        raise convert_disk_error(error) from error


def convert_disk_error(error: OSError) -> NoSpace | StateUnusable:
    """Convert a disk error to StateUnusable or NoSpace, without paths in the message."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoSpace(NO_SPACE)
    return StateUnusable(f"{UNUSABLE}: {error.strerror}")
