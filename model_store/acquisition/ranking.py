"""Rank a pool by an acquisition function.

A `Pool` scores its rows: by the engine within a request, from a file, or by a network in training.
`rank_pool` requests only the scores that the acquisition needs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.acquisition.choice import RANDOM, Copies, joint_ranking, power_scores, ranking
from model_store.errors import InvalidInput
from model_store.inference.prediction import check_computed
from model_store.scores.joint import Candidates
from model_store.scores.tasks import PREDICTIVES
from model_store.types import Pause, Task, no_pause

T = TypeVar("T")

RACE_PARTS = (10, 4)  # a race drops rows after draws / 10 and draws / 4
MIN_RACE_DRAWS = 10  # for a reliable standard error
REFERENCES = 3  # times k rows take all draws, as scores to exceed
MIN_NEIGHBOURS, NEIGHBOUR_PARTS = 20, 40  # in the order of scores, and as a part of all rows
CAUTION = 2  # factor on the number of judged rows
PART_JUDGED = 10  # the best tenth of a sample stands for the best rows
WORTH_SAMPLING = 4  # a sample must be smaller than the remaining rows by this factor
LOST = float(np.finfo(np.float64).min)  # score of a row that a race dropped


@dataclass(frozen=True, eq=False)
class Lap:
    """A race's request: scores (`Predictive.race`) and errors of rows from the first draws."""

    rows: Int64[np.ndarray, "n"]
    num_draws: int


Scored = tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"]]


@dataclass(frozen=True)
class Choice:
    """The options of a ranking."""

    task: Task
    acquisition: str
    k: int
    num_samples: int
    race: float | None = None  # probability of dropping one of the k best rows
    beta: float = 1.0  # of power_bald


class Pool(ABC):
    """Rows to choose from, and their scores.

    Attributes:
        ids: names of the rows, which decide ties together with the seed.
        seed: of all draws; set once rows are scored.
        pause: called every few milliseconds of long work.
    """

    ids: Sequence[str]
    seed: int
    pause: Pause = staticmethod(no_pause)

    async def scores(self) -> Float64[np.ndarray, "N"]:
        raise NotImplementedError

    async def lap(self, lap: Lap) -> Scored:
        raise NotImplementedError

    @abstractmethod
    async def copies(self) -> Copies: ...

    @abstractmethod
    async def candidates(self, copies: Copies) -> tuple[Int64[np.ndarray, "M"], Candidates]:
        """Return the rows of `copies.first` with the largest gains alone, as indices."""

    async def run(self, work: Callable[[], T]) -> T:
        return work()


@dataclass(frozen=True, eq=False)
class Ranked:
    """Rows as /acquire returns them, and for a race the number of rows with all draws."""

    rows: list[dict[str, Any]]
    finalists: int | None = None


async def rank_pool(pool: Pool, choice: Choice) -> Ranked:
    """Return the k best rows of a pool, or all rows of a smaller pool.

    Raises:
        InvalidInput: for a row that the model cannot score, or an unsupported option.
    """
    name, k, predictive = choice.acquisition, choice.k, PREDICTIVES[choice.task]
    stages = race_stages(choice.race, name, choice.task, choice.num_samples)
    if k == 0 or len(pool.ids) == 0:
        return Ranked([])
    scores = copies = finalists = None
    if stages and choice.race is not None:
        scores, finalists = await _race(pool, choice, stages, choice.race)
    elif name in predictive.joint_scores:
        copies = await pool.copies()
        rows, candidates = await pool.candidates(copies)
        joint = predictive.joint_scores[name](candidates, choice.num_samples, pool.seed)
        work = partial(joint_ranking, joint, rows, copies, pool.ids, k, pool.pause)
        return Ranked(await pool.run(work))
    elif name in predictive.sampled:
        copies = await pool.copies()
        bald = await pool.scores()
        check_computed(bald, "pool")
        powers = partial(power_scores, bald, pool.ids, pool.seed, choice.beta)
        scores = await pool.run(powers)
    elif name != RANDOM:
        scores = await pool.scores()
    by_score = partial(ranking, scores, pool.ids, pool.seed, k, copies)
    return Ranked(await pool.run(by_score), finalists)


def rank_now(pool: Pool, choice: Choice) -> Ranked:
    """Run `rank_pool` for a pool whose methods never wait."""
    try:
        rank_pool(pool, choice).send(None)
    except StopIteration as end:
        ranked: Ranked = end.value
        return ranked
    raise RuntimeError("expected a pool whose methods never wait")


async def _race(
    pool: Pool, choice: Choice, stages: tuple[int, ...], probability: float
) -> tuple[Float64[np.ndarray, "N"], int]:
    laps = race(len(pool.ids), choice.k, stages, choice.num_samples, probability)
    lap = next(laps)
    while True:
        scored = await pool.lap(lap)
        try:
            lap = laps.send(scored)
        except StopIteration as end:
            raced, finalists = end.value
            is_known = raced > LOST
            raced[is_known] = PREDICTIVES[choice.task].of_raced(raced[is_known])
            return raced, finalists


def race_stages(
    probability: float | None, name: str, task: Task, num_samples: int
) -> tuple[int, ...]:
    """Return the draw counts after which a race drops rows; empty without a race or with few draws.

    Raises:
        InvalidInput: if the acquisition has no races.
    """
    if probability is None:
        return ()
    raced = PREDICTIVES[task].raced
    if name not in raced:
        raise InvalidInput("race", f"one of the acquisitions {list(raced)} with it", repr(name))
    return tuple(n for n in (num_samples // part for part in RACE_PARTS) if n >= MIN_RACE_DRAWS)


def race(
    rows: int, k: int, stages: tuple[int, ...], num_samples: int, probability: float
) -> Generator[Lap, Scored, tuple[Float64[np.ndarray, "N"], int]]:
    """Find the k rows with the largest scores; most rows take only a few draws.

    After each stage the best rows so far take all draws, which gives k scores to exceed. A row is
    dropped if its upper bound is below the smallest of them. The bound is the score plus a multiple
    of its jackknife standard error. Errors are raised to the level of rows with similar scores,
    because few draws can agree by chance.

    The multiple is Student's quantile, Bonferroni-corrected for all rows and stages. The bound is
    for the score of all draws, of which the first n are a random part. So the error shrinks by
    sqrt(1 - n / num_samples) (Cochran 1977, "Sampling techniques", 2.6).

    If many rows remain, bounds are learned. A sample of the pool takes all draws. Its M best rows
    show by how many standard errors first scores fall short of final scores. If the k best rows
    are exchangeable with them, one of the best falls short by more than all M with probability
    1 / (M + 1). M makes this half of the given probability for k rows and all stages. That
    suffices, because a race fails only if one of the k best rows is dropped.

    Returns:
        the scores from all draws, `LOST` for dropped rows, and the number of other rows.

    Raises:
        InvalidInput: for a row that the model cannot score.
    """
    left, scores, is_known = np.arange(rows), np.full(rows, LOST), np.zeros(rows, dtype=bool)
    judges = math.ceil(CAUTION * k * len(stages) / probability)
    judged: Int64[np.ndarray, "n"] | None = None

    def complete(rows: Int64[np.ndarray, "n"]) -> Generator[Lap, Scored, None]:
        new = np.sort(rows[~is_known[rows]])
        if len(new):
            scores[new], _ = yield Lap(new, num_samples)
            is_known[new] = True

    def may_be_best(bounds: Float64[np.ndarray, "n"]) -> Bool[np.ndarray, "n"]:
        stays: np.ndarray = bounds >= np.sort(scores[is_known])[-k:][0]
        return stays

    for n in stages:
        if len(left) == 0:  # the completed rows are above all others
            break
        found, errors = yield Lap(left, n)
        check_scores_of(found, left, "pool")
        errors = _smoothed(found, errors)
        order = np.argsort(-found, kind="stable")
        yield from complete(left[order[: REFERENCES * k]])
        quantile = student_quantile(n - 1, probability / (rows * len(stages)))
        stays = may_be_best(found + quantile * np.sqrt(1.0 - n / num_samples) * errors)
        if judged is None and stays.sum() > WORTH_SAMPLING * PART_JUDGED * judges:
            sample = left[order[:: len(left) // (PART_JUDGED * judges)]]
            yield from complete(sample)
            best = np.argsort(-scores[sample], kind="stable")[:judges]
            judged = np.sort(sample[best])
        if judged is not None:
            places = np.searchsorted(left, judged)
            below = scores[judged] - found[places]
            # Rows without an error carry no information
            below /= np.where(errors[places] > 0.0, errors[places], np.inf)
            stays = may_be_best(found + below.max() * errors)
            stays[places] = True  # the next stage needs them too
        left = left[stays]
    yield from complete(left)
    check_scores_of(scores[is_known], np.flatnonzero(is_known), "pool")
    return scores, int(is_known.sum())


def _smoothed(
    scores: Float64[np.ndarray, "n"], errors: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "n"]:
    """Raise standard errors to the root mean square of rows with neighbouring scores."""
    n, order = len(scores), np.argsort(scores, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(errors[order] ** 2)])
    half = max(MIN_NEIGHBOURS, n // NEIGHBOUR_PARTS) // 2
    low, high = np.maximum(np.arange(n) - half, 0), np.minimum(np.arange(n) + half + 1, n)
    alike = np.empty(n)
    alike[order] = np.sqrt((sums[high] - sums[low]) / (high - low))
    return np.maximum(errors, alike)


def check_scores_of(
    scores: Float64[np.ndarray, "n"], rows: Int64[np.ndarray, "n"], field: str
) -> None:
    """Raise InvalidInput for the first row whose score is not a number."""
    odd = np.flatnonzero(~np.isfinite(scores))
    if len(odd):
        check_computed(scores[odd[:1]], field, int(rows[odd[0]]))


def student_quantile(degrees_of_freedom: int, tail: float) -> float:
    """Return the t that Student's distribution exceeds with probability `tail`: within 1 % from 4
    degrees on for a tail of .001, from 9 on within 3 % down to 5e-9.

    The expansion in 1 / degrees of Abramowitz and Stegun, "Handbook of mathematical functions",
    1964, 26.7.5.
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
