"""The engine: the way from rows to predictions and pool scores.

Work waits in a queue, in which clients have equal shares of rows x draws. A worker thread takes the
work whose turn it is, and with it others of the same model and number of draws that fit into a
*micro-batch*: one product of rows and draws, under one fresh draw set, so that draws are made once
for many requests. An idle server has no queue, and nobody waits for company; a busy one waits a
moment, since each micro-batch needs draws of its own. Work that is larger than a micro-batch, such
as a pool, is computed in parts, between which others get their turn.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Float64, Int64

from model_store.acquisition.choice import MAX_JOINT_ROWS
from model_store.acquisition.scoring import pool_candidates, pool_scores, race_scores
from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.inference.runtime import HELD_BYTES, DrawSet
from model_store.scores.joint import Candidates
from model_store.scores.sums import GROUPS
from service.engine.admission import Admission
from service.errors import PastDeadline
from service.models.models import Served
from service.request_context import Phase, RequestContext
from service.server.shares import Shares
from service.telemetry.metrics import Metrics

SMALL_ROW_DRAWS = 200  # a millisecond of arithmetic
BATCH_ROW_DRAWS = 6_400  # rows x draws of a micro-batch
PARTS_FOR_OTHERS = 4  # that such a part of a large job is divided in where others wait or may come
# The same where draws are too large to hold, and made again for each part of a job
REMADE_ROW_DRAWS = 100_000
SUMMED_NUMBERS = 4_000_000  # that the draws of a micro-batch or part are summed in: 32 MB
ENCODED_S = 0.25  # that the encoder takes for the rows of a micro-batch or part, at most
LEAST_AT_ONCE = 16  # requests that a micro-batch may take, however few are about
MAX_RESOLVED_AT_ONCE = 8  # that an event loop resolves at once: a millisecond of answers

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The prediction of rows that were computed together, and what requests share of it."""

    prediction: Prediction
    made: dict[Hashable, Any] = field(default_factory=dict)  # None after the first request

    def shared(self, key: Hashable, make: Callable[[Prediction], T]) -> T | None:
        """Return `make` of the whole prediction; None to the first request with a key.

        The first is better off with its own rows: all others may have other keys.
        """
        if key not in self.made:
            self.made[key] = None
            return None
        if self.made[key] is None:
            self.made[key] = make(self.prediction)
        made: T = self.made[key]
        return made


@dataclass(frozen=True, eq=False)
class Predicted:
    """Rows of a micro-batch, and if requested `Predictive.samples` of them."""

    batch: MicroBatch
    rows: slice
    samples: Float32[np.ndarray, "K N C"] | None

    @property
    def prediction(self) -> Prediction:
        whole = self.batch.prediction
        is_all = self.rows == slice(0, len(whole.p_values.p_value))
        return whole if is_all else whole.take(self.rows)


@dataclass(frozen=True, eq=False)
class PoolScores:
    """Scores of rows of a pool; of a joint score these are each row's gain alone."""

    scores: Float64[np.ndarray, "n"]
    errors: Float64[np.ndarray, "n"] | None = None  # in a race
    candidates: Candidates | None = None  # of a joint score


class Best:
    """The candidates that gain most alone, of a pool seen in parts; ties by place."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows: Int64[np.ndarray, "M"] = np.empty(0, dtype=np.int64)  # their places in the pool
        self._gain = np.empty(0)
        self._own = np.empty(0)
        self._outputs: Float32[np.ndarray, "M D"] | None = None

    def take(self, part: Candidates, first: int) -> None:
        if self._outputs is None:
            self._outputs = np.empty((self._most, part.outputs.shape[1]), dtype=np.float32)
        held, n = len(self.rows), len(part.gain)
        rows = np.concatenate([self.rows, first + np.arange(n)])
        gain = np.concatenate([self._gain, part.gain])
        own, place = np.concatenate([self._own, part.noise]), np.arange(held + n)  # in `_outputs`
        is_best = np.zeros(held + n, dtype=bool)
        is_best[np.lexsort((rows, -gain))[: self._most]] = True
        (new,) = np.nonzero(is_best[held:])
        free = np.concatenate([np.flatnonzero(~is_best[:held]), np.arange(held, self._most)])
        free = free[: len(new)]
        self._outputs[free] = part.outputs[new]
        place[held + new] = free
        kept = np.flatnonzero(is_best)
        kept = kept[np.argsort(place[kept])]
        self.rows, self._gain, self._own = rows[kept], gain[kept], own[kept]

    @property
    def candidates(self) -> Candidates:
        assert self._outputs is not None
        return Candidates(self._gain, self._own, self._outputs[: len(self.rows)])


@dataclass(eq=False)
class EngineWork:
    """Rows to predict, or a pool to score if `acquisition` is named; and how far that is."""

    served: Served
    x: Float32[np.ndarray, "N I"]
    num_samples: int
    seed: int | None  # None: under fresh draws
    call: RequestContext = field(default_factory=RequestContext)
    keep_samples: bool = False
    acquisition: str | None = None
    max_candidates: int | None = None  # rows that a joint score chooses from; else None
    is_race: bool = False  # whether scores have standard errors, as a race needs
    priors: tuple[float, ...] | None = None  # shares of the rows' classes, if not as in training

    # Resolved at the end; None if the event loop computes the work itself
    future: "asyncio.Future[None] | None" = field(default=None, init=False)
    draws: DrawSet | None = field(default=None, init=False)
    rows_done: int = field(default=0, init=False)
    # When it, or its next part, began to wait, on the clock of time.perf_counter
    queued: float = field(default=0.0, init=False)
    phases: list[Phase] = field(default_factory=list, init=False)
    parts: list[Predicted | PoolScores] = field(default_factory=list, init=False)
    best: Best | None = field(default=None, init=False)  # candidates of a joint score

    @property
    def row_draws(self) -> int:
        """The work of a row, in draws: those that it takes, and what its encoder costs."""
        return self.num_samples + self.served.model.encoding_draws

    @property
    def rows_left(self) -> int:
        return len(self.x) - self.rows_done

    @property
    def draw_seed(self) -> int:
        assert self.draws is not None
        return self.draws.seed

    @property
    def predicted(self) -> Predicted:
        (part,) = self.parts
        assert isinstance(part, Predicted)
        return part

    @property
    def pool_scores(self) -> PoolScores:
        (part,) = self.parts
        assert isinstance(part, PoolScores)
        return part

    def goes_with(self, other: "EngineWork") -> bool:
        """Return whether both can be in one micro-batch."""
        return (
            self.served is other.served
            and self.acquisition is None
            and other.acquisition is None
            and self.num_samples == other.num_samples
            and self.priors == other.priors
        )

    def add(self, part: Predicted | PoolScores, rows: int, begun: float, ended: float) -> None:
        if isinstance(part, PoolScores) and part.candidates is not None:
            assert self.max_candidates is not None
            self.best = self.best or Best(self.max_candidates)
            self.best.take(part.candidates, self.rows_done)
            part = PoolScores(part.scores)
        self.parts.append(part)
        self.rows_done += rows
        self.phases.append(Phase(self.queued, begun, ended))

    def join_parts(self) -> None:
        """Make one part of all, in the worker: a copy would keep the event loop busy."""
        scored = [part for part in self.parts if isinstance(part, PoolScores)]
        if scored:
            scores = np.concatenate([part.scores for part in scored])
            errors = [part.errors for part in scored if part.errors is not None]
            self.parts = [PoolScores(scores, np.concatenate(errors) if errors else None)]
            return
        predicted = [part for part in self.parts if isinstance(part, Predicted)]
        batch = MicroBatch(Prediction.concatenate([part.batch.prediction for part in predicted]))
        samples = [part.samples for part in predicted if part.samples is not None]
        joined = np.concatenate(samples, axis=1) if samples else None
        self.parts = [Predicted(batch, slice(0, len(self.x)), joined)]

    def is_over(self) -> bool:
        """Return whether nobody waits for it any more, or not in time."""
        assert self.future is not None
        if time.monotonic() > self.call.deadline:
            finish([self], PastDeadline())
            return True
        return self.future.cancelled()

    def resolve(self, error: Exception | None) -> None:
        """Resolve the future, in its event loop."""
        assert self.future is not None
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class Engine:
    def __init__(self, admission: Admission, metrics: Metrics) -> None:
        self.admission = admission
        self.metrics = metrics
        self._queue: Shares[EngineWork] = Shares()
        self._something = threading.Condition()
        self._closed = False
        self._at_once = LEAST_AT_ONCE  # requests that a micro-batch may take, of those about
        self._gathered = 0  # requests in the queue that are waited for, until `_gathering_until`
        self._gathering_until = -math.inf
        self._worker = threading.Thread(target=self._work, name="model", daemon=True)
        self._worker.start()

    def close(self) -> None:
        with self._something:
            self._closed = True
            self._something.notify()
        self._worker.join()

    async def compute(self, work: EngineWork) -> None:
        """Compute work: on the event loop if that is quicker than the way to the worker and back.

        Raises:
            PastDeadline: if it is not computed by its deadline.
            ClientDisconnect: if the client hangs up before.
        """
        is_paired = work.served.model.manifest.noise.paired  # else a draw holds every weight
        is_small = self.admission.row_draws <= SMALL_ROW_DRAWS and work.served.model.encoder is None
        if is_small and work.seed is None and is_paired:
            work.queued = time.perf_counter()
            await asyncio.sleep(0)  # requests that come together are computed together
            if self.admission.in_work == 1 and work.served.reservoir.ready:
                if time.monotonic() > work.call.deadline:
                    raise PastDeadline
                self._compute([work])
                return
        work.future = asyncio.get_running_loop().create_future()
        self._put(work)
        await work.call.wait(work.future)

    def _put(self, work: EngineWork) -> None:
        work.queued = time.perf_counter()
        cost = min(work.rows_left, self._max_rows(work)) * work.row_draws
        with self._something:
            self._queue.put(work, work.call.client, cost)
            if len(self._queue) >= self._gathered:
                self._something.notify()

    def _work(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Compute what is next, and hold nothing of it; False once closed and empty."""
        with self._something:
            self._await_work()
            if self._closed and not self._queue:
                return False
            batch = self._next()
        if batch:
            begun = time.monotonic()
            self._run(batch)
            ended = time.monotonic()
            # A draw set takes as long as several rows, so most of those about share the next one,
            # while the others are read. Nobody waits for them longer than the last one took.
            most = 3 * (len(batch) + len(self._queue)) // 4
            self._gathered, self._at_once = most, max(LEAST_AT_ONCE, most)
            self._gathering_until = 2 * ended - begun
        return True

    def _await_work(self) -> None:
        """Wait for work; right after a micro-batch for a moment also for company."""
        while len(self._queue) < self._gathered and not self._closed:
            left = self._gathering_until - time.monotonic()
            if left <= 0:
                break
            self._something.wait(left)
        self._gathered = 0
        while not self._queue and not self._closed:
            self._something.wait()

    def _next(self) -> list[EngineWork]:
        """Take what is computed next: a part of a large job, or a micro-batch.

        A micro-batch takes no client's account further beyond the smallest than one part does.
        """
        turns, over = self._queue.turns(), []
        while turns and turns[0].work.is_over():
            over.append(turns.pop(0))
        if not turns:
            self._queue.take([], over)
            return []
        first = turns[0].work
        taken, rows, seeded = turns[:1], first.rows_left, first.seed is not None
        most = part_rows(first.served.model, first.num_samples)
        most_seeded = min(most, _max_seeded_rows(first))
        furthest = self._queue.min_account + most * first.row_draws
        used = {turns[0].client: turns[0].after}
        for piece in turns[1:]:
            if rows >= most or len(taken) >= self._at_once:
                break
            other = piece.work
            if not first.goes_with(other) or first.rows_done or other.rows_done:
                continue
            after = used.get(piece.client, self._queue.used(piece.client)) + piece.cost
            if after > furthest:
                continue
            any_seeded = seeded or other.seed is not None
            if rows + other.rows_left > (most_seeded if any_seeded else most):
                continue
            if other.is_over():
                over.append(piece)
            else:
                taken.append(piece)
                used[piece.client] = after
                rows, seeded = rows + other.rows_left, any_seeded
        self._queue.take(taken, over)
        return [piece.work for piece in taken]

    def _run(self, batch: list[EngineWork]) -> None:
        try:
            self._compute(batch)
            done = [work for work in batch if not work.rows_left]
            for work in done:
                if len(work.parts) > 1:
                    work.join_parts()
        except Exception as error:
            finish(batch, error)
            return
        for work in batch:
            if work.rows_left:
                self._put(work)
        finish(done)

    def _compute(self, batch: list[EngineWork]) -> None:
        begun, first = time.perf_counter(), batch[0]
        sets = _draw_sets(batch)
        most = self._max_rows(first)
        rows = [work.x[work.rows_done : work.rows_done + most] for work in batch]
        x = rows[0] if len(rows) == 1 else np.concatenate(rows)
        parts: Sequence[Predicted | PoolScores]
        if first.acquisition is None:
            parts = _predict(batch, rows, x, sets)
        else:
            parts = [_score_pool(first, x, sets[0])]
        ended = time.perf_counter()
        for work, of_work, part in zip(batch, rows, parts, strict=True):
            work.add(part, len(of_work), begun, ended)
        self._count(batch, len(x), begun, ended)

    def _max_rows(self, work: EngineWork) -> int:
        """Return how many rows of work are computed at once: fewer where others wait."""
        most = part_rows(work.served.model, work.num_samples)
        is_held = work.num_samples * work.served.model.runtime.draw_bytes <= HELD_BYTES
        if len(work.x) > most and self.admission.in_work > 1 and is_held:
            return -(-most // PARTS_FOR_OTHERS)
        return most

    def _count(self, batch: list[EngineWork], rows: int, begun: float, ended: float) -> None:
        served, draws = batch[0].served, batch[0].num_samples
        row_draws = rows * batch[0].row_draws
        queue_s = [begun - work.phases[-1].queued for work in batch]
        new = [work for work in batch if len(work.phases) == 1]
        made = len({id(work.draws) for work in new}) * draws
        self.metrics.count_batch(served.key, rows, queue_s, ended - begun)
        if new:
            self.metrics.count_draws(served.key, made, len(new) * draws - made)
        self.admission.note(row_draws, ended - begun)


def part_rows(model: Model, num_samples: int) -> int:
    """Return how many rows a micro-batch, or a part of a large job, has."""
    is_held = num_samples * model.runtime.draw_bytes <= HELD_BYTES
    summed = SUMMED_NUMBERS // (GROUPS * model.manifest.output_size)
    rows = min((BATCH_ROW_DRAWS if is_held else REMADE_ROW_DRAWS) // num_samples, summed)
    encoder = model.encoder
    return max(1, rows if encoder is None else min(rows, int(ENCODED_S / encoder.row_s)))


def kept_bytes(work: EngineWork, rows: int | None = None) -> int:
    """Return about how many bytes are held for work, or for similar work of `rows`, until it is
    answered: results in parts and then whole, and of work in several parts the draws."""
    model, rows = work.served.model, len(work.x) if rows is None else rows
    set_bytes = work.num_samples * model.runtime.draw_bytes
    is_held = rows > part_rows(model, work.num_samples) and set_bytes <= HELD_BYTES
    draws = set_bytes if is_held else 0
    if work.acquisition is not None:
        return draws + (0 if work.max_candidates is None else joint_bytes(work)) + 32 * rows
    samples = 8 * work.num_samples if work.keep_samples else 0
    return draws + rows * (400 + model.manifest.output_size * (96 + samples))


def joint_bytes(work: EngineWork) -> int:
    """Return about how many bytes the candidates of a joint score, and the search, take."""
    assert work.acquisition is not None
    assert work.max_candidates is not None
    model, draws = work.served.model, work.num_samples
    joint, outputs = model.predictive.joint_scores[work.acquisition], model.manifest.output_size
    kept = work.max_candidates * (48 + 4 * joint.numbers(draws, outputs))
    return kept + joint.work_bytes(draws, outputs, min(work.max_candidates, MAX_JOINT_ROWS))


def _max_seeded_rows(work: EngineWork) -> int:
    """Return how many rows fit in one product, each under draws of its own; 0 if none can."""
    runtime = work.served.model.runtime
    return HELD_BYTES // (work.num_samples * runtime.draw_bytes) if runtime.paired else 0


def _draw_sets(batch: list[EngineWork]) -> list[DrawSet]:
    """Return the draws of each: those of its seed, or a fresh set that all new work shares."""
    fresh: DrawSet | None = None
    sets = []
    for work in batch:
        if work.draws is None:
            if work.seed is None:
                work.draws = fresh = fresh or work.served.reservoir.take(work.num_samples)
            else:
                work.draws = work.served.model.runtime.draw_set(work.seed, work.num_samples)
        sets.append(work.draws)
    return sets


def _predict(
    batch: list[EngineWork],
    rows: list[Float32[np.ndarray, "n I"]],
    x: Float32[np.ndarray, "N I"],
    sets: list[DrawSet],
) -> list[Predicted]:
    model, priors = batch[0].served.model, batch[0].priors
    if len({id(draws) for draws in sets}) == 1:
        outputs, density = model.runtime.run_set(x, sets[0])
    else:
        outputs, density = model.runtime.run(x, _theta_of_rows(sets, [len(part) for part in rows]))
    micro_batch = MicroBatch(model.prediction(outputs, density, priors))
    predicted, start = [], 0
    for work, part in zip(batch, rows, strict=True):
        here = slice(start, start + len(part))
        samples = None
        if work.keep_samples:
            of_rows = outputs[:, here]
            if priors is not None:
                of_rows = model.shifted(of_rows, priors).astype(np.float32)
            samples = model.predictive.samples(of_rows)
        predicted.append(Predicted(micro_batch, here, samples))
        start = here.stop
    return predicted


def _score_pool(work: EngineWork, x: Float32[np.ndarray, "N I"], draws: DrawSet) -> PoolScores:
    assert work.acquisition is not None
    arguments = work.served.model, x, draws, work.acquisition, work.priors
    if work.max_candidates is not None:
        candidates = pool_candidates(*arguments)
        return PoolScores(candidates.gain, candidates=candidates)
    if work.is_race:
        return PoolScores(*race_scores(*arguments))
    return PoolScores(pool_scores(*arguments))


def _theta_of_rows(sets: list[DrawSet], rows: list[int]) -> Float32[np.ndarray, "K N D"]:
    # A set whose theta is too large to hold is alone in its micro-batch.
    thetas = [draws.theta for draws in sets if draws.theta is not None]
    repeated = [np.repeat(theta[:, None], n, axis=1) for theta, n in zip(thetas, rows, strict=True)]
    return np.concatenate(repeated, axis=1)


def finish(done: Sequence[EngineWork], error: Exception | None = None) -> None:
    """Resolve the futures of work, from another thread; their event loop may be closed.

    A loop is woken once for all of them, and resolves a few at a time: between these it reads the
    requests of other clients.
    """

    def resolve(pending: list[EngineWork]) -> None:
        for work in pending[:MAX_RESOLVED_AT_ONCE]:
            work.resolve(error)
        if len(pending) > MAX_RESOLVED_AT_ONCE:
            asyncio.get_running_loop().call_soon(resolve, pending[MAX_RESOLVED_AT_ONCE:])

    by_loop: dict[asyncio.AbstractEventLoop, list[EngineWork]] = {}
    for work in done:
        assert work.future is not None
        by_loop.setdefault(work.future.get_loop(), []).append(work)
    for loop, pending in by_loop.items():
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, pending)
