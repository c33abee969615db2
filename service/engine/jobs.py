"""What a request asks of the engine, how far it is, and what it gets."""

import asyncio
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Float64, Int64

from model_store.conformal.stopping import StoppingRule
from model_store.inference.prediction import Prediction
from model_store.inference.runtime import DrawSet
from model_store.scores.joint import Candidates
from service.call import Call
from service.errors import PastDeadline
from service.models.models import Served
from service.telemetry.records import Phase

T = TypeVar("T")

FEW_ROWS = 8  # of a request whose answer takes no time to write


@dataclass(frozen=True, eq=False)
class Job:
    """Rows to predict, or a pool to score where `acquisition` is named."""

    served: Served
    x: Float32[np.ndarray, "N I"]
    num_samples: int
    seed: int | None  # None: under fresh draws
    call: Call = field(default_factory=Call)
    rule: StoppingRule | None = None  # when a row stops drawing; None: at `num_samples`
    keep_samples: bool = False
    acquisition: str | None = None
    candidates: int | None = (
        None  # how many rows a joint score chooses from; None where it is not one
    )
    is_race: bool = (
        False  # whether scores are asked for as a race goes by them, with standard errors
    )
    priors: tuple[float, ...] | None = (
        None  # shares of the rows' classes, if not those of the training data
    )

    @property
    def row_draws(self) -> int:
        """The work of a row, in draws: those that it takes, and as many as its encoder is worth."""
        return self.num_samples + self.served.model.encoding_draws

    @property
    def has_short_answer(self) -> bool:
        """Whether the event loop may write the answer."""
        return len(self.x) <= FEW_ROWS and not self.keep_samples

    def goes_with(self, other: "Job") -> bool:
        """Whether both may be in one micro-batch: of the same model, number of draws, rule and
        priors, and no pool."""
        same_model = (
            self.served is other.served and self.acquisition is None and other.acquisition is None
        )
        mine, its = ((job.num_samples, job.rule, job.priors) for job in (self, other))
        return same_model and mine == its


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The prediction of rows that were computed together, and what is made of it once for requests
    that ask alike."""

    prediction: Prediction
    made: dict[Hashable, Any] = field(default_factory=dict)  # None of what was asked for once

    def shared(self, key: Hashable, make: Callable[[Prediction], T]) -> T | None:
        """Return what `make` makes of the whole prediction; None to the first who asks with this
        key.

        The first does better to make it of its own rows: others may all have other keys.
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
    what each draw says, `Predictive.samples`.
    """

    batch: MicroBatch
    rows: slice
    seed: int
    num_samples: int
    samples: Float32[np.ndarray, "K N C"] | None
    phases: list[Phase]

    @property
    def prediction(self) -> Prediction:
        """The prediction of the request's rows."""
        return self.batch.prediction.take(self.rows)


@dataclass(frozen=True, eq=False)
class Part:
    """What was computed of some rows of a job: of predictions those `rows` of a micro-batch, of a
    pool its scores."""

    batch: MicroBatch | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    samples: Float32[np.ndarray, "K N C"] | None = None
    scores: Float64[np.ndarray, "n"] | None = None
    errors: Float64[np.ndarray, "n"] | None = None  # of scores, in a race
    candidates: Candidates | None = None  # taken over by the job, once


class Best:
    """The candidates that gain most alone of a pool's rows, which it sees in parts; ties by
    place."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows: Int64[np.ndarray, "M"] = np.empty(0, dtype=np.int64)  # their places in the pool
        self._gain = np.empty(0)
        self._own = np.empty(0)
        self._said: Float32[np.ndarray, "M D"] | None = None

    def take(self, part: Candidates, first: int) -> None:
        """See the rows `first` and on of the pool."""
        if self._said is None:
            self._said = np.empty((self._most, part.said.shape[1]), dtype=np.float32)
        held, n = len(self.rows), len(part.gain)
        rows, gain = (
            np.concatenate([self.rows, first + np.arange(n)]),
            np.concatenate([self._gain, part.gain]),
        )
        own, place = np.concatenate([self._own, part.own]), np.arange(held + n)  # in `_said`
        is_best = np.zeros(held + n, dtype=bool)
        is_best[np.lexsort((rows, -gain))[: self._most]] = True
        (new,) = np.nonzero(is_best[held:])
        free = np.concatenate([np.flatnonzero(~is_best[:held]), np.arange(held, self._most)])[
            : len(new)
        ]
        self._said[free] = part.said[new]
        place[held + new] = free
        kept = np.flatnonzero(is_best)
        kept = kept[np.argsort(place[kept])]
        self.rows, self._gain, self._own = rows[kept], gain[kept], own[kept]

    @property
    def candidates(self) -> Candidates:
        """What is kept of them, in the order of `rows`."""
        assert self._said is not None
        return Candidates(self._gain, self._own, self._said[: len(self.rows)])


@dataclass(frozen=True, eq=False)
class PoolScores:
    """What pool rows are ranked by, and the seed of the draws that all of them share; of a joint
    score its best rows, and as scores what each row gains alone.
    """

    scores: Float64[np.ndarray, "N"]
    seed: int
    phases: list[Phase]
    best: Best | None = None
    errors: Float64[np.ndarray, "N"] | None = None


@dataclass(eq=False)
class Progress:
    """How far a job is. `future` ends with it; a job that the event loop does at once has none."""

    job: Job
    future: "asyncio.Future[None] | None" = None
    draws: DrawSet | None = None
    rows_done: int = 0
    queued: float = (
        0.0  # when it, or its next part, began to wait, on the clock of time.perf_counter
    )
    phases: list[Phase] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    best: Best | None = None

    @property
    def rows_left(self) -> int:
        """How many rows are still to be computed."""
        return len(self.job.x) - self.rows_done

    def take(self, part: Part, rows: int, begun: float, ended: float) -> None:
        """Take in a part of so many rows that was computed from `begun` to `ended`."""
        if part.candidates is not None:
            assert self.job.candidates is not None
            self.best = self.best or Best(self.job.candidates)
            self.best.take(part.candidates, self.rows_done)
            part = Part(scores=part.scores)
        self.parts.append(part)
        self.rows_done += rows
        self.phases.append(Phase(self.queued, begun, ended))

    def is_over(self) -> bool:
        """Whether nobody waits for it any more, or not in time; whoever still does is told."""
        assert self.future is not None
        if time.monotonic() > self.job.call.deadline:
            self.finish(PastDeadline())
            return True
        return self.future.cancelled()

    def finish(self, error: Exception | None = None) -> None:
        """Tell whoever waits for the job that it is done, or why not; their event loop may be
        gone."""
        assert self.future is not None
        with suppress(RuntimeError):
            self.future.get_loop().call_soon_threadsafe(self._tell, error)

    def _tell(self, error: Exception | None) -> None:
        assert self.future is not None
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def gather(self) -> None:
        """Make one part of all, each of which was computed by itself: a copy that is better not
        made by the loop."""
        batch = samples = scores = errors = None
        if self.parts[0].batch is not None:
            batch = MicroBatch(
                Prediction.concatenate(
                    [p.batch.prediction for p in self.parts if p.batch is not None]
                )
            )
        if self.parts[0].samples is not None:
            samples = np.concatenate(
                [part.samples for part in self.parts if part.samples is not None], axis=1
            )
        if self.parts[0].scores is not None:
            scores = np.concatenate([part.scores for part in self.parts if part.scores is not None])
        if self.parts[0].errors is not None:
            errors = np.concatenate([part.errors for part in self.parts if part.errors is not None])
        self.parts = [Part(batch, slice(0, len(self.job.x)), samples, scores, errors)]

    def predicted(self) -> Predicted:
        """Return the prediction of a job whose rows are all computed, and gathered."""
        (part,) = self.parts
        assert self.draws is not None
        assert part.batch is not None
        return Predicted(
            part.batch, part.rows, self.draws.seed, self.job.num_samples, part.samples, self.phases
        )

    def pool_scores(self) -> PoolScores:
        """Return the scores of a pool whose rows are all computed, and gathered."""
        (part,) = self.parts
        assert self.draws is not None
        assert part.scores is not None
        return PoolScores(part.scores, self.draws.seed, self.phases, self.best, part.errors)
