"""What a request asks of the engine, how far it is, and what it gets."""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Float64, Int64

from model_store.inference.prediction import Prediction
from model_store.inference.runtime import DrawSet
from model_store.scores.joint import Candidates
from service.call import Call, Phase
from service.errors import PastDeadline
from service.models.models import Served

T = TypeVar("T")

TOLD_AT_ONCE = 8  # jobs that an event loop is told the end of: a millisecond of answers


@dataclass(frozen=True, eq=False)
class Job:
    """Rows to predict, or a pool to score where `acquisition` is named."""

    served: Served
    x: Float32[np.ndarray, "N I"]
    num_samples: int
    seed: int | None  # None: under fresh draws
    call: Call = field(default_factory=Call)
    keep_samples: bool = False
    acquisition: str | None = None
    # How many rows a joint score chooses from; None where it is not one
    candidates: int | None = None
    # Whether scores are asked for as a race goes by them, with standard errors
    is_race: bool = False
    # Shares of the rows' classes, if not those of the training data
    priors: tuple[float, ...] | None = None

    @property
    def row_draws(self) -> int:
        """The work of a row, in draws: those that it takes, and what its encoder costs."""
        return self.num_samples + self.served.model.encoding_draws

    def goes_with(self, other: "Job") -> bool:
        mine, its = ((job.num_samples, job.priors) for job in (self, other))
        are_rows = self.acquisition is None and other.acquisition is None
        return self.served is other.served and are_rows and mine == its


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The prediction of rows that were computed together, and what requests share of it."""

    prediction: Prediction
    made: dict[Hashable, Any] = field(default_factory=dict)  # None of what was asked for once

    def shared(self, key: Hashable, make: Callable[[Prediction], T]) -> T | None:
        """Return what `make` makes of the whole prediction; None to the first who asks with a key.

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
    """What a request gets: its rows of a micro-batch, the seed of their draws, and where asked for
    `Predictive.samples`."""

    batch: MicroBatch
    rows: slice
    seed: int
    num_samples: int
    samples: Float32[np.ndarray, "K N C"] | None
    phases: list[Phase]

    @property
    def prediction(self) -> Prediction:
        whole = self.batch.prediction
        is_all = self.rows == slice(0, len(whole.p_values.p_value))
        return whole if is_all else whole.take(self.rows)


@dataclass(frozen=True, eq=False)
class Part:
    """What was computed of some rows of a job: `rows` of a micro-batch, or scores of a pool."""

    batch: MicroBatch | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    samples: Float32[np.ndarray, "K N C"] | None = None
    scores: Float64[np.ndarray, "n"] | None = None
    errors: Float64[np.ndarray, "n"] | None = None  # of scores, in a race
    candidates: Candidates | None = None  # taken over by the job, once


class Best:
    """The candidates that gain most alone, of a pool seen in parts; ties by place."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows: Int64[np.ndarray, "M"] = np.empty(0, dtype=np.int64)  # their places in the pool
        self._gain = np.empty(0)
        self._own = np.empty(0)
        self._said: Float32[np.ndarray, "M D"] | None = None

    def take(self, part: Candidates, first: int) -> None:
        if self._said is None:
            self._said = np.empty((self._most, part.said.shape[1]), dtype=np.float32)
        held, n = len(self.rows), len(part.gain)
        rows = np.concatenate([self.rows, first + np.arange(n)])
        gain = np.concatenate([self._gain, part.gain])
        own, place = np.concatenate([self._own, part.own]), np.arange(held + n)  # in `_said`
        is_best = np.zeros(held + n, dtype=bool)
        is_best[np.lexsort((rows, -gain))[: self._most]] = True
        (new,) = np.nonzero(is_best[held:])
        free = np.concatenate([np.flatnonzero(~is_best[:held]), np.arange(held, self._most)])
        free = free[: len(new)]
        self._said[free] = part.said[new]
        place[held + new] = free
        kept = np.flatnonzero(is_best)
        kept = kept[np.argsort(place[kept])]
        self.rows, self._gain, self._own = rows[kept], gain[kept], own[kept]

    @property
    def candidates(self) -> Candidates:
        assert self._said is not None
        return Candidates(self._gain, self._own, self._said[: len(self.rows)])


@dataclass(frozen=True, eq=False)
class PoolScores:
    """Scores of a pool, the seed of the draws that all rows share, and of a joint score the best
    rows; its scores are each row's gain alone."""

    scores: Float64[np.ndarray, "N"]
    seed: int
    phases: list[Phase]
    best: Best | None = None
    errors: Float64[np.ndarray, "N"] | None = None


@dataclass(eq=False)
class Progress:
    """How far a job is. `future` ends with it; a job that the event loop computes has none."""

    job: Job
    future: "asyncio.Future[None] | None" = None
    draws: DrawSet | None = None
    rows_done: int = 0
    # When it, or its next part, began to wait, on the clock of time.perf_counter
    queued: float = 0.0
    phases: list[Phase] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    best: Best | None = None

    @property
    def rows_left(self) -> int:
        return len(self.job.x) - self.rows_done

    def take(self, part: Part, rows: int, begun: float, ended: float) -> None:
        if part.candidates is not None:
            assert self.job.candidates is not None
            self.best = self.best or Best(self.job.candidates)
            self.best.take(part.candidates, self.rows_done)
            part = Part(scores=part.scores)
        self.parts.append(part)
        self.rows_done += rows
        self.phases.append(Phase(self.queued, begun, ended))

    def is_over(self) -> bool:
        """Whether nobody waits for it any more, or not in time."""
        assert self.future is not None
        if time.monotonic() > self.job.call.deadline:
            finish([self], PastDeadline())
            return True
        return self.future.cancelled()

    def tell(self, error: Exception | None) -> None:
        """Resolve the future, in its event loop."""
        assert self.future is not None
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def gather(self) -> None:
        """Make one part of all, in the worker: a copy would keep the event loop busy."""

        def joined(name: str, axis: int = 0) -> np.ndarray | None:
            of_parts = [getattr(part, name) for part in self.parts]
            return None if of_parts[0] is None else np.concatenate(of_parts, axis=axis)

        batches = [part.batch.prediction for part in self.parts if part.batch is not None]
        batch = MicroBatch(Prediction.concatenate(batches)) if batches else None
        rows = slice(0, len(self.job.x))
        samples = joined("samples", axis=1)
        self.parts = [Part(batch, rows, samples, joined("scores"), joined("errors"))]

    def predicted(self) -> Predicted:
        (part,) = self.parts
        assert self.draws is not None
        assert part.batch is not None
        seed, num_samples = self.draws.seed, self.job.num_samples
        return Predicted(part.batch, part.rows, seed, num_samples, part.samples, self.phases)

    def pool_scores(self) -> PoolScores:
        (part,) = self.parts
        assert self.draws is not None
        assert part.scores is not None
        return PoolScores(part.scores, self.draws.seed, self.phases, self.best, part.errors)


def finish(done: Sequence[Progress], error: Exception | None = None) -> None:
    """Resolve the futures of jobs, from another thread; their event loop may be gone.

    A loop is woken once for all of them, and told of a few at a time: between these it reads what
    other clients have sent.
    """

    def tell(of_loop: list[Progress]) -> None:
        for progress in of_loop[:TOLD_AT_ONCE]:
            progress.tell(error)
        if len(of_loop) > TOLD_AT_ONCE:
            asyncio.get_running_loop().call_soon(tell, of_loop[TOLD_AT_ONCE:])

    loops: dict[asyncio.AbstractEventLoop, list[Progress]] = {}
    for progress in done:
        assert progress.future is not None
        loops.setdefault(progress.future.get_loop(), []).append(progress)
    for loop, of_loop in loops.items():
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, of_loop)
