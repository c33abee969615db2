"""Jobs: work on whole pools, which goes on after the request was answered and after its process
died.

A job is queued, running, and then done, failed or cancelled. The process that runs one holds the
lock of a *slot*, a file that the system unlocks when the process is gone: a running job whose slot
is free lost its process, and is queued again. No clock and no heartbeat is needed.
"""

import fcntl
import json
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from model_store.artifacts.disk import make_folder, sync_folder
from model_store.errors import NotFound, OverQuota, StateUnusable
from model_store.state.database import Database, as_state_errors, may_be_damaged

Kind = Literal["acquire", "predict", "candidate"]
State = Literal["queued", "running", "done", "failed", "cancelled"]
STATES: Final[tuple[State, ...]] = get_args(State)
ENDED: Final[tuple[State, ...]] = ("done", "failed", "cancelled")

FOLDER = "jobs"  # has a folder for each job, of its input and its results
SLOTS = "slots"
MOST_DEATHS = 5  # of a job's process without any progress, before the job has failed
MOST_ORPHANED = 20  # the same where the service died too, which is rarely because of the job
MAX_PLACE = (1 << 63) - 1
OLD = "state IN ('done', 'failed', 'cancelled') AND ended < ?"
STRAY_S = 3600.0  # after which a folder without a job belongs to none that is about to be added


class TooManyJobs(Exception):
    """The queue is full."""


@dataclass(frozen=True)
class Job:
    """A job as it is now. Times are in seconds since 1970; `work` and `done` are rows x draws."""

    id: str
    kind: Kind
    state: State
    owner: str
    request: dict[str, Any]
    created: float
    begun: float | None
    ended: float | None
    deaths: int
    orphaned: int
    work: int
    done: int
    worked_s: float
    cancel: bool
    outcome: Any  # of a job that is done the name of its file, of one that failed the error

    @property
    def is_over(self) -> bool:
        return self.state in ENDED


class Jobs:
    """The jobs of a state folder. Any thread and process of the machine may call its methods."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.folder = database.folder / FOLDER
        self.slots = database.folder / SLOTS

    def new_folder(self) -> tuple[str, Path]:
        """Return the id of a new job, and its folder."""
        name = secrets.token_hex(16)
        with as_state_errors():
            make_folder(self.folder)
            (self.folder / name).mkdir(mode=0o700)
        return name, self.folder / name

    def add(
        self,
        name: str,
        kind: Kind,
        owner: str,
        client: str,
        request: dict[str, Any],
        work: int,
        may_wait: Callable[[Mapping[str, int]], bool],
        most_bytes: int,
        note: Callable[[sqlite3.Connection, Job], None] | None = None,
    ) -> Job:
        """Queue a job, in its client's turn: after rows x draws of the client that wait or run, or
        at once where others have as many before it. A job's place is `turn + done`, so that what
        was done of one that gave way counts as well.

        Args:
            name: that `new_folder` gave it, once its files are there.
            may_wait: whether the client may queue one more, given how many jobs of each wait.
            most_bytes: of the files of all jobs of the owner.
            note: keeps something with it, or not at all.

        Raises:
            TooManyJobs: if it may not wait.
        """
        size = self._bytes(name)
        with self._database.writing() as connection:
            for folder in (self.folder / name, self.folder):  # its files are on the disk before it
                sync_folder(folder)
            queued = connection.execute(  # as bytes, which can be read if one is damaged
                "SELECT CAST(client AS BLOB), count(*) FROM jobs WHERE state = 'queued' GROUP BY 1"
            )
            if not may_wait({of.decode(errors="replace"): count for of, count in queued}):
                raise TooManyJobs
            row = connection.execute(
                """
                INSERT INTO jobs (id, kind, state, owner, client, request, created, work, bytes,
                    turn)
                VALUES (?, ?, 'queued', ?, ?, ?, ?, ?, ?, max(
                    coalesce((SELECT max(turn + done) FROM jobs WHERE state = 'running'),
                        (SELECT min(turn + done) FROM jobs WHERE state = 'queued'), 0),
                    coalesce((SELECT max(turn + work) FROM jobs
                        WHERE state IN ('queued', 'running') AND client = ?), 0)))
                RETURNING *
                """,
                (name, kind, owner, client, json.dumps(request), time.time(), work, size, client),
            ).fetchone()
            _check_bytes(connection, owner, most_bytes)
            job = _job(row)
            if note is not None:
                note(connection, job)
        return job

    def get(self, name: str, owner: str | None = None) -> Job:
        """Return a job; raises NotFound if there is none, or it is not of the `owner`."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT * FROM jobs WHERE id = ?", (name,)).fetchone()
        if row is None or (owner is not None and row["owner"] != owner):
            raise NotFound(
                "job", "the id of one that you asked for and that is still kept", "another"
            )
        return _job(row)

    def part_of(
        self, owner: str, limit: int | None = None, after: int | None = None
    ) -> tuple[list[Job], int | None]:
        """Return the jobs of an owner, the latest first, and the place after which there are
        more."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT rowid AS place, * FROM jobs WHERE owner = ? AND rowid < ? "
                "ORDER BY rowid DESC LIMIT ?",
                (owner, MAX_PLACE if after is None else after, -1 if limit is None else limit + 1),
            ).fetchall()
        listed = rows[:limit]
        more = listed[-1]["place"] if len(rows) > len(listed) else None
        return [_job(row) for row in listed], more

    def latest_candidate(self, model: str) -> Job | None:
        """Return the job that last began to fit a candidate of a model, whoever asked for it."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT * FROM jobs WHERE kind = 'candidate' ORDER BY rowid DESC"
            ).fetchall()
        return next((job for job in map(_job, rows) if job.request["model"] == model), None)

    def counts(self) -> tuple[int, int]:
        """Return how many are queued, and how many are running."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT state, count(*) FROM jobs WHERE state IN ('queued', 'running') GROUP BY "
                "state"
            ).fetchall()
        found = {row[0]: int(row[1]) for row in rows}
        return found.get("queued", 0), found.get("running", 0)

    def claim(self, slot: int) -> Job | None:
        """Take the job whose turn it is, to run it in a slot whose lock the caller holds; None if
        the queue is empty."""
        while True:
            with self._database.writing() as connection:
                row = connection.execute(
                    "UPDATE jobs SET state = 'running', slot = ?, begun = coalesce(begun, ?) "
                    "WHERE rowid = (SELECT rowid FROM jobs WHERE state = 'queued' "
                    "ORDER BY turn + done, rowid LIMIT 1) RETURNING rowid",
                    (slot, time.time()),
                ).fetchone()
            if row is None:
                return None
            try:
                return self._at(row["rowid"])
            except StateUnusable as damage:  # no other job waits for it
                self._fail(row["rowid"], str(damage))

    def _at(self, place: int) -> Job:
        with self._database.reading() as connection:
            row = connection.execute("SELECT * FROM jobs WHERE rowid = ?", (place,)).fetchone()
        return _job(row)

    def _fail(self, place: int, why: str) -> None:
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE jobs SET state = 'failed', said = ?, ended = ?, slot = NULL "
                "WHERE rowid = ?",
                (json.dumps(why), time.time(), place),
            )

    def is_due_to_give_way(self, name: str) -> bool:
        """Return whether a running job has come further than the turn of another client's that
        waits. Fits of candidates go on: they would lose what they did since their checkpoint."""
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT EXISTS (SELECT 1 FROM jobs AS one, jobs AS other WHERE one.id = ? "
                "AND one.state = 'running' AND one.kind != 'candidate' AND NOT one.cancel "
                "AND other.state = 'queued' AND other.client != one.client "
                "AND other.turn + other.done < one.turn + one.done)",
                (name,),
            ).fetchone()
        return bool(row[0])

    def progress(self, name: str, work: int, done: int, worked_s: float, most_bytes: int) -> bool:
        """Record how far a job is; return whether it is to go on."""
        size = self._bytes(name)
        with self._database.writing() as connection:
            row = connection.execute(
                "UPDATE jobs SET deaths = deaths * (? <= done), orphaned = orphaned * (? <= done), "
                "work = ?, done = ?, worked_s = ?, bytes = ? WHERE id = ? AND state = 'running' "
                "RETURNING cancel, owner",
                (done, done, work, done, worked_s, size, name),
            ).fetchone()
            if row is not None:
                _check_bytes(connection, row["owner"], most_bytes)
        return row is not None and not row["cancel"]

    def finish(self, name: str, state: State, outcome: Any) -> None:
        """End a running job with its result or error; one that is to be cancelled is."""
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE jobs SET state = CASE WHEN cancel THEN 'cancelled' ELSE ? END, "
                "said = CASE WHEN cancel THEN NULL ELSE ? END, ended = ?, slot = NULL "
                "WHERE id = ? AND state = 'running'",
                (state, json.dumps(outcome), time.time(), name),
            )

    def put_back(self, name: str, why: str | None = None, is_orphan: bool = False) -> None:
        """Queue a running job again; one that is to be cancelled is.

        Args:
            why: how its process died; None if it ended in order. After some deaths without progress
                the job has failed.
            is_orphan: whether the service had died as well.
        """
        self._put_back("id = ?", (name,), why, is_orphan)

    def _put_back(
        self, which: str, values: tuple[Any, ...], why: str | None, is_orphan: bool
    ) -> None:
        counted, most = ("orphaned", MOST_ORPHANED) if is_orphan else ("deaths", MOST_DEATHS)
        with self._database.writing() as connection:
            row = connection.execute(  # numbers alone, which can be read whatever is damaged
                "SELECT rowid, cancel, done, deaths, orphaned FROM jobs "
                f"WHERE state = 'running' AND {which}",
                values,
            ).fetchone()
            if row is None:
                return
            times = min(row[counted], most) + (why is not None)
            state, outcome = ("cancelled", None) if row["cancel"] else ("queued", None)
            if why is not None and times >= most and state == "queued":
                state = "failed"
                outcome = json.dumps(
                    f"{why}, {times} times without getting further than {row['done']} rows x draws"
                )
            ended = None if state == "queued" else time.time()
            connection.execute(
                f"UPDATE jobs SET state = ?, said = ?, ended = ?, {counted} = ?, slot = NULL "
                "WHERE rowid = ?",
                (state, outcome, ended, times, row["rowid"]),
            )

    def cancel(self, name: str) -> Job:
        """End a job: at once if it is queued, soon if it runs."""
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE jobs SET state = 'cancelled', ended = ? WHERE id = ? AND state = 'queued'",
                (time.time(), name),
            )
            connection.execute(
                "UPDATE jobs SET cancel = 1 WHERE id = ? AND state = 'running'", (name,)
            )
        return self.get(name)

    def clear_ended(self) -> None:
        """Delete the files of jobs that are over, but for their results."""
        with self._database.reading() as connection:
            places = connection.execute(
                "SELECT rowid FROM jobs WHERE state IN ('done', 'failed', 'cancelled') "
                "AND NOT cleared"
            ).fetchall()
        for (place,) in places:
            try:
                job = self._at(place)
            except StateUnusable:  # nobody knows which of its files is the result
                continue
            size = self._clear(job)
            with self._database.writing() as connection:
                connection.execute(
                    "UPDATE jobs SET cleared = 1, bytes = ? WHERE id = ?", (size, job.id)
                )

    def _clear(self, job: Job) -> int:
        """Delete the files of a job that is over, but for its result; return what that takes."""
        with as_state_errors(), suppress(FileNotFoundError):
            for entry in os.scandir(self.folder / job.id):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                elif job.state != "done" or entry.name != job.outcome:
                    Path(entry).unlink(missing_ok=True)
        return self._bytes(job.id)

    def _bytes(self, name: str) -> int:
        size = 0
        for path in (self.folder / name).rglob("*"):
            with suppress(FileNotFoundError):  # another process deletes them too
                size += path.stat().st_size
        return size

    def forget(self, name: str) -> None:
        """Delete a job that is over: its files first, which makes room on a full disk."""
        if self.get(name).is_over:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            with self._database.writing() as connection:
                connection.execute("DELETE FROM jobs WHERE id = ?", (name,))

    def forget_old(self, kept_s: float) -> None:
        """Delete jobs that ended longer ago, their files, and folders without a job."""
        now = time.time()
        with self._database.reading() as connection:
            old = connection.execute(
                f"SELECT rowid FROM jobs WHERE {OLD}", (now - kept_s,)
            ).fetchall()
        for (place,) in old:
            try:
                self.forget(self._at(place).id)
            except NotFound:  # another process deletes them too
                pass
            except StateUnusable:  # damaged: its folder is then of no job
                with self._database.writing() as connection:
                    connection.execute(
                        f"DELETE FROM jobs WHERE rowid = ? AND {OLD}", (place, now - kept_s)
                    )
        with as_state_errors(), suppress(FileNotFoundError):
            entries = os.scandir(self.folder)
            for name in [e.name for e in entries if e.stat().st_mtime < now - STRAY_S]:
                try:
                    self.get(name)
                except NotFound:
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                except StateUnusable:  # it has a job, if a damaged one
                    pass
        with self._database.writing() as connection:  # where the clock was ahead
            connection.execute("UPDATE jobs SET ended = ? WHERE ended > ?", (now, now))

    def put_back_orphans(self) -> None:
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT rowid, slot FROM jobs WHERE state = 'running'"
            ).fetchall()
        for place, number in rows:
            with self.slot(number) as handle:
                if handle is not None:
                    why, of_it = "the service that ran it ended", "rowid = ? AND slot IS ?"
                    self._put_back(of_it, (place, number), why, is_orphan=True)

    @contextmanager
    def slot(self, number: int) -> Iterator[int | None]:
        """Hold a slot's lock, as an open file that a child can inherit; None if it is taken."""
        with as_state_errors():
            self.slots.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.slots / str(number), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield handle
        finally:
            os.close(handle)


def _check_bytes(connection: sqlite3.Connection, owner: str, most: int) -> None:
    found = connection.execute("SELECT sum(bytes) FROM jobs WHERE owner = ?", (owner,))
    held = found.fetchone()[0]
    if held > most:
        raise OverQuota(most, held)


def _job(row: sqlite3.Row) -> Job:
    with may_be_damaged(f"job {row['id']}"):
        values = {field.name: row[field.name] for field in fields(Job) if field.name != "outcome"}
        values["request"] = json.loads(row["request"])
        values["outcome"] = None if row["said"] is None else json.loads(row["said"])
        values |= {"worked_s": float(row["worked_s"]), "cancel": bool(row["cancel"])}
        for column, known in (("state", STATES), ("kind", get_args(Kind))):
            if row[column] not in known:
                raise ValueError(row[column])
    return Job(**values)
