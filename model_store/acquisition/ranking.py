"""Rank the rows in a pool with an acquisition function.

A `Pool` scores its rows: by the engine within a request, from a file, or by a network in training.
`rank_pool` requests only the scores that the acquisition needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from model_store.acquisition.choice import RANDOM, Choice, joint_ranking, power_scores, ranking
from model_store.errors import InvalidInput, list_choices
from model_store.inference.model import Model
from model_store.inference.prediction import check_computed
from model_store.inference.runtime import DrawSet
from model_store.scores.joint import BatchBald, Candidates
from model_store.scores.tasks import PREDICTIVES, race_scores
from model_store.types import JsonObject, Pause, no_pause

Means = Float64[np.ndarray, "n"]
Scores = Float64[np.ndarray, "N"]
T = TypeVar("T")

RACE_PARTS = (10, 4)  # races drop rows after draws / 10 and draws / 4
MIN_RACE_DRAWS = 10  # for a reliable standard error
REFERENCES = 3  # times k rows with all draws in each stage
MIN_NEIGHBOURS, NEIGHBOUR_PARTS = 20, 40  # rows, or rows / 40, to smooth errors
DROPPED_SCORE = float(np.finfo(np.float64).min)


Scored = tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"]]


@dataclass(frozen=True, eq=False)
class PoolScorer:
    """A model's acquisition function. `priors` replaces the class shares from training."""

    model: Model
    acquisition: str
    priors: tuple[float, ...] | None = None

    def scores(self, x: Float32[np.ndarray, "N I"], draws: DrawSet) -> Scores:
        """Compute the score of each row, or its individual gain if the score is joint."""
        predictive, name = self.model.predictive, self.acquisition
        if name in predictive.joint_acquisitions:
            return self.candidates(x, draws).gain
        errors = [score for key, score in predictive.jackknife_scores.items() if key == name]
        sums = predictive.sums(self._outputs(x, draws))
        return predictive.acquisition(predictive.scores(sums, errors), name)

    def race(self, x: Float32[np.ndarray, "N I"], draws: DrawSet) -> Scored:
        predictive = self.model.predictive
        sums = predictive.sums(self._outputs(x, draws))
        score = predictive.acquisition_scores[self.acquisition]
        return race_scores(predictive.scores(sums, [score]), score)

    def candidates(self, x: Float32[np.ndarray, "N I"], draws: DrawSet) -> Candidates:
        return BatchBald.from_probs(self.model.predictive.samples(self._outputs(x, draws)))

    def _outputs(self, x: Float32[np.ndarray, "N I"], draws: DrawSet) -> Float[np.ndarray, "K N C"]:
        runtime = self.model.runtime
        if self.acquisition in self.model.predictive.joint_acquisitions and runtime.has_joint:
            runtime, draws = runtime.joint, DrawSet(draws.seed, draws.num_draws, theta=None)
        outputs = runtime.run_outputs(x, draws)
        return outputs if self.priors is None else self.model.shifted(outputs, self.priors)


class Pool(ABC):
    """A pool of rows, with methods that compute their scores.

    Attributes:
        ids: names of the rows, which decide ties together with the seed.
        seed: of all draws; set once rows are scored.
        pause: called every few milliseconds.
    """

    ids: Sequence[str]
    seed: int
    pause: Pause = staticmethod(no_pause)

    async def scores(self) -> Scores:
        raise NotImplementedError

    async def scores_with_errors(self, rows: Int64[np.ndarray, "n"], num_draws: int) -> Scored:
        raise NotImplementedError

    @abstractmethod
    async def candidates(self) -> tuple[Int64[np.ndarray, "M"], Candidates]:
        """Return the rows with the largest individual gains as candidates for a joint score."""

    async def run(self, work: Callable[[], T]) -> T:
        return work()


@dataclass(frozen=True, eq=False)
class Ranked:
    rows: list[JsonObject]
    finalists: int | None = None  # rows of a race with all draws


async def rank_pool(pool: Pool, choice: Choice) -> Ranked:
    """Rank the k best rows in a pool, or all. Raise InvalidInput for a row without a score."""
    name, k, predictive = choice.acquisition, choice.k, PREDICTIVES[choice.task]
    stages = race_stages(choice)
    if k == 0 or len(pool.ids) == 0:
        return Ranked([])
    scores = finalists = None
    if stages:
        scores, finalists = await race(pool, choice, stages)
    elif name in predictive.joint_acquisitions:
        rows, candidates = await pool.candidates()
        joint = BatchBald(candidates, choice.num_samples, pool.seed)
        work = partial(joint_ranking, joint, rows, pool.ids, pool.seed, k, pool.pause)
        return Ranked(await pool.run(work))
    elif name in predictive.sampling_acquisitions:
        bald = await pool.scores()
        check_computed(bald, "pool")
        powers = partial(power_scores, bald, pool.ids, pool.seed, choice.beta)
        scores = await pool.run(powers)
    elif name != RANDOM:
        scores = await pool.scores()
    by_score = partial(ranking, scores, pool.ids, pool.seed, k)
    return Ranked(await pool.run(by_score), finalists)


def race_stages(choice: Choice) -> tuple[int, ...]:
    """Return the draw counts at which a race drops rows, or raise InvalidInput if unsupported."""
    if choice.race is None:
        return ()
    supported = PREDICTIVES[choice.task].race_acquisitions
    if choice.acquisition not in supported:
        raise InvalidInput("race", list_choices(supported), repr(choice.acquisition))
    stages = (choice.num_samples // part for part in RACE_PARTS)
    return tuple(n for n in stages if n >= MIN_RACE_DRAWS)


async def race(pool: Pool, choice: Choice, stages: tuple[int, ...]) -> tuple[Scores, int]:
    """Find the k rows with the highest scores without computing all draws for every row.

    After each stage, the best rows are scored with all draws. A row is dropped if its upper bound
    is below the k-th largest of these scores. The bound is the row's score plus a multiple of its
    jackknife standard error. Errors are raised to the level of rows with similar scores, because
    few draws can agree by chance.

    The multiple is Student's quantile, Bonferroni-corrected for all rows and stages. The first n
    draws are a random part of all draws, so the error shrinks by sqrt(1 - n / num_samples) (Cochran
    1977, "Sampling techniques", 2.6).

    Returns the scores with all draws (`DROPPED_SCORE` for dropped rows), and their number. Raise
    InvalidInput for a row that the model cannot score.
    """
    assert choice.race is not None
    num_rows, k, num_samples = len(pool.ids), choice.k, choice.num_samples
    remaining, scores = np.arange(num_rows), np.full(num_rows, DROPPED_SCORE)
    is_scored = np.zeros(num_rows, dtype=bool)

    async def complete(rows: Int64[np.ndarray, "n"]) -> None:
        new = np.sort(rows[~is_scored[rows]])
        if len(new):
            scores[new], _ = await pool.scores_with_errors(new, num_samples)
            is_scored[new] = True

    for n in stages:
        if len(remaining) == 0:  # the rows with all draws have won
            break
        first_scores, errors = await pool.scores_with_errors(remaining, n)
        check_computed(first_scores, "pool", remaining)
        errors = _smooth_errors(first_scores, errors)
        order = np.argsort(-first_scores, kind="stable")
        await complete(remaining[order[: REFERENCES * k]])
        quantile = student_quantile(n - 1, choice.race / (num_rows * len(stages)))
        bounds = first_scores + quantile * np.sqrt(1.0 - n / num_samples) * errors
        remaining = remaining[bounds >= np.sort(scores[is_scored])[-k:][0]]
    await complete(remaining)
    check_computed(scores[is_scored], "pool", np.flatnonzero(is_scored))
    scores[is_scored] = PREDICTIVES[choice.task].ranking_scores(scores[is_scored])
    return scores, int(is_scored.sum())


def _smooth_errors(scores: Means, errors: Means) -> Means:
    """Raise small standard errors to the root mean square over rows with similar scores."""
    n, order = len(scores), np.argsort(scores, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(errors[order] ** 2)])
    half = max(MIN_NEIGHBOURS, n // NEIGHBOUR_PARTS) // 2
    low, high = np.maximum(np.arange(n) - half, 0), np.minimum(np.arange(n) + half + 1, n)
    smoothed = np.empty(n)
    smoothed[order] = np.sqrt((sums[high] - sums[low]) / (high - low))
    return np.maximum(errors, smoothed)


def student_quantile(degrees_of_freedom: int, tail: float) -> float:
    """Compute the quantile of Student's t-distribution for upper tail probability `tail`.

    The expansion in 1 / degrees of freedom is from Abramowitz and Stegun, "Handbook of mathematical
    functions", 1964, 26.7.5. The error is below 1 % from 4 degrees on if `tail` is .001, and below
    3 % from 9 degrees on if `tail` is at least 5e-9.
    """
    x = NormalDist().inv_cdf(1.0 - tail)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return sum(term / degrees_of_freedom**power for power, term in enumerate(terms))
