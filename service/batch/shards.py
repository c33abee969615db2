"""Workers that process the shards of a data set.

All workers use the draws of the seed, so they write the same bytes. A part is created after its
rejects, so an existing part is complete.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from model_store.acquisition.choice import RANDOM, id_hashes, power_scores, random_scores, top
from model_store.artifacts.store import open_store
from model_store.errors import DubitoError, InvalidInput
from model_store.inference.model import NEEDED, Model
from model_store.processes import end_with_parent, prefer_oom_kill
from model_store.sources.columns import count_unknown
from model_store.sources.files import check_ids
from model_store.sources.parquet import to_parquet
from model_store.sources.row_file import ID
from service.batch.computation import UNKNOWN_CATEGORIES, Computation
from service.batch.data_set import OUT, PLAN, PLANS, SOURCE, Rows, Shard, read_shard, reject_line
from service.batch.files import Stopped, open_files
from service.batch.output import table_columns, table_metadata, to_table
from service.server.process import keep_heaps_whole

UNKNOWN_KEY = f"dubito.{UNKNOWN_CATEGORIES}"  # in a part's metadata
NOT_COMPUTED = (
    "expected numbers that the model can compute with, got some whose result is not finite"
)
REASONS = 3  # reported per shard
MAX_TRIES = 5  # rounds without a finished shard
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class WorkerOptions:
    source: str
    out: str
    store: dict[str, Any]  # arguments of `open_store`


@dataclass(frozen=True)
class ShardResult:
    shard: int
    rejected: int = 0
    reasons: tuple[str, ...] = ()
    error: str | None = None
    is_retryable: bool = False


class Worker:
    """Processes shards one at a time."""

    def __init__(self, options: WorkerOptions, threads: int) -> None:
        self._options, self._threads = options, threads
        self._is_ready = False

    def result(self, number: int) -> ShardResult:
        """Process a shard, reporting any error in the result."""
        try:
            if not self._is_ready:
                self._prepare()
            return self._compute_shard(self.plan.shards[number])
        except InvalidInput as error:
            return ShardResult(number, error=str(error))
        except (DubitoError, OSError) as error:
            return ShardResult(number, error=str(error), is_retryable=True)
        except Exception as error:
            text = f"part {number}: {type(error).__name__}: {error}"[:500]
            return ShardResult(number, error=text, is_retryable=True)

    def _prepare(self) -> None:
        options = self._options
        self.out = open_files(options.out, OUT)
        content = self.out.read(PLAN)
        if content is None:
            raise InvalidInput(OUT, "a location that all workers can access", "none")
        self.plan = PLANS.validate_json(content)
        request = self.plan.request
        version = open_store(**options.store).open(request.model, request.version, files=NEEDED)
        self.model = Model.load(version, self._threads)
        if self.model.manifest.digest != request.manifest:
            expected = f"the {request.model} version {request.version} of the job"
            raise InvalidInput("DUBITO_STORE", expected, "another")
        self.computation = Computation(self.model, request)
        self.draws = self.computation.draws()
        self.source = open_files(options.source, SOURCE)
        self._is_ready = True

    def _compute_shard(self, shard: Shard) -> ShardResult:
        rejects = list[bytes]()
        compute = self._score if self.plan.request.kind == "score" else self._rank
        content = compute(shard, rejects)
        if rejects:
            self.out.create(self.plan.rejects(shard.number), b"".join(rejects))
        self.out.create(self.plan.part(shard.number), content)
        reasons = tuple(json.loads(line)["reason"] for line in rejects[:REASONS])
        return ShardResult(shard.number, len(rejects), reasons)

    def _compute_rows(
        self,
        shard: Shard,
        rejects: list[bytes],
        compute: Callable[[Rows], tuple[Mapping[str, np.ndarray], np.ndarray]],
    ) -> tuple[list[str], dict[str, np.ndarray], dict[str, int]]:
        """Return the ids, arrays and unknown-category counts of a shard's rows.

        `compute` returns the arrays of rows and a mask of the finite results.
        """
        ids, parts = list[str](), list[Mapping[str, np.ndarray]]()
        unknown: dict[str, int] = {}
        for read in read_shard(self.source, self.plan, shard, self.computation, rejects):
            for rows in read.parts(self.computation.batch_rows()):
                arrays, computed = compute(rows)
                invalid, rows = rows.take(~computed), rows.take(computed)
                invalid_rows = zip(invalid.places.tolist(), invalid.ids, strict=True)
                rejects += [reject_line(place, name, NOT_COMPUTED) for place, name in invalid_rows]
                ids += rows.ids
                parts.append({name: array[computed] for name, array in arrays.items()})
                count_unknown(unknown, rows.x, self.model.manifest.input.columns)
        if not parts:  # an empty part still needs the columns
            row = np.zeros((1, self.model.row_size), dtype=np.float32)
            arrays, _ = compute(Rows(np.zeros(1, dtype=np.int64), [""], row))
            parts = [{name: array[:0] for name, array in arrays.items()}]
        return ids, {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}, unknown

    def _score(self, shard: Shard, rejects: list[bytes]) -> bytes:
        ids, arrays, unknown = self._compute_rows(
            shard, rejects, lambda rows: self.computation.predict(rows.x, self.draws)
        )
        columns = {ID: ids, **table_columns(self.model.manifest, arrays)}
        return to_parquet(to_table(columns, table_metadata(self.computation.metadata(unknown))))

    def _rank(self, shard: Shard, rejects: list[bytes]) -> bytes:
        request = self.plan.request

        def compute(rows: Rows) -> tuple[dict[str, np.ndarray], np.ndarray]:
            scores = self._scores(rows)
            return {"place": rows.places, "score": scores}, np.isfinite(scores)

        ids, arrays, unknown = self._compute_rows(shard, rejects, compute)
        check_ids(ids, len(ids))
        score, hashes = arrays["score"], id_hashes(ids, request.seed)
        top_rows = top(score, hashes, request.choice.k) if ids else np.arange(0)
        columns: dict[str, Any] = {
            "place": arrays["place"][top_rows],
            ID: [ids[i] for i in top_rows.tolist()],
            "score": score[top_rows],
            "hash": hashes[top_rows],
        }
        unknown = {} if request.choice.acquisition == RANDOM else unknown
        return to_parquet(to_table(columns, {UNKNOWN_KEY: json.dumps(unknown)}))

    def _scores(self, rows: Rows) -> Float64[np.ndarray, "n"]:
        choice, seed = self.plan.request.choice, self.plan.request.seed
        name = choice.acquisition
        if name == RANDOM:
            return random_scores(id_hashes(rows.ids, seed))
        scores = self.computation.scorer.scores(rows.x, self.draws)
        if name not in self.model.predictive.sampling_acquisitions:
            return scores
        powers = power_scores(scores, rows.ids, seed, choice.beta)
        return np.where(np.isfinite(scores), powers, np.nan)


def run_rounds(
    run_round: Callable[[list[int]], Iterable[ShardResult]], todo: list[int]
) -> Generator[ShardResult, None, None]:
    """Process shards in rounds and yield their results.

    `run_round` tries shards once. It omits the shards of workers that died. Raise Stopped after
    `MAX_TRIES` rounds in which no shard succeeded.
    """
    left, failures, reason = {*todo}, 0, "a worker process died"
    while left:
        failures += 1
        for result in run_round(sorted(left)):
            if result.is_retryable:
                reason = str(result.error)
                continue
            left.discard(result.shard)
            failures = 0
            yield result
        if failures == MAX_TRIES:
            raise Stopped(f"{OUT}: part {min(left)} was tried {MAX_TRIES} times: {reason}")


def run_local(
    options: WorkerOptions, todo: list[int], workers: int
) -> Generator[ShardResult, None, None]:
    """Process shards in rounds, using local worker processes."""
    os.environ |= ONE_THREAD  # inherited by the workers
    return run_rounds(lambda shards: _run_round(options, shards, workers), todo)


def _run_round(options: WorkerOptions, shards: list[int], workers: int) -> Iterator[ShardResult]:
    context = multiprocessing.get_context("spawn")  # forking a process with threads is unsafe
    with ProcessPoolExecutor(min(workers, len(shards)), context, _start_worker, (options,)) as pool:
        try:
            for future in as_completed([pool.submit(_process_shard, n) for n in shards]):
                yield future.result()
        except BrokenProcessPool:
            return
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


_worker: Worker  # only in worker processes


def _start_worker(options: WorkerOptions) -> None:
    global _worker
    end_with_parent()
    prefer_oom_kill()
    keep_heaps_whole()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    _worker = Worker(options, threads=1)


def _process_shard(number: int) -> ShardResult:
    return _worker.result(number)
