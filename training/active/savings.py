"""How many labels an arm needs for a target, and how many it saves against random choice.

Of a seed that ends below the target, all that is known is that it needs more labels than it had. A
mean over seeds with such ones is a bound and said to be one; no seed is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from model_store.types import Task
from training.active.protocol import End, is_at
from training.active.records import Round
from training.evaluation.figures import LEVEL


@dataclass(frozen=True)
class Needed:
    """Labels that a seed needs for a target."""

    labels: int  # at the first round at the target; else of the last round
    is_reached: bool  # else more than `labels` are needed
    kept: (
        int | None
    )  # labels of the first of so many rounds in a row at the target, if there were such


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, or a bound of it."""

    value: float
    # "" of a mean, "at least", "at most" or "more than" of a bound, "unknown" where neither holds
    bound: str


@dataclass(frozen=True)
class Saved:
    """Labels saved against random choice with the same seeds: the mean of differences, and its
    interval."""

    mean: Mean
    low: float | None  # of the interval; None: it has no such end, or there is but one seed
    high: float | None
    seeds: int


def needed(rounds: Sequence[Round], target: float, task: Task, in_a_row: int) -> Needed:
    """Return the labels that a seed's rounds need for a target."""
    at = [is_at(done.metric, target, task) for done in rounds]
    runs = [i for i in range(len(at) - in_a_row + 1) if all(at[i : i + in_a_row])]
    kept = rounds[runs[0]].labels if runs else None
    first = next((i for i, is_there in enumerate(at) if is_there), None)
    return Needed(rounds[-1 if first is None else first].labels, first is not None, kept)


def has_ended(rounds: Sequence[Round], end: End, task: Task, batch: int) -> bool:
    """Whether an arm of a seed is done: at its target, or with too few labels left for another
    batch."""
    if not rounds:
        return False
    last = rounds[-end.rounds :]
    if end.target is not None and len(last) == end.rounds:
        target = end.target
        if all(is_at(done.metric, target, task) for done in last):
            return True
    return rounds[-1].labels + batch > end.labels


def mean_needed(seeds: Sequence[Needed]) -> Mean:
    """Return the mean of labels needed, or what it is at least, or more than where no seed came to
    the target."""
    value, there = (
        float(np.mean([one.labels for one in seeds])),
        sum(one.is_reached for one in seeds),
    )
    return Mean(value, "" if there == len(seeds) else "at least" if there else "more than")


def saved(arm: Sequence[Needed], control: Sequence[Needed]) -> Saved:
    """Return the labels that an arm saves against random choice, the same seeds in the same order.

    The interval is Student's, of the differences by seed. Where a seed ends below the target its
    difference is a bound: at least so much where random choice does, at most so much where the arm
    does; of the interval that end alone is given.
    """
    differences = np.array(
        [its.labels - mine.labels for mine, its in zip(arm, control, strict=True)], dtype=float
    )
    is_least, is_most = (not all(one.is_reached for one in seeds) for seeds in (control, arm))
    bound = (
        "unknown"
        if is_least and is_most
        else "at least"
        if is_least
        else "at most"
        if is_most
        else ""
    )
    low = high = None
    if len(differences) > 1:
        quantile = float(stats.t.ppf((1.0 + LEVEL) / 2.0, len(differences) - 1))
        half = quantile * float(differences.std(ddof=1)) / len(differences) ** 0.5
        low = None if is_most else float(differences.mean() - half)
        high = None if is_least else float(differences.mean() + half)
    return Saved(Mean(float(differences.mean()), bound), low, high, len(differences))
