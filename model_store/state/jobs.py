"""Background jobs that survive restarts of the service.

A job is queued, then running, and finally done, failed or cancelled. The process of a running job
locks a *slot*, a file that the kernel unlocks when the process exits. If the slot of a running job
is unlocked, its process has died and the job is queued again.
"""

import fcntl
import json
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from model_store.artifacts.disk import folder_bytes, make_folder, sync_folder
from model_store.errors import NotFound, OverQuota
from model_store.state.database import Database, as_state_errors, may_be_damaged

Kind = Literal["acquire", "predict", "candidate"]
State = Literal["queued", "running", "done", "failed", "cancelled"]
STATES: Final[tuple[State, ...]] = get_args(State)
ENDED: Final[tuple[State, ...]] = ("done", "failed", "cancelled")

FOLDER = "jobs"  # contains a folder for each job
SLOTS = "slots"
MAX_DEATHS = 10  # of a job's process or the service, without progress
STRAY_S = 3600.0  # age at which folders without a job are deleted


class TooManyJobs(Exception):
    """Raised if the job queue is full."""


@dataclass(frozen=True)
class Job:
    """A background job. Times are in seconds since 1970. `work` and `done` are in rows x draws."""

    id: str
    kind: Kind
    state: State
    owner: str
    request: dict[str, Any]
    created: float
    started: float | None
    ended: float | None
    deaths: int
    work: int
    done: int
    worked_s: float
    cancel: bool
    outcome: Any  # name of the result file, or the error

    @property
    def is_over(self) -> bool:
        return self.state in ENDED


class Jobs:
    """The jobs in a state folder. Threads and processes can share the folder."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.folder = database.folder / FOLDER
        self.slots = database.folder / SLOTS

    def new_folder(self) -> tuple[str, Path]:
        """Create a folder for a new job. Return the job's id and the folder."""
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
        max_bytes: int,
    ) -> Job:
        """Add a job to the queue. Jobs are scheduled fairly between clients.

        A job's `turn` is its client's pending work (rows x draws), but at least the turn of the
        running job. The job with the lowest `turn + done` is next.

        Args:
            name: the id from `new_folder`.
            may_wait: decides from the queued jobs by client whether to accept the job.
            max_bytes: limit for the files of all jobs of the owner.

        Raises:
            TooManyJobs: if `may_wait` returns False.
            OverQuota: if the files exceed `max_bytes`.
        """
        size = folder_bytes(self.folder / name)
        with self._database.writing() as connection:
            for folder in (self.folder / name, self.folder):  # before the job's record
                sync_folder(folder)
            queued = connection.execute(
                "SELECT client, count(*) FROM jobs WHERE state = 'queued' GROUP BY client"
            )
            if not may_wait(dict(map(tuple, queued))):
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
            _check_bytes(connection, owner, max_bytes)
        return _job(row)

    def get(
        self, name: str, owner: str | None = None, models: Collection[str] | None = None
    ) -> Job:
        """Return a job. Raise NotFound if it belongs to another owner or model."""
        jobs = self._select("id = ? AND owner = coalesce(?, owner)", (name, owner))
        if not jobs or (models is not None and jobs[0].request["model"] not in models):
            expected = "the id of one of your jobs, which may have expired"
            raise NotFound("job", expected, "another id")
        return jobs[0]

    def all(self, owner: str | None, models: Collection[str] | None = None) -> list[Job]:
        """Return the jobs of an owner and of some models, newest first. None stands for all."""
        jobs = self._select("owner = coalesce(?, owner)", (owner,))
        return [job for job in jobs if models is None or job.request["model"] in models]

    def unfinished(self) -> list[Job]:
        return self._select("state IN ('queued', 'running') AND NOT cancel")

    def latest_candidate(self, model: str) -> Job | None:
        jobs = self._select("kind = 'candidate' AND request ->> 'model' = ?", (model,))
        return jobs[0] if jobs else None

    def _select(self, condition: str, values: Sequence[Any] = ()) -> list[Job]:
        query = f"SELECT * FROM jobs WHERE {condition} ORDER BY rowid DESC"
        return [_job(row) for row in self._database.query(query, values)]

    def counts(self) -> tuple[int, int]:
        (row,) = self._database.query(
            "SELECT count(*) FILTER (WHERE state = 'queued'), "
            "count(*) FILTER (WHERE state = 'running') FROM jobs"
        )
        return row[0], row[1]

    def claim(self, slot: int) -> Job | None:
        """Lock a slot and start the next job in it. Return None if the queue is empty."""
        with self._database.writing() as connection:
            row = connection.execute(
                "UPDATE jobs SET state = 'running', slot = ?, started = coalesce(started, ?) "
                "WHERE rowid = (SELECT rowid FROM jobs WHERE state = 'queued' "
                "ORDER BY turn + done, rowid LIMIT 1) RETURNING *",
                (slot, time.time()),
            ).fetchone()
        return None if row is None else _job(row)

    def should_yield(self, name: str) -> bool:
        """Check whether a running job should make way for another client's queued job.

        Candidate jobs never yield, because they would lose the work since their last checkpoint.
        """
        rows = self._database.query(
            "SELECT 1 FROM jobs AS one, jobs AS other WHERE one.id = ? "
            "AND one.state = 'running' AND one.kind != 'candidate' AND NOT one.cancel "
            "AND other.state = 'queued' AND other.client != one.client "
            "AND other.turn + other.done < one.turn + one.done LIMIT 1",
            (name,),
        )
        return bool(rows)

    def progress(self, name: str, work: int, done: int, worked_s: float, max_bytes: int) -> bool:
        """Record a job's progress. Return False if the job should stop."""
        size = folder_bytes(self.folder / name)
        with self._database.writing() as connection:
            row = connection.execute(
                "UPDATE jobs SET deaths = deaths * (? <= done), work = ?, done = ?, worked_s = ?, "
                "bytes = ? WHERE id = ? AND state = 'running' RETURNING cancel, owner",
                (done, work, done, worked_s, size, name),
            ).fetchone()
            if row is not None:
                _check_bytes(connection, row["owner"], max_bytes)
        return row is not None and not row["cancel"]

    def finish(self, name: str, state: State, outcome: Any) -> None:
        """Mark a running job as finished, or as cancelled if cancellation was requested."""
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE jobs SET state = CASE WHEN cancel THEN 'cancelled' ELSE ? END, "
                "outcome = CASE WHEN cancel THEN NULL ELSE ? END, ended = ?, slot = NULL "
                "WHERE id = ? AND state = 'running'",
                (state, json.dumps(outcome), time.time(), name),
            )

    def requeue(self, name: str, reason: str | None = None, orphan_slot: int | None = None) -> None:
        """Return a running job to the queue, or cancel it if cancellation was requested.

        Args:
            reason: why its process died, or None if it exited normally. After several deaths
                without progress the job fails.
            orphan_slot: the job's slot, locked by the caller, if the service died too.
        """
        with self._database.writing() as connection:
            row = connection.execute(
                "SELECT cancel, done, deaths FROM jobs "
                "WHERE state = 'running' AND id = ? AND slot = coalesce(?, slot)",
                (name, orphan_slot),
            ).fetchone()
            if row is None:
                return
            deaths = row["deaths"] + (reason is not None)
            state, outcome = ("cancelled", None) if row["cancel"] else ("queued", None)
            if reason is not None and deaths >= MAX_DEATHS and state == "queued":
                progress = f"without getting further than {row['done']} rows x draws"
                state, outcome = "failed", json.dumps(f"{reason}, {deaths} times {progress}")
            ended = None if state == "queued" else time.time()
            connection.execute(
                "UPDATE jobs SET state = ?, outcome = ?, ended = ?, deaths = ?, slot = NULL "
                "WHERE id = ?",
                (state, outcome, ended, deaths, name),
            )

    def cancel(self, name: str) -> Job:
        """Cancel a job. Running jobs stop when they next report their progress."""
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE jobs SET state = 'cancelled', ended = ? WHERE id = ? AND state = 'queued'",
                (time.time(), name),
            )
            running = "UPDATE jobs SET cancel = 1 WHERE id = ? AND state = 'running'"
            connection.execute(running, (name,))
        return self.get(name)

    def clear_ended(self) -> None:
        """Delete the files of jobs that have ended, except their results."""
        for job in self._select("state IN ('done', 'failed', 'cancelled') AND NOT cleared"):
            size = self._clear(job)
            with self._database.writing() as connection:
                connection.execute(
                    "UPDATE jobs SET cleared = 1, bytes = ? WHERE id = ?", (size, job.id)
                )

    def _clear(self, job: Job) -> int:
        """Delete an ended job's files except its result. Return the result's size in bytes."""
        with as_state_errors(), suppress(FileNotFoundError):
            for entry in os.scandir(self.folder / job.id):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                elif job.state != "done" or entry.name != job.outcome:
                    Path(entry).unlink(missing_ok=True)
        return folder_bytes(self.folder / job.id)

    def forget(self, name: str) -> None:
        if self.get(name).is_over:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            with self._database.writing() as connection:
                connection.execute("DELETE FROM jobs WHERE id = ?", (name,))

    def delete_old(self, retention_s: float) -> None:
        """Delete leftover folders and jobs that ended more than `retention_s` seconds ago."""
        now = time.time()
        rows = self._database.query(
            "SELECT id FROM jobs WHERE state IN ('done', 'failed', 'cancelled') AND ended < ?",
            (now - retention_s,),
        )
        for (name,) in rows:
            with suppress(NotFound):  # deleted by another process
                self.forget(name)
        with as_state_errors(), suppress(FileNotFoundError):
            entries = os.scandir(self.folder)
            for name in [e.name for e in entries if e.stat().st_mtime < now - STRAY_S]:
                try:
                    self.get(name)
                except NotFound:
                    shutil.rmtree(self.folder / name, ignore_errors=True)
        with self._database.writing() as connection:  # if the clock was set back
            connection.execute("UPDATE jobs SET ended = ? WHERE ended > ?", (now, now))

    def requeue_orphans(self) -> list[str]:
        """Requeue running jobs whose process has died and return their ids."""
        orphans = []
        rows = self._database.query("SELECT id, slot FROM jobs WHERE state = 'running'")
        for name, number in rows:
            with self.slot(number) as handle:
                if handle is not None:
                    self.requeue(name, "the service that ran it ended", number)
                    orphans.append(name)
        return orphans

    @contextmanager
    def slot(self, number: int) -> Iterator[int | None]:
        """Lock a slot and yield its file descriptor, or None if it is already locked."""
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


def _check_bytes(connection: sqlite3.Connection, owner: str, max_bytes: int) -> None:
    query = "SELECT sum(bytes) FROM jobs WHERE owner = ?"
    size = connection.execute(query, (owner,)).fetchone()[0]
    if size > max_bytes:
        raise OverQuota(max_bytes, size)


def _job(row: sqlite3.Row) -> Job:
    with may_be_damaged(f"job {row['id']}"):
        values = {field.name: row[field.name] for field in fields(Job)}
        values["request"] = json.loads(row["request"])
        values["outcome"] = None if row["outcome"] is None else json.loads(row["outcome"])
        values |= {"worked_s": float(row["worked_s"]), "cancel": bool(row["cancel"])}
        for column, allowed in (("state", STATES), ("kind", get_args(Kind))):
            if row[column] not in allowed:
                raise ValueError(row[column])
    return Job(**values)
