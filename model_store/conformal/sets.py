"""Prediction sets and intervals that hold the truth with a stated probability (split conformal
prediction).

Of n calibration rows the truth has *nonconformities*, numbers of which more mean farther from the
prediction. A set or interval holds whatever has a nonconformity of at most q, the ceil((n + 1)
coverage)-th smallest of them. For inputs exchangeable with the calibration rows it holds the truth
with a probability of at least `coverage`, and of at most coverage + 1 / (n + 1) if no two
nonconformities are equal (Vovk, Gammerman and Shafer, "Algorithmic learning in a random world",
2005; Lei et al., "Distribution-free predictive inference for regression", 2018, theorem 2.2).

That is on average over the choice of calibration rows. With a `confidence` q is a larger one of
them, such that the coverage of the sets, which differs from one choice of calibration rows to
another, is at least `coverage` with that probability (training-conditional or PAC coverage: Vovk,
"Conditional validity of inductive conformal predictors", 2012, proposition 2a). Where rows are
independent, the coverage of q = the k-th smallest is at least a variable of law Beta(k, n + 1 - k),
so k is the smallest of which P(Binomial(n, coverage) <= k - 1) >= confidence.

**Classes.** A class's nonconformity is the mass above it, the sum of the probabilities of all
classes more probable than it: 0 of the most probable class. So a set is made of the most probable
classes, as many as it takes for their mass to exceed q, and is never empty. These are the adaptive
sets of Romano, Sesia and Candes, "Classification with valid and adaptive coverage", 2020, without
their random number: nothing but the row and its draws decides a set. Rows whose label is right all
have nonconformity 0: of a `coverage` below the model's accuracy the set is the label alone, and
holds the truth as often as the label is right.

**Numbers.** A target's nonconformity is |y - mean| / std, and the interval mean -/+ q std (Lei et
al. 2018, section 5.2). Where a target was fitted as z = g(y), increasing, y, mean and std here are
those of z, and the interval's ends are turned back: y lies between them exactly where z lies in the
interval.
"""

import math
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Float64, Int64

KEPT_RANKS = 1024  # by rows, coverage and confidence
ROUNDING = 1e-9

Rising = Float64[np.ndarray, "n"]


def mass_above(probs: Float64[np.ndarray, "N C"]) -> Float64[np.ndarray, "N C"]:
    """Return for each row and class the probability of all classes more probable than it, from 0 to
    1.

    Of classes with equal probabilities the first counts as more probable.
    """
    order = np.argsort(-probs, axis=1, kind="stable")
    # 1 - the mass of a class and all below it: a row's classes differ even where the first's
    # probability rounds to 1.
    rows = np.arange(len(probs))[:, None]
    rest = probs[rows, order[:, ::-1]].cumsum(axis=1)[:, ::-1]
    sorted_mass = np.maximum(1.0 - rest, 0.0)
    sorted_mass[:, 0] = 0.0
    mass = np.empty_like(probs)
    mass[rows, order] = sorted_mass
    return mass


def class_nonconformity(
    probs: Float64[np.ndarray, "N C"], labels: Int64[np.ndarray, "N"]
) -> Float64[np.ndarray, "N"]:
    return mass_above(probs)[np.arange(len(labels)), labels]


def target_nonconformity(
    mean: Float64[np.ndarray, "N"], std: Float64[np.ndarray, "N"], y: Float[np.ndarray, "N"]
) -> Float64[np.ndarray, "N"]:
    return np.abs(y - mean) / std


def quantile(nonconformity: Rising, coverage: float, confidence: float | None = None) -> float:
    """Return q, of sorted nonconformities; infinite where they are too few."""
    rows = len(nonconformity)
    if confidence is None:
        rank = coverage_rank(rows, coverage)
    else:
        rank = confident_rank(rows, coverage, confidence)
    return math.inf if rank > rows else float(nonconformity[rank - 1])


def coverage_rank(rows: int, coverage: float) -> int:
    """Return which of `rows` sorted nonconformities q is, from 1; `rows` + 1 or more where they are
    too few."""
    return math.ceil((rows + 1) * coverage * (1.0 - ROUNDING))


@lru_cache(maxsize=KEPT_RANKS)
def confident_rank(rows: int, coverage: float, confidence: float) -> int:
    """Return the same such that coverage is kept with a confidence; never less than without one.

    Coverage and confidence are in (0, 1).
    """
    ranks = np.arange(1, rows + 1)
    log_factorial = np.concatenate([[0.0], np.log(ranks).cumsum()])
    log_pmf = log_factorial[rows] - log_factorial[ranks] - log_factorial[rows - ranks]
    log_pmf += ranks * math.log(coverage) + (rows - ranks) * math.log1p(-coverage)
    # P(Binomial >= k): that coverage is less, for each rank k
    missed = np.exp(log_pmf)[::-1].cumsum()[::-1]
    enough = np.flatnonzero(missed <= (1.0 + ROUNDING) * (1.0 - confidence))
    return max(coverage_rank(rows, coverage), int(enough[0]) + 1) if len(enough) else rows + 1


def largest_coverage(rows: int, confidence: float) -> float:
    """Return the largest coverage that calibration rows can keep with a confidence, and on
    average."""
    return float(min((1.0 - confidence) ** (1.0 / rows), rows / (rows + 1.0)))
