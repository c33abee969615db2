"""The process that runs a job, started by `service.batch.runner`.

It runs at the lowest priority and ends with its parent. Results are synced to disk regularly, and a
restarted job resumes after the last synced row.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float64, Int64
from pydantic import TypeAdapter

from model_store.acquisition.choice import (
    NO_SEED,
    Choice,
    Selection,
    id_hashes,
    max_joint_candidates,
)
from model_store.acquisition.ranking import Pool, Scored, rank_pool
from model_store.artifacts.disk import sync_folder
from model_store.artifacts.store import open_store
from model_store.conformal.mondrian import group_numbers
from model_store.conformal.rank_tables import benjamini_hochberg
from model_store.errors import DubitoError, InvalidInput, NoSpace, StateUnusable
from model_store.inference.model import NEEDED, Model
from model_store.inference.prediction import check_computed
from model_store.processes import end_with_parent, prefer_oom_kill, run_when_idle
from model_store.scores.joint import Candidates
from model_store.scores.records import concatenate
from model_store.sources.columns import count_unknown
from model_store.sources.files import check_ids, file_stamp, open_rows
from model_store.sources.row_file import Part, RowFile
from model_store.sources.rows import add_row_id, count_rows
from model_store.state.database import Database, convert_disk_error
from model_store.state.jobs import Job, Jobs, State
from model_store.state.labels import Acquisition, row_format, save_acquired
from model_store.state.live import prediction_records
from model_store.types import JsonObject
from service.batch.candidate import Cancelled, fit_candidate
from service.batch.computation import (
    UNKNOWN_CATEGORIES,
    Computation,
    ComputationRequest,
    Inputs,
    acquire_answer,
)
from service.batch.output import ResultRecords, table_columns, table_metadata, to_table
from service.engine.pool_ranking import acquired_rows, answer_rows

OVER = 0  # exit code: the job has ended
PUT_BACK = 3  # exit code: queue the job again
SYNC_S = 2.0  # between syncs
TABLE_ROWS = 1 << 16  # per Parquet row group
MAX_ACTIVE_PARTS = 3
# Files in a job's folder
IDS_FILE = "ids.json"
GROUPS_FILE = "groups.json"
SELECTED_FILE = "selected.npz"  # indices of ranked and control rows; absent if all are ranked
ANSWER_FILE = "answer.json"

T = TypeVar("T")
Format = Literal["parquet", "npz"]


@dataclass(frozen=True, kw_only=True)
class JobRequest(ComputationRequest):
    """The request that a job runs."""

    field: str  # of the request that contained the rows
    path: str  # name of an uploaded file, or absolute path of an operator's file
    stamp: str | None  # of an operator's file
    rows: int
    read_as: str
    ignored: list[str]
    inline: bool = False  # the file contains the encoded rows of a request
    excluded: int = 0  # rows that already have labels
    keep: bool = False  # stores the acquired rows
    format: Format = "npz"


class JobRows:
    """A job's rows. `report(work, finished_work)`, in rows x draws, returns False to cancel."""

    def __init__(
        self, folder: Path, request: JobRequest, model: Model, report: Callable[[int, int], bool]
    ) -> None:
        self.folder, self.request, self.model = folder, request, model
        self.computation = Computation(model, request)
        self.work, self.finished_work = request.rows * request.num_samples, 0
        self._report = report
        spec = model.manifest.input
        self._spec = spec.encoded if request.inline else spec
        self._synced = time.monotonic()
        self._file = self._open()

    def _open(self) -> RowFile:
        request = self.request
        path = self.folder / request.path  # an absolute path replaces the folder
        is_present = path.exists()
        if not is_present or (request.stamp is not None and file_stamp(path) != request.stamp):
            expected = "a file that is unchanged since the job was created"
            raise InvalidInput(request.field, expected, "another, or none")
        return open_rows(path, self._spec, request.field)

    @property
    def has_ids(self) -> bool:
        return (self.folder / IDS_FILE).exists() or self._file.has_ids

    def ids(self) -> list[str]:
        path = self.folder / IDS_FILE
        ids = json.loads(path.read_bytes()) if path.exists() else self._file.ids()
        if ids is None:
            return [str(i) for i in range(self.request.rows)]
        check_ids(ids, self.request.rows)
        return list(ids)

    def select(self, rows: Int64[np.ndarray, "M"]) -> Iterator[Inputs]:
        """Yield the rows with the given indices, which must be in ascending order."""
        if len(rows) == 0:
            return
        first = int(rows[0])
        for part in self._file.parts(first):
            n = count_rows(part)
            part_rows = rows[slice(*np.searchsorted(rows, [first, first + n]))] - first
            if len(part_rows):
                yield self._numbers(part, first)[part_rows]
            first += n
            if first > rows[-1]:
                return

    def _numbers(self, part: Part, first: int) -> Inputs:
        request = self.request
        if request.inline:
            return self.computation.complete(np.array(part, dtype=np.float32), request.field, first)
        return self.computation.numbers(part, self._spec, request.field, first)

    def advance(self, row_draws: int, results: ResultRecords | None = None) -> None:
        """Record progress and report it every few seconds. Raise Cancelled if the job must stop."""
        self.finished_work += row_draws
        if time.monotonic() - self._synced < SYNC_S:
            return
        if results is not None:
            results.sync()
        self._synced = time.monotonic()
        if not self._report(self.work, self.finished_work):
            raise Cancelled

    def fill(
        self,
        name: str,
        rows: Int64[np.ndarray, "N"],
        num_draws: int,
        compute: Callable[[int, Inputs], Mapping[str, np.ndarray]],
    ) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Compute columns for rows, resuming where an earlier process stopped.

        `compute` gets the number of earlier rows, and rows in ascending order. Also return the
        number of unknown categories by column.
        """
        results = ResultRecords(self.folder / name)
        self.finished_work += results.rows * num_draws
        unknown = results.note.setdefault(UNKNOWN_CATEGORIES, {})
        parts = self.computation.batches(self.select(rows[results.rows :]), num_draws)
        for x, columns in _compute_parallel(compute, results.rows, parts):
            results.append(columns)
            count_unknown(unknown, x, self.model.manifest.input.columns)
            self.advance(len(x) * num_draws, results)
        results.sync()
        results.close()
        return results.columns(), unknown

    def write(self, name: str, write: Callable[[Path], Any]) -> str:
        """Write the answer atomically and return its file name."""
        draft = self.folder / f"{name}.draft"
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(self.folder / name)
        sync_folder(self.folder)
        self._report(self.work, self.work)
        return name


def predict(job: JobRows) -> str:
    """Predict a job's rows as /predict does. Return the answer's file name."""
    request, computation = job.request, job.computation
    ids = job.ids() if job.has_ids else None
    groups, categories = None, job.model.manifest.categories
    if categories is not None and (job.folder / GROUPS_FILE).exists():
        names = json.loads((job.folder / GROUPS_FILE).read_bytes())
        groups = group_numbers(names, categories.names)
    draws = computation.draws()

    def compute(first: int, x: Inputs) -> dict[str, np.ndarray]:
        part_groups = None if groups is None else groups[first : first + len(x)]
        arrays, computed = computation.predict(x, draws, part_groups)
        numbers = range(first, first + len(computed))
        check_computed(np.where(computed, 0.0, np.nan), request.field, numbers)
        return arrays

    columns, unknown = job.fill("rows", np.arange(request.rows), request.num_samples, compute)
    metadata = computation.metadata(unknown)
    fdr = request.decisions.fdr
    if fdr is not None:  # needs the p-values of all rows
        flag = benjamini_hochberg(np.array(columns["p_value"]), fdr)
        if "missing" in columns:
            flag |= columns["missing"].any(axis=1)
        columns["flag"] = flag

    def write(path: Path) -> None:
        if request.format == "npz":
            arrays: dict[str, Any] = {**metadata, **columns}
            if ids is not None:
                arrays["ids"] = np.array(ids, dtype=np.str_)
            with path.open("wb") as file:
                np.savez(file, **arrays)
        else:
            from model_store.sources.parquet import write_tables  # imports pyarrow

            groups = (_row_group(job, ids, columns, i) for i in range(0, request.rows, TABLE_ROWS))
            schema_metadata = table_metadata(metadata)
            write_tables(path, (to_table(group, schema_metadata) for group in groups))

    return job.write(f"predictions.{request.format}", write)


def _row_group(
    job: JobRows, ids: list[str] | None, columns: dict[str, np.ndarray], first: int
) -> JsonObject:
    rows = slice(first, first + TABLE_ROWS)
    id_column = {} if ids is None else {"id": ids[rows]}
    part = {name: np.array(column[rows]) for name, column in columns.items()}
    return {**id_column, **table_columns(job.model.manifest, part)}


def acquire(job: JobRows, database: Database) -> str:
    """Rank a job's rows as /acquire does. Return the answer's file name."""
    request, ids = job.request, job.ids()
    selection = Selection(np.arange(request.rows), np.empty(0, dtype=np.int64), request.excluded)
    if (job.folder / SELECTED_FILE).exists():
        with np.load(job.folder / SELECTED_FILE, allow_pickle=False) as selected:
            selection = replace(selection, **selected)
    choice = replace(request.choice, k=request.choice.k - len(selection.control))
    ranked_ids = [ids[i] for i in selection.ranked.tolist()]
    pool = JobPool(job, selection.ranked, ranked_ids, choice)
    ranked = asyncio.run(rank_pool(pool, choice))
    rows = answer_rows(ranked, selection, ids)
    if request.keep:
        _store_acquired(job, rows, database)
    counts = request.rows, request.excluded, pool.unknown, ranked.finalists
    answer = acquire_answer(job.model.manifest, choice, request.seed, rows, *counts)
    return job.write(ANSWER_FILE, lambda path: path.write_text(json.dumps(answer)))


def count_answered(folder: Path) -> tuple[int, int]:
    ranking = json.loads((folder / ANSWER_FILE).read_bytes())["ranking"]
    return len(ranking), sum(row["control"] for row in ranking)


def _store_acquired(job: JobRows, ranked: list[JsonObject], database: Database) -> None:
    request, model = job.request, job.model
    places = sorted(row["index"] for row in ranked)
    if not places:
        return
    x = np.concatenate([*job.select(np.array(places))])
    pool = dict(zip(places, x, strict=True))
    control_rows = np.array([pool[row["index"]] for row in ranked if row["control"]])
    draws, predictions = job.computation.draws(), list[JsonObject]()
    for part in job.computation.batches([control_rows]):
        prediction = model.prediction(*model.runtime.run_set(part, draws))
        predictions += prediction_records(prediction, model.manifest.classes)
    model_fields = request.model, request.version, row_format(model.manifest)
    acquisition = Acquisition(
        *model_fields, request.choice.acquisition, request.seed, request.num_samples
    )
    save_acquired(database, acquisition, acquired_rows(pool, ranked, predictions))


class JobPool(Pool):
    """A job's pool, whose scores are stored in the job's folder."""

    def __init__(
        self, job: JobRows, rows: Int64[np.ndarray, "N"], ids: Sequence[str], choice: Choice
    ) -> None:
        self.ids, self.seed, self.pause = ids, job.request.seed, lambda: job.advance(0)
        self.unknown: dict[str, int] = {}  # unknown categories of the scored rows
        self._job, self._rows, self._choice = job, rows, choice
        self._laps = 0

    async def scores(self) -> Float64[np.ndarray, "N"]:
        return np.array(self._all_columns["score"])

    async def scores_with_errors(self, rows: Int64[np.ndarray, "n"], num_draws: int) -> Scored:
        columns = self._fill(rows, num_draws, is_race=True)
        return np.array(columns["score"]), np.array(columns["error"])

    @cached_property
    def _all_columns(self) -> dict[str, np.ndarray]:
        return self._fill(np.arange(len(self._rows)), self._choice.num_samples, is_race=False)

    def _fill(
        self, rows: Int64[np.ndarray, "n"], num_draws: int, is_race: bool
    ) -> dict[str, np.ndarray]:
        job, request = self._job, self._job.request
        rows = self._rows[rows]
        draws = job.computation.draws(num_draws)
        job.work = max(job.work, job.finished_work + len(rows) * num_draws)

        def compute(first: int, x: Inputs) -> dict[str, np.ndarray]:
            columns: dict[str, np.ndarray] = {}
            if is_race:
                columns["score"], columns["error"] = job.computation.scorer.race(x, draws)
            else:
                columns["score"] = job.computation.scorer.scores(x, draws)
            check_computed(columns["score"], request.field, rows[first : first + len(x)])
            return columns

        columns, unknown = job.fill(f"lap {self._laps}", rows, num_draws, compute)
        self._laps += 1
        self.unknown = self.unknown or unknown  # from all rows
        return columns

    async def candidates(self) -> tuple[Int64[np.ndarray, "M"], Candidates]:
        """Compute the candidates for the rows with the largest gains."""
        job, choice = self._job, self._choice
        max_rows = max_joint_candidates(choice, job.model, len(self.ids))
        order = np.lexsort((id_hashes(self.ids, NO_SEED), -await self.scores()))
        rows = np.sort(order[:max_rows])  # in the order of the file
        job.work += len(rows) * choice.num_samples
        draws, parts = job.computation.draws(), list[Candidates]()
        for x in job.computation.batches(job.select(self._rows[rows])):
            parts.append(job.computation.scorer.candidates(x, draws))
            job.advance(len(x) * choice.num_samples)
        return rows, concatenate(parts)


def _compute_parallel(
    compute: Callable[[int, Inputs], T], first: int, parts: Iterator[Inputs]
) -> Iterator[tuple[Inputs, T]]:
    with ThreadPoolExecutor(MAX_ACTIVE_PARTS, "parts") as pool:
        pending: deque[tuple[Inputs, Future[T]]] = deque()
        for x in parts:
            pending.append((x, pool.submit(compute, first, x)))
            first += len(x)
            if len(pending) == MAX_ACTIVE_PARTS:
                x, future = pending.popleft()
                yield x, future.result()
        for x, future in pending:
            yield x, future.result()


def main() -> int:
    end_with_parent()
    prefer_oom_kill()
    run_when_idle()
    options = json.loads(sys.stdin.readline())
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service ends the job
    database = Database(Path(options["state"]))
    try:
        return run(database, options, ending)
    finally:
        database.close()


def run(database: Database, options: JsonObject, ending: threading.Event) -> int:
    jobs, start = Jobs(database), time.monotonic()
    job, max_bytes = jobs.get(options["job"]), options["max_bytes"]

    def report(work: int, done: int) -> bool:
        worked_s = job.worked_s + time.monotonic() - start
        return jobs.progress(job.id, work, done, worked_s, max_bytes) and not ending.is_set()

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
        outcome = str(convert_disk_error(error))
    jobs.finish(job.id, state, outcome)
    return OVER


def _compute(
    database: Database, job: Job, options: JsonObject, report: Callable[[int, int], bool]
) -> str:
    request = TypeAdapter(JobRequest).validate_python(job.request)
    store = open_store(**options["store"])
    version = store.open(request.model, request.version, files=NEEDED)
    model = Model.load(version, options["threads"])
    rows = JobRows(Jobs(database).folder / job.id, request, model, report)
    try:
        return predict(rows) if job.kind == "predict" else acquire(rows, database)
    except InvalidInput as error:
        raise add_row_id(error, rows.ids() if rows.has_ids else None) from None


if __name__ == "__main__":
    sys.exit(main())
