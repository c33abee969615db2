"""The state's database: SQLite in WAL mode, in a folder that processes of one machine share.

`writing` is a transaction, which is on the disk when it returns. Each table has its own module.
"""

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from model_store.artifacts.disk import make_folder, sync_folder, write_synced
from model_store.errors import NoSpace, StateUnusable

FILE = "state.sqlite"
PROBE, PROBE_BYTES = "probe", 1 << 16
NO_SPACE = "no space is left for the service's state (DUBITO_STATE)"
UNUSABLE = "the service's state (DUBITO_STATE) cannot be read or written"
BUSY_S = 10.0  # that another process may take to write
# Script n takes a database from format n to n + 1; a new database has format 0
MIGRATIONS = (
    """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,               -- acquire, predict or candidate
    state TEXT NOT NULL,              -- queued, running, done, failed or cancelled
    owner TEXT NOT NULL,              -- digest of the key it was asked for with, or empty
    request TEXT NOT NULL,            -- JSON: all that was asked, with what defaults came to
    created REAL NOT NULL,            -- seconds since 1970, as all times here
    begun REAL,
    ended REAL,
    slot INTEGER,                     -- of the process that runs it, which holds the slot's lock
    deaths INTEGER NOT NULL DEFAULT 0,   -- of its process alone, since it last got further
    orphaned INTEGER NOT NULL DEFAULT 0, -- times that its process died with the service, since then
    work INTEGER NOT NULL DEFAULT 0,  -- rows x draws to be done, 0 while it is not known
    done INTEGER NOT NULL DEFAULT 0,  -- of these
    worked_s REAL NOT NULL DEFAULT 0, -- that they took
    cancel INTEGER NOT NULL DEFAULT 0,
    said TEXT,                        -- JSON: the answer of one that is done, or why it failed
    client TEXT NOT NULL DEFAULT '',  -- whose share it uses: the owner, or else an address
    turn REAL NOT NULL DEFAULT 0,     -- the lowest is next: rows x draws of its client before it
    bytes INTEGER NOT NULL DEFAULT 0, -- of its files
    cleared INTEGER NOT NULL DEFAULT 0 -- whether only its result is left
) STRICT;
CREATE INDEX jobs_by_state ON jobs (state, created);
CREATE INDEX jobs_by_owner ON jobs (owner);
CREATE TABLE acquired (
    model TEXT NOT NULL,
    id TEXT NOT NULL,
    version TEXT NOT NULL,            -- that chose it
    acquisition TEXT NOT NULL,
    seed INTEGER NOT NULL,
    num_samples INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    score REAL,                       -- null of one set aside
    control INTEGER NOT NULL,         -- whether it was set aside
    said TEXT,                        -- JSON: what the version said of one set aside
    row BLOB NOT NULL,                -- float32, little-endian
    format TEXT NOT NULL,             -- what the row's numbers mean: `row_format`
    time REAL NOT NULL,
    PRIMARY KEY (model, id)
) STRICT;
CREATE TABLE labels (
    model TEXT NOT NULL,
    id TEXT NOT NULL,
    label TEXT,                       -- of a classification
    target REAL,                      -- of a regression
    row BLOB,                         -- of one that was not acquired
    format TEXT NOT NULL,
    key TEXT,                         -- name of the key it came with; null: the API was open
    time REAL NOT NULL,
    PRIMARY KEY (model, id)
) STRICT;
CREATE TABLE replaced (  -- labels that others took the place of
    model TEXT NOT NULL,
    id TEXT NOT NULL,
    label TEXT,
    target REAL,
    key TEXT,
    time REAL NOT NULL,
    ended REAL NOT NULL
) STRICT;
CREATE TABLE candidates (
    model TEXT NOT NULL,
    version TEXT NOT NULL,
    parent TEXT NOT NULL,             -- the version it was compared with
    labels INTEGER NOT NULL,          -- it was fitted with
    control INTEGER NOT NULL,         -- labels that it was compared on
    promoted INTEGER NOT NULL,
    said TEXT NOT NULL,               -- JSON: why not, and both versions' figures
    time REAL NOT NULL,
    PRIMARY KEY (model, version)
) STRICT;
CREATE TABLE answers (  -- to requests with an Idempotency-Key
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    digest TEXT NOT NULL,             -- of the request
    answer BLOB NOT NULL,
    time REAL NOT NULL,
    PRIMARY KEY (owner, key)
) STRICT;
""",
)


class Database:
    """A connection that the threads of a process share."""

    def __init__(self, folder: Path) -> None:
        """Open the database, made in `folder` if there is none."""
        self.folder = folder
        self._lock = threading.Lock()
        with as_state_errors():
            make_folder(folder)
            path = folder / FILE
            # What came as rows and labels is for nobody else to read
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
        """Hold the connection, to read."""
        with self._lock, as_state_errors():
            yield self._connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection in a transaction, in which no other process writes: all of it is
        kept, or nothing."""
        with self._lock, as_state_errors(), self._transaction():
            yield self._connection

    def probe(self) -> None:
        """Write a file and delete it, as on a full disk nobody can; small changes to the database
        may go on there for long."""
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
            with suppress(sqlite3.Error):  # SQLite rolls back by itself where the disk is full
                self._connection.execute("ROLLBACK")
            raise


@contextmanager
def may_be_damaged(what: str) -> Iterator[None]:
    """Take what is read of the database, and is not what was written, for damage to it."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise StateUnusable(f"{UNUSABLE}: {what} is damaged in {FILE}") from error


@contextmanager
def as_state_errors() -> Iterator[None]:
    """Tell of errors of SQLite and of the disk as of the state's."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, IndexError) as error:  # the last: a column is gone
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise NoSpace(NO_SPACE) from error
        raise StateUnusable(f"{UNUSABLE}: {error}") from error
    except OSError as error:
        raise of_disk(error) from error


def of_disk(error: OSError) -> NoSpace | StateUnusable:
    """Return an error of the disk as one of the state. It names no path: a client of the service
    may read it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoSpace(NO_SPACE)
    return StateUnusable(f"{UNUSABLE}: {error.strerror}")
