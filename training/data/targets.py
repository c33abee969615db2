"""Targets with heavy tails, transformed for the fit: `data.target_transform`.

A transform is made of the training rows' targets alone; that none is negative, that some are 0 and
that all are whole follow from all rows, as properties of what a target can be.
"""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
from jaxtyping import Float64

from model_store.errors import InvalidInput
from model_store.scores.transforms import (
    LogTransform,
    RankTransform,
    Transform,
    log_slope,
    to_fitted,
)
from training.data.rows import Dataset, Splits

KNOTS = 41  # of a rank transform: one for each tenth or so of a standard deviation
ROWS_A_KNOT = 5
FIELD = "data.target_transform"
KINDS = ("none", "log", "rank")


def fit_transform(kind: str, splits: Splits, data: Dataset) -> Transform | None:
    if kind == "none":
        return None
    every = np.concatenate([data.train.y, data.test.y]).astype(np.float64)
    train = splits.train.y.astype(np.float64)
    least = 0.0 if is_count(every) else None
    return _log(train, every, least is not None) if kind == "log" else _rank(train, least)


def kinds_for(data: Dataset) -> tuple[str, ...]:
    is_negative = any((rows.y < 0).any() for rows in (data.train, data.test) if len(rows))
    return tuple(kind for kind in KINDS if kind != "log" or not is_negative)


def is_count(y: Float64[np.ndarray, "N"]) -> bool:
    return bool(len(y) and (y >= 0).all() and (y == np.round(y)).all())


def transform_splits(splits: Splits, transform: Transform | None) -> Splits:
    """Return splits as a fit sees them: targets of the training and validation rows are
    transformed.

    Those of the other splits stay as they are: they calibrate and measure what is answered, in the
    target's units.
    """
    if transform is None:
        return splits
    train, validation = (
        replace(rows, y=apply_transform(transform, rows.y).astype(np.float32))
        for rows in (splits.train, splits.validation)
    )
    return replace(splits, train=train, validation=validation)


def log_slope_of(transform: Transform | None, y: np.ndarray) -> float:
    return 0.0 if transform is None else float(log_slope(transform, y).mean())


def apply_transform(transform: Transform, y: np.ndarray) -> Float64[np.ndarray, "N"]:
    z = to_fitted(transform, y)
    if not np.isfinite(z).all():
        n = int(np.argmin(np.isfinite(z)))
        least = 0.0 if not isinstance(transform, LogTransform) else -transform.offset
        expected = f"targets above {least:g}, since their logarithm was fitted"
        raise InvalidInput("data.target", expected, f"{y[n]:g}")
    return z


def _log(
    train: Float64[np.ndarray, "N"], every: Float64[np.ndarray, "M"], is_counted: bool
) -> LogTransform:
    """Return log(y) of positive targets, log(1 + y) of counts, and of others log(c + y), with c the
    lower quartile of the positive ones: a multiple of the target has the same multiple of c.
    """
    if (every < 0).any():
        expected = "`none` or `rank`, since a logarithm takes no negative target"
        raise InvalidInput(FIELD, expected, "'log'")
    if not (every == 0).any():
        return LogTransform(offset=0.0)
    if is_counted:
        return LogTransform(offset=1.0)
    positive = train[train > 0] if (train > 0).any() else every[every > 0]
    return LogTransform(offset=float(np.quantile(positive, 0.25)))


def _rank(train: Float64[np.ndarray, "N"], least: float | None) -> RankTransform:
    """Return normal scores, as a line through quantiles of the training targets whose scores are
    equally far apart.

    The least and the largest target have the scores of the ranks 1/2 and N - 1/2 of N. Between two
    quantiles are at least that many rows: the pieces at the ends, which go on beyond, would else
    have the slope of two rows' distance. Of many equal targets the scores of all their ranks are
    averaged.
    """
    rows = len(train)
    furthest = -NormalDist().inv_cdf(0.5 / rows)
    grid = np.linspace(-furthest, furthest, KNOTS)
    # Of the rows in order, from 0.
    ranks = np.array([rows * NormalDist().cdf(score) - 0.5 for score in grid.tolist()])
    kept = [0]
    for knot in range(1, KNOTS - 1):
        if min(ranks[knot] - ranks[kept[-1]], ranks[-1] - ranks[knot]) >= ROWS_A_KNOT:
            kept.append(knot)
    kept.append(KNOTS - 1)
    shares = np.clip(ranks[kept] / (rows - 1), 0.0, 1.0)
    scores = grid[kept]
    distinct, of = np.unique(np.quantile(train, shares), return_inverse=True)
    means = np.bincount(of, weights=scores) / np.bincount(of)
    return RankTransform(values=tuple(distinct.tolist()), scores=tuple(means.tolist()), least=least)
