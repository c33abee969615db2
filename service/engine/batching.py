"""Predictions: the way from rows to scores.

Requests wait in a queue. A worker thread takes the first of them, and with it all others of the same model and
number of draws that fit into a *micro-batch*: one product of rows and draws, under one fresh draw set, so that draws
are made once for many requests. An idle server has no queue, and nobody waits for company; a busy one waits a moment,
since each micro-batch needs draws of its own. A request that is larger than a micro-batch is computed in parts,
between which others get their turn.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32
from starlette.requests import ClientDisconnect

from model_store.conformal.stopping import StoppingRule
from model_store.inference.model import Prediction
from model_store.inference.runtime import HELD_BYTES, DrawSet
from model_store.scores.tasks import samples_of
from service.engine.admission import Admission
from service.http.problems import PastDeadline
from service.observability.metrics import Metrics
from service.registry.models import Served

T = TypeVar("T")

logger = logging.getLogger("dubito")

SMALL_ROW_DRAWS = 200  # a millisecond of arithmetic
BATCH_ROW_DRAWS = 6_400  # rows x draws of a micro-batch
REMADE_ROW_DRAWS = 100_000  # the same where draws are too large to hold, and made again for each part of a request
FEW_ROWS = 8  # of a request with a short answer
LEAST_AT_ONCE = 16  # requests that a micro-batch may take, however few are about
GATHER_S = 0.01  # after a micro-batch, in which those who come with the next requests are waited for
PATIENCE_S = 0.05  # before a look at whether the client is still there


@dataclass(frozen=True)
class Predicted:
    """A prediction, the draws behind it, and, where asked for, what each draw says: `outputs.samples_of`."""

    prediction: Prediction
    seed: int
    num_samples: int
    samples: Float32[np.ndarray, "K N C"] | None


@dataclass(eq=False)
class Job:
    """A request's rows to predict: exactly under the draws of its seed, or under fresh ones."""

    served: Served
    x: Float32[np.ndarray, "N I"]
    num_samples: int
    seed: int | None
    keep_samples: bool
    answer: Callable[[Predicted], Any]  # runs on the worker thread, or if it is short on the event loop
    deadline: float = math.inf  # of time.monotonic
    rule: StoppingRule | None = None  # when a row stops drawing; None: at `num_samples`
    future: "asyncio.Future[Any] | None" = None
    draws: DrawSet | None = None
    begun: int = 0  # rows that were computed so far
    asked: float = 0.0  # when it, or its next part, began to wait, on the clock of time.perf_counter
    times: list[tuple[float, float, float]] = field(default_factory=list)  # asked, begun, ended of each part
    parts: list[tuple[Prediction, Float32[np.ndarray, "K N C"] | None]] = field(default_factory=list)

    @property
    def has_short_answer(self) -> bool:
        """Whether the event loop may write the answer."""
        return len(self.x) <= FEW_ROWS and not self.keep_samples

    @property
    def rows_left(self) -> int:
        """How many rows are still to be computed."""
        return len(self.x) - self.begun


@dataclass(eq=False)
class Call:
    """Other work that takes its turn on the worker thread."""

    work: Callable[[], Any]
    future: "asyncio.Future[Any]"
    deadline: float = math.inf


class Predictor:
    """Runs models for requests that were admitted."""

    def __init__(self, admission: Admission, metrics: Metrics) -> None:
        self.admission = admission
        self.metrics = metrics
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")
        self._queue: deque[Job | Call] = deque()
        self._something = threading.Condition()
        self._closed = False
        self._at_once = LEAST_AT_ONCE  # requests that a micro-batch may take, of those about
        self._gathered = 0  # requests in the queue that are waited for, until `_gathering_until`
        self._gathering_until = -math.inf
        self._worker = threading.Thread(target=self._work, name="model", daemon=True)
        self._worker.start()

    def close(self) -> None:
        """End the threads, after what they are at."""
        with self._something:
            self._closed = True
            self._something.notify()
        self._worker.join()
        self._loader.shutdown()

    async def load(self, work: Callable[[], T]) -> T:
        """Run work that reads files, away from the event loop and from predictions."""
        return await asyncio.get_running_loop().run_in_executor(self._loader, work)

    async def compute(self, work: Callable[[], T], deadline: float = math.inf) -> T:
        """Run work on the worker thread, in its turn.

        Raises:
            PastDeadline: if its turn comes later than that.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._put(Call(work, future, deadline))
        return await future

    async def predict(self, job: Job, hung_up: Callable[[], Coroutine[Any, Any, None]]) -> Any:
        """Return the answer to a job; at once where that takes less time than the way to the worker and back.

        `hung_up` returns when the client does; its job is then dropped.

        Raises:
            PastDeadline: if it is not computed by its deadline.
            ClientDisconnect: if the client hangs up before.
        """
        is_paired = job.served.model.manifest.noise.paired  # else a draw holds every weight
        if self.admission.row_draws <= SMALL_ROW_DRAWS and job.seed is None and is_paired:
            job.asked = time.perf_counter()
            await asyncio.sleep(0)  # requests that came together see each other, and are computed together
            if self.admission.in_work == 1 and job.served.reservoir.has_ready:
                self._compute([job])
                return self._answer(job)
        loop = asyncio.get_running_loop()
        job.future = future = loop.create_future()
        watching: list[asyncio.Task[None]] = []

        def watch() -> None:
            watching.append(loop.create_task(hung_up()))
            watching[0].add_done_callback(lambda _: future.cancel())

        waiting = loop.call_later(PATIENCE_S, watch)  # most are answered before
        self._put(job)
        try:
            answer = await future
        except asyncio.CancelledError:
            if watching and watching[0].done():
                raise ClientDisconnect from None
            raise
        finally:
            waiting.cancel()
            for task in watching:
                task.cancel()
        return self._answer(job) if job.has_short_answer else answer

    def _put(self, waiting: Job | Call) -> None:
        if isinstance(waiting, Job):
            waiting.asked = time.perf_counter()
        with self._something:
            self._queue.append(waiting)
            if len(self._queue) >= self._gathered or isinstance(waiting, Call):
                self._something.notify()

    def _work(self) -> None:
        while True:
            with self._something:
                self._await_work()
                if self._closed and not self._queue:
                    return
                batch = self._next()
            if isinstance(batch, Call):
                _finish(batch.future, *_tried(batch.work))
            elif batch:
                self._run(batch)
                # While half of those about are computed the others are read, and so on in turns.
                about = len(batch) + len(self._queue)
                self._gathered, self._at_once = about // 2, max(LEAST_AT_ONCE, -(-about // 2))
                self._gathering_until = time.monotonic() + GATHER_S

    def _await_work(self) -> None:
        """Wait until something is in the queue; right after a micro-batch for a moment also for company."""
        while len(self._queue) < self._gathered and not self._closed:
            left = self._gathering_until - time.monotonic()
            if left <= 0 or any(isinstance(waiting, Call) for waiting in self._queue):
                break
            self._something.wait(left)
        self._gathered = 0
        while not self._queue and not self._closed:
            self._something.wait()

    def _next(self) -> "list[Job] | Call":
        """Take from the queue what is computed next: a call, a part of a large job, or a micro-batch."""
        first = self._queue.popleft()
        if _is_over(first):
            return []
        if isinstance(first, Call):
            return first
        batch, rows, seeded = [first], first.rows_left, first.seed is not None
        others: deque[Job | Call] = deque()
        most = part_rows(first.served, first.num_samples)
        most_seeded = min(most, _paired_rows(first))
        while self._queue and rows < most and len(batch) < self._at_once:
            other = self._queue.popleft()
            if isinstance(other, Job) and _is_alike(first, other):
                any_seeded = seeded or other.seed is not None
                if rows + other.rows_left <= (most_seeded if any_seeded else most):
                    if not _is_over(other):
                        batch.append(other)
                        rows, seeded = rows + other.rows_left, any_seeded
                    continue
            others.append(other)
        others.extend(self._queue)
        self._queue = others
        return batch

    def _run(self, batch: list[Job]) -> None:
        try:
            self._compute(batch)
        except Exception as error:
            for job in batch:
                _finish(job.future, None, error)
            return
        for job in batch:
            if job.rows_left:
                self._put(job)
            elif job.has_short_answer:
                _finish(job.future, None)  # it is written while the next are computed
            else:
                _finish(job.future, *_tried(lambda job=job: self._answer(job)))  # type: ignore[misc]

    def _compute(self, batch: list[Job]) -> None:
        """Compute all rows of small jobs that go together, or the next part of a large one."""
        begun = time.perf_counter()
        first = batch[0]
        model, draws = first.served.model, first.num_samples
        fresh: DrawSet | None = None
        sets: list[DrawSet] = []
        for job in batch:
            if job.draws is None and job.seed is None:
                fresh = fresh or take_draws(job.served, draws, None)
            job.draws = job.draws or (fresh if job.seed is None else take_draws(job.served, draws, job.seed))
            assert job.draws is not None
            sets.append(job.draws)
        ends = [min(len(job.x), job.begun + part_rows(job.served, draws)) for job in batch]
        rows = [job.x[job.begun : end] for job, end in zip(batch, ends, strict=True)]
        x = rows[0] if len(rows) == 1 else np.concatenate(rows)
        known, density = model.runtime.before_draws(x)
        if all(draw_set is sets[0] for draw_set in sets):

            def outputs_of(rows: np.ndarray | slice, start: int, stop: int) -> Float32[np.ndarray, "K n C"]:
                return model.runtime.after_draw_set(known[rows], sets[0], start, stop)
        else:
            theta = _paired(sets, [len(part) for part in rows])

            def outputs_of(rows: np.ndarray | slice, start: int, stop: int) -> Float32[np.ndarray, "K n C"]:
                return model.runtime.after_draws(known[rows], theta[start:stop, rows])

        if first.rule is None:
            outputs = outputs_of(slice(None), 0, draws)
            prediction = model.prediction(outputs, density)
        else:
            prediction = model.prediction_with_stopping(outputs_of, density, draws, first.rule)
        start = 0
        for job, end in zip(batch, ends, strict=True):
            stop = start + end - job.begun
            samples = samples_of(model.manifest.task, outputs[:, start:stop]) if job.keep_samples else None
            job.parts.append((prediction.take(slice(start, stop)) if len(batch) > 1 else prediction, samples))
            job.begun, start = end, stop
        ended = time.perf_counter()
        for job in batch:
            job.times.append((job.asked, begun, ended))
        self._count(batch, len(x), begun, ended)

    def _count(self, batch: list[Job], rows: int, begun: float, ended: float) -> None:
        served, draws = batch[0].served, batch[0].num_samples
        self.admission.note(rows * draws, ended - begun)
        self.metrics.batch(served, rows, [begun - job.asked for job in batch], ended - begun)
        new = [job for job in batch if len(job.times) == 1]
        made = len({id(job.draws) for job in new}) * draws
        if new:
            self.metrics.draws(served, made, len(new) * draws - made)

    def _answer(self, job: Job) -> Any:
        """Return the answer to a job whose rows are all computed."""
        assert job.draws is not None
        prediction = Prediction.concatenate([prediction for prediction, _ in job.parts])
        samples = [part for _, part in job.parts if part is not None]
        kept = np.concatenate(samples, axis=1) if samples else None
        return job.answer(Predicted(prediction, job.draws.seed, job.num_samples, kept))


def part_rows(served: Served, num_samples: int) -> int:
    """Return how many rows are computed at once: those of a micro-batch, or of a part of a large request or pool."""
    is_held = served.model.runtime.set_bytes(num_samples) <= HELD_BYTES
    return max(1, (BATCH_ROW_DRAWS if is_held else REMADE_ROW_DRAWS) // num_samples)


def _paired_rows(job: Job) -> int:
    """How many rows can be computed in one product, each under draws of its own; 0 if it cannot be."""
    runtime = job.served.model.runtime
    return HELD_BYTES // runtime.set_bytes(job.num_samples) if runtime.paired else 0


def _is_alike(first: Job, other: Job) -> bool:
    """Whether jobs are of the same model, number of draws and rule, and neither is in the middle."""
    is_same = other.served is first.served and (other.num_samples, other.rule) == (first.num_samples, first.rule)
    return is_same and not (first.begun or other.begun)


def _paired(sets: list[DrawSet], rows: list[int]) -> Float32[np.ndarray, "K N D"]:
    """Return theta of each row, given each job's draw set and number of rows."""
    repeated = []
    for draws, n in zip(sets, rows, strict=True):
        assert draws.theta is not None  # a set whose theta is too large to hold is alone in its micro-batch
        repeated.append(np.repeat(draws.theta[:, None], n, axis=1))
    return np.concatenate(repeated, axis=1)


def _is_over(waiting: Job | Call) -> bool:
    """Whether nobody waits for it any more, or not in time."""
    assert waiting.future is not None
    if time.monotonic() > waiting.deadline:
        _finish(waiting.future, None, PastDeadline())
        return True
    return waiting.future.cancelled()


def _tried(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _finish(future: "asyncio.Future[Any] | None", result: Any, error: Exception | None = None) -> None:
    """Hand a result to whoever waits for it, if anyone still does, whose event loop may be gone."""
    assert future is not None

    def finish() -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    try:
        future.get_loop().call_soon_threadsafe(finish)
    except RuntimeError:
        logger.info("an answer came after the end of the service")


def timed(work: Callable[[], T]) -> Callable[[], tuple[float, T, float]]:
    """Return work that also says when it began and ended, on the clock of time.perf_counter."""

    def run() -> tuple[float, T, float]:
        begun = time.perf_counter()
        return begun, work(), time.perf_counter()

    return run


def take_draws(served: Served, num_samples: int, seed: int | None) -> DrawSet:
    """Return the draws of a request: exactly those of its seed, or fresh ones."""
    return served.reservoir.take(num_samples) if seed is None else served.model.runtime.draw_set(seed, num_samples)
