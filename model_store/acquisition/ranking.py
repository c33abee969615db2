"""Rank a pool: the one way from an acquisition to the rows that are most worth a label.

A `Pool` knows its rows and how they are scored: by the engine within a request, from a file, or by
a network in training. `rank_pool` asks it for the scores that the acquisition needs and no others.
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

RACE_PARTS = (10, 4)  # of all draws, after which rows of a race are left out
FEWEST_RACED = 10  # draws, whose standard errors can be relied on
REFERENCES = 3  # times k rows take all draws, so that there are scores to exceed
FEWEST_ALIKE, PARTS_ALIKE = 20, 40  # neighbours in the order of scores, and as a part of all rows
CAUTION = 2  # times as many rows are judged as a probability needs
PART_JUDGED = 10  # of a sample: the part with the largest scores stands for the best rows
WORTH_SAMPLING = 4  # times a sample must be left without one, so that it saves draws
LOST = float(np.finfo(np.float64).min)  # the score of a row that was left out of a race


@dataclass(frozen=True, eq=False)
class Lap:
    """What a race wants next: these rows' scores of the first `num_draws` draws, as
    `Predictive.race` has them, and their standard errors."""

    rows: Int64[np.ndarray, "n"]
    num_draws: int


Scored = tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"]]


@dataclass(frozen=True)
class Choice:
    """Which rows of a pool a request is for."""

    task: Task
    acquisition: str
    k: int
    num_samples: int
    race: float | None = None  # probability with which a race may leave a row out
    beta: float = 1.0  # of power_bald


class Pool(ABC):
    """Rows to choose from, and how they are scored.

    Attributes:
        ids: names of the rows; with the seed they decide ties.
        seed: of all draws, known once rows were scored.
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
        """Return the rows of `copies.first` that gain most alone, as indices of it."""

    async def run(self, work: Callable[[], T]) -> T:
        return work()


@dataclass(frozen=True, eq=False)
class Ranked:
    """The rows of a ranking as /acquire answers them, and of a race how many took all draws."""

    rows: list[dict[str, Any]]
    finalists: int | None = None


async def rank_pool(pool: Pool, choice: Choice) -> Ranked:
    """Return the k best rows of a pool; fewer of a smaller one, none of an empty one.

    Raises:
        InvalidInput: naming a row that the model cannot score, or an option that the acquisition
            has not.
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
    """Return what `rank_pool` does, of a pool whose methods wait for nothing."""
    try:
        rank_pool(pool, choice).send(None)
    except StopIteration as end:
        ranked: Ranked = end.value
        return ranked
    raise RuntimeError("expected a pool whose methods wait for nothing")


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
    """Return after how many draws rows of a race are left out; none where there is no race, or too
    few draws for one.

    Raises:
        InvalidInput: if the acquisition has no races.
    """
    if probability is None:
        return ()
    raced = PREDICTIVES[task].raced
    if name not in raced:
        raise InvalidInput("race", f"one of the acquisitions {list(raced)} with it", repr(name))
    return tuple(n for n in (num_samples // part for part in RACE_PARTS) if n >= FEWEST_RACED)


def race(
    rows: int, k: int, stages: tuple[int, ...], num_samples: int, probability: float
) -> Generator[Lap, Scored, tuple[Float64[np.ndarray, "N"], int]]:
    """Find the k rows of the largest scores of all draws, of which most rows take a few alone.

    After each stage the rows that are best so far take all draws, so that k scores are known which
    a row must exceed. A row is left out if its upper bound is below the least of these. The bound
    is its score and a multiple of its standard error, of a jackknife. No error is taken to be less
    than those of rows with scores like its own: few draws that happen to agree make a row look
    settled.

    The multiple is Student's quantile, for all rows and stages together but for a probability. What
    is bounded is the score of all draws, of which those taken are a random part: its error is less
    by the factor sqrt(1 - n / num_samples) (Cochran 1977, "Sampling techniques", 2.6).

    Where that leaves many rows, bounds are learned. A sample of the pool takes all draws. Its rows
    of the largest scores show how many standard errors first scores are below those of all draws.
    If the k best are like them, one of the best is further below than all of M with probability
    1 / (M + 1); M is such that this is half of what is asked for k rows and all stages. These
    suffice: a race goes wrong only where one of the k best is left out.

    Returns:
        the scores of all draws, `LOST` of rows that were left out, and how many were not.

    Raises:
        InvalidInput: naming a row that the model cannot score.
    """
    left, scores, is_known = np.arange(rows), np.full(rows, LOST), np.zeros(rows, dtype=bool)
    judges = math.ceil(CAUTION * k * len(stages) / probability)
    judged: Int64[np.ndarray, "n"] | None = None

    def complete(wanted: Int64[np.ndarray, "n"]) -> Generator[Lap, Scored, None]:
        new = np.sort(wanted[~is_known[wanted]])
        if len(new):
            scores[new], _ = yield Lap(new, num_samples)
            is_known[new] = True

    def may_be_best(bounds: Float64[np.ndarray, "n"]) -> Bool[np.ndarray, "n"]:
        stays: np.ndarray = bounds >= np.sort(scores[is_known])[-k:][0]
        return stays

    for n in stages:
        if len(left) == 0:  # those that are known are above all others
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
            # rows without an error, as all rows like them, say nothing
            below /= np.where(errors[places] > 0.0, errors[places], np.inf)
            stays = may_be_best(found + below.max() * errors)
            stays[places] = True  # so that they are seen at the next stage too
        left = left[stays]
    yield from complete(left)
    check_scores_of(scores[is_known], np.flatnonzero(is_known), "pool")
    return scores, int(is_known.sum())


def _smoothed(
    scores: Float64[np.ndarray, "n"], errors: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "n"]:
    """Return standard errors, none less than the root mean square of those of rows with scores next
    to its own."""
    n, order = len(scores), np.argsort(scores, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(errors[order] ** 2)])
    half = max(FEWEST_ALIKE, n // PARTS_ALIKE) // 2
    low, high = np.maximum(np.arange(n) - half, 0), np.minimum(np.arange(n) + half + 1, n)
    alike = np.empty(n)
    alike[order] = np.sqrt((sums[high] - sums[low]) / (high - low))
    return np.maximum(errors, alike)


def check_scores_of(
    scores: Float64[np.ndarray, "n"], rows: Int64[np.ndarray, "n"], field: str
) -> None:
    """Raise InvalidInput for the first of some rows, given their places, whose score is not a
    number."""
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
