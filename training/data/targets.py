"""Transforms for targets that are heavy-tailed or hardly vary.

`data.target_transform` selects the transform for heavy tails. Transforms are fitted on the training
targets. All targets determine whether targets can be negative, zero or fractional.
"""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
from jaxtyping import Float, Float64

from model_store.errors import InvalidInput
from model_store.scores.transforms import (
    LogTransform,
    RankTransform,
    Transform,
    log_slope,
    to_fitted,
)
from training.data.rows import Dataset, Splits

KNOTS = 41  # about ten per standard deviation
MIN_KNOT_ROWS = 5
MIN_STEPS = 1000.0  # float32 steps per standard deviation of targets that are not centred
FIELD = "data.target_transform"
KINDS = ("none", "log", "rank")


def fit_transform(kind: str, splits: Splits, data: Dataset) -> Transform | None:
    targets = np.concatenate([data.train.y, data.test.y]).astype(np.float64)
    train = splits.train.y.astype(np.float64)
    if kind == "none":
        return _standardise(train) if needs_float64(targets) else None
    minimum = 0.0 if is_count(targets) else None
    return _log(train, targets, minimum is not None) if kind == "log" else _rank(train, minimum)


def kinds_for(data: Dataset) -> tuple[str, ...]:
    targets = np.concatenate([data.train.y, data.test.y])
    has_log = bool((targets >= 0).all()) and not needs_float64(targets)
    return tuple(kind for kind in KINDS if kind != "log" or has_log)


def needs_float64(y: Float[np.ndarray, "N"]) -> bool:
    """Check whether targets vary too little for float32, such as 1e9 plus noise."""
    step = np.spacing(np.abs(y).max().astype(np.float32))
    return bool(0.0 < y.std() < MIN_STEPS * step)


def is_count(y: Float64[np.ndarray, "N"]) -> bool:
    return bool(len(y) and (y >= 0).all() and (y == np.round(y)).all())


def transform_splits(splits: Splits, transform: Transform | None) -> Splits:
    """Transform the targets of the training and validation rows.

    The other splits stay in the target's units, like predictions.
    """
    if transform is None:
        return splits
    train, validation = (
        replace(rows, y=apply_transform(transform, rows.y).astype(np.float32))
        for rows in (splits.train, splits.validation)
    )
    return replace(splits, train=train, validation=validation)


def mean_log_slope(transform: Transform | None, y: np.ndarray) -> float:
    return 0.0 if transform is None else float(log_slope(transform, y).mean())


def apply_transform(transform: Transform, y: np.ndarray) -> Float64[np.ndarray, "N"]:
    z = to_fitted(transform, y)
    if not np.isfinite(z).all():
        n = int(np.argmin(np.isfinite(z)))
        minimum = 0.0 if not isinstance(transform, LogTransform) else -transform.offset
        expected = f"targets above {minimum:g}, because their logarithm was fitted"
        raise InvalidInput("data.target", expected, f"{y[n]:g}")
    return z


def _standardise(train: Float64[np.ndarray, "N"]) -> RankTransform:
    mean, std = float(train.mean()), float(train.std())
    high = max(mean + std, float(np.nextafter(mean, np.inf)))
    return RankTransform(values=(mean, high), scores=(0.0, 1.0))


def _log(
    train: Float64[np.ndarray, "N"], targets: Float64[np.ndarray, "M"], is_counts: bool
) -> LogTransform:
    """Choose log(y), log(1 + y) or log(c + y) as the transform.

    The first is for positive targets, the second for counts, and the third for all others. c is the
    lower quartile of the positive targets, so the transform does not depend on their unit.
    """
    if (targets < 0).any():
        expected = "`none` or `rank`, because some targets are negative"
        raise InvalidInput(FIELD, expected, "'log'")
    if not (targets == 0).any():
        return LogTransform(offset=0.0)
    if is_counts:
        return LogTransform(offset=1.0)
    positive = train[train > 0] if (train > 0).any() else targets[targets > 0]
    return LogTransform(offset=float(np.quantile(positive, 0.25)))


def _rank(train: Float64[np.ndarray, "N"], minimum: float | None) -> RankTransform:
    """Map targets to normal scores by interpolation between training quantiles.

    The interpolation is linear, and the scores of the quantiles are equally spaced. The smallest
    and the largest target have the scores of the ranks 1/2 and N - 1/2 of N. At least
    `MIN_KNOT_ROWS` rows lie between two quantiles, because the outer segments extrapolate. Equal
    targets get the mean of their scores.
    """
    rows = len(train)
    max_score = -NormalDist().inv_cdf(0.5 / rows)
    grid = np.linspace(-max_score, max_score, KNOTS)
    ranks = np.array([rows * NormalDist().cdf(score) - 0.5 for score in grid.tolist()])  # from 0
    knots = [0]
    for knot in range(1, KNOTS - 1):
        if min(ranks[knot] - ranks[knots[-1]], ranks[-1] - ranks[knot]) >= MIN_KNOT_ROWS:
            knots.append(knot)
    knots.append(KNOTS - 1)
    shares = np.clip(ranks[knots] / (rows - 1), 0.0, 1.0)
    scores = grid[knots]
    distinct, group_index = np.unique(np.quantile(train, shares), return_inverse=True)
    means = np.bincount(group_index, weights=scores) / np.bincount(group_index)
    values = tuple(distinct.tolist())
    return RankTransform(values=values, scores=tuple(means.tolist()), least=minimum)
