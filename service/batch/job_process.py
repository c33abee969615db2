"""The process of one job: `python -m service.batch.job_process`, started by `service.batch.runner`.

It runs when no other process wants the processors, so that requests keep their latency, and ends
with its parent. All that is computed goes to the disk as it comes, and lasts from `sync` to `sync`:
a job that is taken up again goes on after the last row that lasts, and ends with the same bytes.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float32, Float64, Int64

from model_store.acquisition.choice import Copies, group_copies, max_joint_candidates, row_digests
from model_store.acquisition.ranking import (
    Choice,
    Lap,
    Pool,
    Ranked,
    Scored,
    check_row_scores,
    rank_pool_sync,
)
from model_store.acquisition.scoring import race_scores
from model_store.artifacts.disk import sync_folder
from model_store.artifacts.place import open_store
from model_store.conformal.rank_tables import benjamini_hochberg
from model_store.errors import DubitoError, InvalidInput, NoSpace, StateUnusable
from model_store.inference.model import NEEDED, Model
from model_store.inference.prediction import check_computed
from model_store.processes import be_idle, be_killed_first, end_with_parent
from model_store.scores.joint import Candidates
from model_store.sources.columns import count_unknown
from model_store.sources.files import check_ids, open_rows, stamp_of
from model_store.sources.row_file import Part, RowFile
from model_store.state.database import Database, of_disk
from model_store.state.jobs import Job, Jobs, State
from model_store.state.labels import Acquisition, keep_acquired, row_format
from service.api.options import group_numbers
from service.api.rows import add_row_id
from service.batch.candidate import Cancelled, fit_candidate
from service.batch.computation import (
    UNKNOWN_CATEGORIES,
    Computation,
    ComputationRequest,
    acquire_answer,
)
from service.batch.output import (
    ColumnFiles,
    table_columns,
    table_metadata,
    write_npz,
    write_parquet,
)
from service.engine.pool_ranking import acquired_rows, control_predictions, control_rows

OVER = 0  # exit code: the job has ended, or is to end
PUT_BACK = 3  # exit code: the job is to be taken up again later
SYNC_S = 2.0  # between syncs, about
TABLE_ROWS = 1 << 16  # of a row group of Parquet
PARTS_AT_ONCE = 3
TIMES_FIRST_LAP = 1.5  # the first lap of a race is all of it, where few rows are uncertain
# files of a job's folder
IDS_FILE = "ids.json"
GROUPS_FILE = "groups.json"
SELECTED_FILE = "selected.npz"  # the places of the rows that are ranked, and of control rows
ANSWER_FILE = "answer.json"

T = TypeVar("T")
Format = Literal["parquet", "npz"]
RowParts = Iterator[Float32[np.ndarray, "n I"]]


@dataclass(frozen=True, kw_only=True)
class JobRequest(ComputationRequest):
    """A job's request. Files of its own are named alone, those of the operator's folder by their
    whole path."""

    field: str  # of the request, that rows came by
    path: str
    stamp: str | None  # of the operator's file
    rows: int
    read_as: str
    ignored: list[str]
    encoded: bool = False  # whether rows of a model of columns are numbers
    race: float | None = None
    selected: bool = False  # whether the folder has SELECTED_FILE
    excluded: int = 0  # rows that were labelled already
    keep: bool = False  # the rows that are answered
    format: Format = "npz"


class JobRows:
    """The rows of a job, in parts, and how far the job is.

    Args:
        report: takes how many rows x draws there are to do and how many are done; returns whether
            to go on.
    """

    def __init__(
        self, folder: Path, request: JobRequest, model: Model, report: Callable[[int, int], bool]
    ) -> None:
        self.folder, self.request, self.model = folder, request, model
        self.computation = Computation(model, request)
        self.work, self.done = request.rows * request.num_samples, 0
        self._report = report
        spec = model.manifest.input
        self._spec = spec.encoded if request.encoded else spec
        self._synced = time.monotonic()
        self._file = self._open()

    def _open(self) -> RowFile:
        request = self.request
        path = self.folder / request.path  # a whole path takes the place of the folder
        is_there = path.exists()
        if not is_there or (request.stamp is not None and stamp_of(path) != request.stamp):
            expected = "the file as it was when the job was asked for"
            raise InvalidInput(request.field, expected, "another, or none")
        return open_rows(path, self._spec, request.field)

    @property
    def has_ids(self) -> bool:
        return (self.folder / IDS_FILE).exists() or self._file.has_ids

    def ids(self) -> list[str]:
        own = self.folder / IDS_FILE
        ids = json.loads(own.read_bytes()) if own.exists() else self._file.ids()
        if ids is None:
            return [str(i) for i in range(self.request.rows)]
        check_ids(ids, self.request.rows)
        return list(ids)

    def all_from(self, first: int) -> RowParts:
        for part in self._file.parts(first):
            x = self._numbers(part, first)
            yield x
            first += len(x)

    def some(self, rows: Int64[np.ndarray, "M"]) -> RowParts:
        """Yield some rows, given their places in ascending order."""
        if len(rows) == 0:
            return
        first = int(rows[0])
        for part in self._file.parts(first):
            n = len(next(iter(part.values()))) if isinstance(part, dict) else len(part)
            here = rows[slice(*np.searchsorted(rows, [first, first + n]))] - first
            if len(here):
                yield self._numbers(part, first)[here]
            first += n
            if first > rows[-1]:
                return

    def _numbers(self, part: Part, first: int) -> Float32[np.ndarray, "n I"]:
        return self.computation.numbers(part, self._spec, self.request.field, first)

    def advance(self, row_draws: int, columns: ColumnFiles | None = None) -> None:
        """Count what was done; now and then sync and report it.

        Raises:
            Cancelled: if the job is not to go on.
        """
        self.done += row_draws
        if time.monotonic() - self._synced < SYNC_S:
            return
        if columns is not None:
            columns.sync()
        self._synced = time.monotonic()
        if not self._report(self.work, self.done):
            raise Cancelled

    def fill(
        self,
        name: str,
        parts_from: Callable[[int], RowParts],
        num_draws: int,
        columns_of: Callable[[int, Float32[np.ndarray, "n I"]], Mapping[str, np.ndarray]],
    ) -> ColumnFiles:
        """Return what is computed of rows as columns, taken up where an earlier process left them.

        Args:
            parts_from: the rows from the one of that number on.
            columns_of: computes some rows, given the number of the first.
        """
        columns = ColumnFiles(self.folder / name)
        self.done += columns.rows * num_draws
        unknown = columns.note.setdefault(UNKNOWN_CATEGORIES, {})
        parts = self.computation.runs(parts_from(columns.rows), num_draws)
        for x, found in _each_overlapping(columns_of, columns.rows, parts):
            columns.append(found)
            count_unknown(unknown, x, self.model.manifest.input.columns)
            self.advance(len(x) * num_draws, columns)
        columns.sync()
        columns.close()
        return columns

    def write(self, name: str, write: Callable[[Path], Any]) -> str:
        """Write the answer whole, or not at all; return the name of its file."""
        draft = self.folder / f"{name}.draft"
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(self.folder / name)
        sync_folder(self.folder)
        self._report(self.work, self.work)
        return name


def predict(job: JobRows) -> str:
    """Predict the rows of a job, as /predict does; return the name of the answer's file."""
    request, computation = job.request, job.computation
    assert request.options is not None
    ids = job.ids() if job.has_ids else None
    groups = _groups(job) if computation.is_grouped else None
    draws = computation.draws()

    def columns_of(first: int, x: Float32[np.ndarray, "n I"]) -> dict[str, np.ndarray]:
        here = None if groups is None else groups[first : first + len(x)]
        arrays, computed = computation.predict(x, draws, here)
        check_computed(np.where(computed, 0.0, np.nan), request.field, first)
        return arrays

    columns = job.fill("columns", job.all_from, request.num_samples, columns_of)
    about = computation.about(columns.note[UNKNOWN_CATEGORIES])
    of_rows = {name: columns.column(name) for name in columns.names}
    if request.options.fdr is not None:  # all rows are decided together
        of_rows["flag"] = benjamini_hochberg(np.array(of_rows["p_value"]), request.options.fdr)

    def write(path: Path) -> None:
        if request.format == "npz":
            named = {} if ids is None else {"ids": ids}
            write_npz(path, {**about, **named, **of_rows})
        else:
            tables = (_table(job, ids, of_rows, i) for i in range(0, columns.rows, TABLE_ROWS))
            write_parquet(path, tables, table_metadata(about))

    return job.write(f"predictions.{request.format}", write)


def _groups(job: JobRows) -> Int64[np.ndarray, "N"] | None:
    """Return the number of each row's group, None where the request names none."""
    path, categories = job.folder / GROUPS_FILE, job.model.manifest.categories
    if categories is None or not path.exists():
        return None
    return group_numbers(json.loads(path.read_bytes()), categories)


def _table(
    job: JobRows, ids: list[str] | None, of_rows: dict[str, np.ndarray], first: int
) -> dict[str, Any]:
    here = slice(first, first + TABLE_ROWS)
    named = {} if ids is None else {"id": ids[here]}
    columns = ((name, np.asarray(column[here])) for name, column in of_rows.items())
    return {**named, **table_columns(job.model.manifest, columns)}


def acquire(job: JobRows, database: Database) -> str:
    """Rank the rows of a job, as /acquire does; return the name of the answer's file."""
    request, manifest = job.request, job.model.manifest
    ids = job.ids()
    ranked_rows, control = _read_selection(job.folder, request)
    k = request.k - len(control)
    asked = request.acquisition, k, request.num_samples, request.race, request.beta
    choice = Choice(manifest.task, *asked)
    names = [ids[i] for i in ranked_rows.tolist()] if request.selected else ids
    pool = JobPool(job, ranked_rows, names, choice)
    ranked: Ranked = rank_pool_sync(pool, choice)
    rows = [
        {**row, "index": int(ranked_rows[row["index"]]), "control": False} for row in ranked.rows
    ]
    rows += control_rows(control.tolist(), ids, len(rows))
    if request.keep:
        _keep_rows(job, rows, database)
    found = request.rows, request.excluded, pool.unknown, request.race, ranked.finalists
    answer = acquire_answer(manifest, request, rows, *found)
    return job.write(ANSWER_FILE, lambda path: path.write_text(json.dumps(answer)))


def _read_selection(
    folder: Path, request: JobRequest
) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "C"]]:
    if not request.selected:
        return np.arange(request.rows), np.empty(0, dtype=np.int64)
    with np.load(folder / SELECTED_FILE, allow_pickle=False) as selected:
        return selected["ranked"], selected["control"]


def count_answered(folder: Path) -> tuple[int, int]:
    """Return how many rows the answer of a job has, and how many of them are set aside."""
    ranking = json.loads((folder / ANSWER_FILE).read_bytes())["ranking"]
    return len(ranking), sum(row["control"] for row in ranking)


def _keep_rows(job: JobRows, ranked: list[dict[str, Any]], database: Database) -> None:
    request, model = job.request, job.model
    places = sorted(row["index"] for row in ranked)
    if not places:
        return
    x = np.concatenate([*job.some(np.array(places))])
    pool = dict(zip(places, x, strict=True))
    aside = np.array([pool[row["index"]] for row in ranked if row["control"]])
    draws, predictions = job.computation.draws(), list[dict[str, Any]]()
    for part in job.computation.runs([aside]):
        predictions += control_predictions(
            model.manifest, model.prediction(*model.runtime.run_set(part, draws), None)
        )
    of_model = request.model, request.version, row_format(model.manifest)
    how = Acquisition(*of_model, request.acquisition, request.seed, request.num_samples)
    keep_acquired(database, how, acquired_rows(pool, ranked, predictions))


class JobPool(Pool):
    """The rows of a job that are ranked; what is computed of them is kept."""

    def __init__(
        self, job: JobRows, rows: Int64[np.ndarray, "N"], ids: Sequence[str], choice: Choice
    ) -> None:
        self.ids, self.seed, self.pause = ids, job.request.seed, lambda: job.advance(0)
        self.unknown: dict[str, int] = {}  # categories of the rows that are scored
        self._job, self._rows, self._choice = job, rows, choice
        self._laps = self._lap_work = 0

    async def scores(self) -> Float64[np.ndarray, "N"]:
        return np.array(self._of_all_rows.column("score"))

    async def copies(self) -> Copies:
        return group_copies(np.array(self._of_all_rows.column("digest")))

    async def lap(self, lap: Lap) -> Scored:
        columns = self._fill(lap, is_race=True)
        return np.array(columns.column("score")), np.array(columns.column("error"))

    @cached_property
    def _of_all_rows(self) -> ColumnFiles:
        return self._fill(Lap(np.arange(len(self._rows)), self._choice.num_samples), is_race=False)

    def _fill(self, lap: Lap, is_race: bool) -> ColumnFiles:
        """Return the scores of some rows, as a race goes by them with their standard errors; their
        digests where copies are looked for."""
        job, request = self._job, self._job.request
        rows, num_draws = self._rows[lap.rows], lap.num_draws
        draws = job.computation.draws(num_draws)
        if self._laps == 0:
            times = TIMES_FIRST_LAP if is_race else 1.0
            self._least_work = int(times * len(rows) * num_draws)
        self._laps += 1
        self._lap_work += len(rows) * num_draws
        job.work = max(self._lap_work, self._least_work)  # so that progress does not fall

        def columns_of(first: int, x: Float32[np.ndarray, "n I"]) -> dict[str, np.ndarray]:
            columns: dict[str, np.ndarray] = {}
            if job.computation.is_batch:
                columns["digest"] = row_digests(x)
            if is_race:
                raced = job.model, x, draws, request.acquisition, request.priors
                columns["score"], columns["error"] = race_scores(*raced)
            else:
                columns["score"] = job.computation.scores(x, draws)
            check_row_scores(columns["score"], rows[first : first + len(x)], request.field)
            return columns

        columns = job.fill(
            f"lap {self._laps - 1}", lambda first: job.some(rows[first:]), num_draws, columns_of
        )
        self.unknown = self.unknown or columns.note[UNKNOWN_CATEGORIES]  # the first has all rows
        return columns

    async def candidates(self, copies: Copies) -> tuple[Int64[np.ndarray, "M"], Candidates]:
        """Return the rows that gain most alone; they are read once more."""
        job, choice = self._job, self._choice
        most = max_joint_candidates(
            choice.acquisition, job.model, len(copies.first), choice.k, choice.num_samples
        )
        gains = (await self.scores())[copies.first]
        rows = np.lexsort((np.arange(len(gains)), -gains))[:most]
        job.work += len(rows) * choice.num_samples
        places = self._rows[copies.first[rows]]

        def parts() -> Iterator[Float32[np.ndarray, "n I"]]:
            for x in job.computation.runs(job.some(np.sort(places))):
                yield x
                job.advance(len(x) * choice.num_samples)

        return rows, job.computation.candidates(parts(), places)


def _each_overlapping(
    compute: Callable[[int, Float32[np.ndarray, "n I"]], T], first: int, parts: RowParts
) -> Iterator[tuple[Float32[np.ndarray, "n I"], T]]:
    """Yield parts, in order, and what is computed of each and the number of its first row.

    Several are worked on at once: one thread alone makes scores of outputs, which leaves processors
    to the next part's.
    """
    with ThreadPoolExecutor(PARTS_AT_ONCE, "parts") as pool:
        pending: deque[tuple[Float32[np.ndarray, "n I"], Future[T]]] = deque()
        for x in parts:
            pending.append((x, pool.submit(compute, first, x)))
            first += len(x)
            if len(pending) == PARTS_AT_ONCE:
                x, found = pending.popleft()
                yield x, found.result()
        for x, found in pending:
            yield x, found.result()


def main() -> int:
    end_with_parent()
    be_killed_first()
    be_idle()
    options = json.loads(sys.stdin.readline())
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the service too
    database = Database(Path(options["state"]))
    try:
        return run(database, options, ending)
    finally:
        database.close()


def run(database: Database, options: dict[str, Any], ending: threading.Event) -> int:
    """Run a job that was claimed, and record how it ended."""
    jobs, begun = Jobs(database), time.monotonic()
    job, most_bytes = jobs.get(options["job"]), options["most_bytes"]

    def report(work: int, done: int) -> bool:
        worked_s = job.worked_s + time.monotonic() - begun
        return jobs.progress(job.id, work, done, worked_s, most_bytes) and not ending.is_set()

    state: State = "failed"
    outcome: str | None
    try:
        if job.kind == "candidate":
            outcome = fit_candidate(jobs.folder, job, report)
        else:
            outcome = _compute(database, job, options, report)
        state = "done"
    except Cancelled:
        if not jobs.get(job.id).cancel:
            return PUT_BACK
        state, outcome = "cancelled", None
    except (NoSpace, StateUnusable):
        raise
    except DubitoError as error:
        outcome = str(error)
    except OSError as error:
        outcome = str(of_disk(error))
    jobs.finish(job.id, state, outcome)
    return OVER


def _compute(
    database: Database, job: Job, options: dict[str, Any], report: Callable[[int, int], bool]
) -> str:
    request = JobRequest.from_json(job.request)
    store = open_store(**options["store"])
    version = store.open(request.model, request.version, wanted=NEEDED)
    model = Model.load(version, options["threads"])
    rows = JobRows(Jobs(database).folder / job.id, request, model, report)
    try:
        return predict(rows) if job.kind == "predict" else acquire(rows, database)
    except InvalidInput as error:
        raise add_row_id(error, rows.ids() if rows.has_ids else None) from None


if __name__ == "__main__":
    sys.exit(main())
