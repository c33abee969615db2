"""Compute predictions and pool scores (`PoolWork`) in micro-batches.

A worker thread merges queued requests with the same model and draw count into a micro-batch, which
shares one fresh draw set. An idle server computes a request immediately. A busy server waits
briefly for more requests. Large work, such as a pool, is split into parts, and other work runs
between them.
"""

import asyncio
import math
import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32

from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.inference.runtime import MAX_DRAW_SET_BYTES, DrawSet
from model_store.scores.sums import GROUPS
from service.engine.admission import BATCH_ROW_DRAWS, Admission
from service.errors import PastDeadline
from service.models.models import ServedModel
from service.request_context import Phase, RequestContext
from service.server.shares import Shares
from service.telemetry.metrics import Metrics

SMALL_ROW_DRAWS = 200  # a millisecond of arithmetic
CONTENDED_PARTS = 4  # divides the size of a part while other requests are active
STREAMED_ROW_DRAWS = 100_000  # instead, if draws exceed the memory and are recomputed per part
MAX_SUMMED_NUMBERS = 4_000_000  # size of a part's sums over draws: 32 MB
MAX_ENCODING_S = 0.25  # encoder time per micro-batch or part
MIN_BATCH_REQUESTS = 16  # always allowed in one micro-batch
RESOLVE_BATCH = 8  # futures resolved per event loop step: a millisecond of answers


@dataclass(frozen=True, eq=False)
class Predicted:
    """The part of a micro-batch that belongs to a request."""

    batch: Prediction  # of all requests
    rows: slice
    samples: Float32[np.ndarray, "K N C"] | None
    shared: dict[Hashable, Any] = field(default_factory=dict)  # results for all requests, by key

    @property
    def prediction(self) -> Prediction:
        is_complete = self.rows == slice(0, len(self.batch.p_values.p_value))
        return self.batch if is_complete else self.batch.take(self.rows)


@dataclass(eq=False)
class EngineWork:
    """Rows to predict, with the progress of the computation."""

    served_model: ServedModel
    x: Float32[np.ndarray, "N I"]
    num_samples: int
    seed: int | None  # None for fresh draws
    context: RequestContext = field(default_factory=RequestContext)
    keep_samples: bool = False
    acquisition: str | None = None  # only of `PoolWork`
    priors: tuple[float, ...] | None = None  # class shares that replace the training shares

    # None if the event loop computes the work itself
    future: "asyncio.Future[None] | None" = field(default=None, init=False)
    draws: DrawSet | None = field(default=None, init=False)
    rows_done: int = field(default=0, init=False)
    queued: float = field(default=0.0, init=False)  # time.perf_counter of the latest part
    phases: list[Phase] = field(default_factory=list, init=False)
    parts: list[Any] = field(default_factory=list, init=False)  # results of rows

    @property
    def model(self) -> Model:
        return self.served_model.model

    @property
    def row_draws(self) -> int:
        """The cost of a row in draws, including the encoder."""
        return self.num_samples + self.model.encoding_draws

    @property
    def rows_left(self) -> int:
        return len(self.x) - self.rows_done

    @property
    def draw_seed(self) -> int:
        assert self.draws is not None
        return self.draws.seed

    @property
    def max_rows(self) -> int:
        return part_rows(self.model, self.num_samples, self.acquisition)

    @property
    def is_quick(self) -> bool:
        """Whether the event loop can compute a few rows. A draw of all weights is too slow."""
        return self.model.manifest.noise.paired

    @property
    def predicted(self) -> Predicted:
        part: Predicted
        (part,) = self.parts
        return part

    def is_compatible_with(self, other: "EngineWork") -> bool:
        """Check whether this work can share a micro-batch with other work."""
        return (
            self.served_model is other.served_model
            and self.acquisition is None
            and other.acquisition is None
            and self.num_samples == other.num_samples
            and self.priors == other.priors
        )

    def compute(
        self, batch: "list[EngineWork]", x: Float32[np.ndarray, "N I"], sets: list[DrawSet]
    ) -> list[Any]:
        """Compute the next part of each work in a micro-batch, which starts with this one."""
        model, priors = self.model, self.priors
        # Several requests share a micro-batch only if it has all rows of each.
        sizes = [len(work.x) for work in batch] if len(batch) > 1 else [len(x)]
        if len({id(draws) for draws in sets}) == 1:
            outputs, density = model.runtime.run_set(x, sets[0])
        else:
            outputs, density = model.runtime.run(x, _row_thetas(sets, sizes))
        prediction = model.prediction(outputs, density, priors)
        shared: dict[Hashable, Any] = {}
        predicted, start = [], 0
        for work, size in zip(batch, sizes, strict=True):
            rows = slice(start, start + size)
            samples = None
            if work.keep_samples:
                row_outputs = outputs[:, rows]
                if priors is not None:
                    row_outputs = model.shifted(row_outputs, priors).astype(np.float32)
                samples = model.predictive.samples(row_outputs)
            predicted.append(Predicted(prediction, rows, samples, shared))
            start = rows.stop
        return predicted

    def join_parts(self) -> None:
        """Concatenate the parts. Call this in the worker thread, because it can be slow."""
        batch = Prediction.concatenate([part.batch for part in self.parts])
        samples = [part.samples for part in self.parts if part.samples is not None]
        all_samples = np.concatenate(samples, axis=1) if samples else None
        self.parts = [Predicted(batch, slice(0, len(self.x)), all_samples)]

    def memory_bytes(self, rows: int | None = None) -> int:
        """Estimate the memory of the work and its results, by default for all of its rows."""
        rows = len(self.x) if rows is None else rows
        samples = 8 * self.num_samples if self.keep_samples else 0
        row_bytes = 400 + self.model.manifest.output_size * (96 + samples)
        return self._kept_draw_bytes(rows) + rows * row_bytes

    def _kept_draw_bytes(self, rows: int) -> int:
        set_bytes = self.num_samples * self.model.runtime.draw_bytes
        is_cached = rows > part_rows(self.model, self.num_samples)
        return set_bytes if is_cached and set_bytes <= MAX_DRAW_SET_BYTES else 0

    def expire(self) -> bool:
        """Check whether the work was cancelled or is late. Late work fails with `PastDeadline`."""
        assert self.future is not None
        if time.monotonic() > self.context.deadline:
            finish([self], PastDeadline())
            return True
        return self.future.cancelled()


class Engine:
    def __init__(self, admission: Admission, metrics: Metrics) -> None:
        self.admission = admission
        self.metrics = metrics
        self._queue: Shares[EngineWork] = Shares()
        self._condition = threading.Condition()
        self._closed = False
        self._max_requests = MIN_BATCH_REQUESTS  # per micro-batch
        self._gather_count = 0  # requests to wait for until `_gather_end`
        self._gather_end = -math.inf
        self._worker = threading.Thread(target=self._run_worker, name="model", daemon=True)
        self._worker.start()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._worker.join()

    async def compute(self, work: EngineWork) -> None:
        """Compute work in the worker thread, or directly if it is small."""
        is_small = self.admission.row_draws <= SMALL_ROW_DRAWS and work.model.encoder is None
        if is_small and work.seed is None and work.is_quick:
            work.queued = time.perf_counter()
            await asyncio.sleep(0)  # so that simultaneous requests share a micro-batch
            if self.admission.active_requests == 1 and work.served_model.reservoir.ready:
                if time.monotonic() > work.context.deadline:
                    raise PastDeadline
                self._compute([work])
                return
        work.future = asyncio.get_running_loop().create_future()
        self._put(work)
        await work.context.wait(work.future)

    def _put(self, work: EngineWork) -> None:
        work.queued = time.perf_counter()
        cost = min(work.rows_left, self._max_rows(work)) * work.row_draws
        with self._condition:
            self._queue.put(work, work.context.client, cost)
            if len(self._queue) >= self._gather_count:
                self._condition.notify()

    def _run_worker(self) -> None:
        while self._run_next():
            pass

    # A separate method, so that its variables do not keep the last batch in memory.
    def _run_next(self) -> bool:
        with self._condition:
            self._await_work()
            if self._closed and not self._queue:
                return False
            batch = self._next_batch()
        if batch:
            start = time.monotonic()
            self._run(batch)
            end = time.monotonic()
            # A draw set costs as much as several rows, so the next batch waits for three quarters
            # of the active requests, at most as long as the last batch took.
            count = 3 * (len(batch) + len(self._queue)) // 4
            self._gather_count, self._max_requests = count, max(MIN_BATCH_REQUESTS, count)
            self._gather_end = 2 * end - start
        return True

    def _await_work(self) -> None:
        """Wait for work. After a micro-batch, also wait briefly for more requests."""
        while len(self._queue) < self._gather_count and not self._closed:
            timeout_s = self._gather_end - time.monotonic()
            if timeout_s <= 0:
                break
            self._condition.wait(timeout_s)
        self._gather_count = 0
        while not self._queue and not self._closed:
            self._condition.wait()

    def _next_batch(self) -> list[EngineWork]:
        turns, expired = self._queue.turns(), []
        while turns and turns[0].work.expire():
            expired.append(turns.pop(0))
        if not turns:
            self._queue.take([], expired)
            return []
        first = turns[0].work
        pieces, rows, has_seed = turns[:1], first.rows_left, first.seed is not None
        max_rows = first.max_rows
        set_bytes = first.num_samples * first.model.runtime.draw_bytes
        max_sets = MAX_DRAW_SET_BYTES // set_bytes if first.model.runtime.paired else 0
        max_seeded_rows = min(max_rows, max_sets)  # with separate draw sets
        # No client may get further ahead than by one part.
        max_account = self._queue.min_account + max_rows * first.row_draws
        accounts = {turns[0].client: turns[0].after}
        for piece in turns[1:]:
            if rows >= max_rows or len(pieces) >= self._max_requests:
                break
            work = piece.work
            if not first.is_compatible_with(work) or first.rows_done or work.rows_done:
                continue
            account = accounts.get(piece.client, self._queue.used(piece.client)) + piece.cost
            if account > max_account:
                continue
            needs_seeds = has_seed or work.seed is not None
            if rows + work.rows_left > (max_seeded_rows if needs_seeds else max_rows):
                continue
            if work.expire():
                expired.append(piece)
            else:
                pieces.append(piece)
                accounts[piece.client] = account
                rows, has_seed = rows + work.rows_left, needs_seeds
        self._queue.take(pieces, expired)
        return [piece.work for piece in pieces]

    def _run(self, batch: list[EngineWork]) -> None:
        try:
            self._compute(batch)
            complete = [work for work in batch if not work.rows_left]
            for work in complete:
                if len(work.parts) > 1:
                    work.join_parts()
        except Exception as error:
            if len(batch) == 1 or any(work.rows_done for work in batch):
                finish(batch, error)
                return
            for work in batch:  # so that only the faulty request fails
                if not work.expire():
                    self._run([work])
            return
        for work in batch:
            if work.rows_left:
                self._put(work)
        finish(complete)

    def _compute(self, batch: list[EngineWork]) -> None:
        start, first = time.perf_counter(), batch[0]
        sets = _draw_sets(batch)
        max_rows = self._max_rows(first)
        rows = [work.x[work.rows_done : work.rows_done + max_rows] for work in batch]
        x = rows[0] if len(rows) == 1 else np.concatenate(rows)
        parts = first.compute(batch, x, sets)
        end = time.perf_counter()
        queue_s = [start - work.queued for work in batch]
        self.metrics.count_batch(first.served_model.key, len(x), queue_s, end - start)
        self.admission.record_rate(len(x) * first.row_draws, end - start)
        for work, work_rows, part in zip(batch, rows, parts, strict=True):
            work.parts.append(part)
            work.rows_done += len(work_rows)
            work.phases.append(Phase(work.queued, start, end))

    def _max_rows(self, work: EngineWork) -> int:
        """Return the maximum number of rows per step, fewer while other requests are active."""
        max_rows = work.max_rows
        is_cached = keeps_draws(work.model, work.num_samples, work.acquisition)
        if len(work.x) > max_rows and self.admission.active_requests > 1 and is_cached:
            return -(-max_rows // CONTENDED_PARTS)
        return max_rows


def keeps_draws(model: Model, num_samples: int, acquisition: str | None) -> bool:
    """Check whether all parts of the work share one draw set, instead of recomputing it."""
    if model.runtime.has_joint and acquisition in model.predictive.joint_acquisitions:
        return False
    return num_samples * model.runtime.draw_bytes <= MAX_DRAW_SET_BYTES


def part_rows(model: Model, num_samples: int, acquisition: str | None = None) -> int:
    """Return the maximum number of rows in a micro-batch or part."""
    is_cached = keeps_draws(model, num_samples, acquisition)
    max_rows = MAX_SUMMED_NUMBERS // (GROUPS * model.manifest.output_size)
    rows = min((BATCH_ROW_DRAWS if is_cached else STREAMED_ROW_DRAWS) // num_samples, max_rows)
    encoder = model.encoder
    return max(1, rows if encoder is None else min(rows, int(MAX_ENCODING_S / encoder.row_s)))


def _draw_sets(batch: list[EngineWork]) -> list[DrawSet]:
    """Return each request's draw set. Requests without a seed share a fresh one."""
    fresh: DrawSet | None = None
    sets = []
    for work in batch:
        if work.draws is None:
            if work.seed is None:
                work.draws = fresh = fresh or work.served_model.reservoir.take(work.num_samples)
            else:
                work.draws = work.model.runtime.draw_set(work.seed, work.num_samples)
        sets.append(work.draws)
    return sets


def _row_thetas(sets: list[DrawSet], rows: list[int]) -> Float32[np.ndarray, "K N D"]:
    # A set without theta, which is too large for memory, never shares a micro-batch.
    thetas = [draws.theta for draws in sets if draws.theta is not None]
    repeated = [np.repeat(theta[:, None], n, axis=1) for theta, n in zip(thetas, rows, strict=True)]
    return np.concatenate(repeated, axis=1)


def finish(batch: Sequence[EngineWork], error: Exception | None = None) -> None:
    """Resolve futures from another thread.

    The event loop resolves a few futures per step, and handles other events between the steps.
    """

    def resolve(pending: list[asyncio.Future[None]]) -> None:
        for future in pending[:RESOLVE_BATCH]:
            if not future.done():
                future.set_result(None) if error is None else future.set_exception(error)
        if len(pending) > RESOLVE_BATCH:
            asyncio.get_running_loop().call_soon(resolve, pending[RESOLVE_BATCH:])

    futures = [work.future for work in batch if work.future is not None]
    if futures:
        with suppress(RuntimeError):  # the event loop is closed
            futures[0].get_loop().call_soon_threadsafe(resolve, futures)
