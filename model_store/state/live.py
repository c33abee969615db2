"""How good a version was on live data: figures of the control rows that it set aside, once they
have labels.

Each row is judged by what the version said of it when it was set aside. Nothing is computed again.
Intervals are of 95 %: a share's is Wilson's ("Probable inference, the law of succession, and
statistical inference", 1927), others are the bootstrap's. A calibration error is above 0 by chance
alone, so its interval begins as much lower as chance may add, as that of evaluation reports does.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from model_store.state.database import may_be_damaged

FEWEST = 50  # labelled control rows, below which a figure would say little
LEVEL = 0.95
COVERAGE = 0.95  # of the sets and intervals that are kept
RESAMPLES = 1000
BINS = 15
LEAST_PROBABILITY = 1e-12
SEED = 0  # of resamples: the same labels have the same intervals
CHUNK_NUMBERS = 4_000_000  # of resamples x rows at once


def said_of(prediction: Prediction, classes: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return what is kept of each row's prediction: probabilities and prediction set, or mean, std
    and interval.

    Sets and intervals are of coverage .95; of a regression without `classes`, in the target's
    units.
    """
    if isinstance(prediction.scores, Scores):
        names, inside = classes or (), prediction.prediction_sets(COVERAGE)
        assert inside is not None
        return [
            {
                "probabilities": dict(zip(names, probs, strict=True)),
                "set": [name for name, is_inside in zip(names, row, strict=True) if is_inside],
            }
            for probs, row in zip(
                prediction.scores.probabilities.tolist(), inside.tolist(), strict=True
            )
        ]
    scores, intervals = prediction.scores.in_units, prediction.intervals(COVERAGE)
    assert intervals is not None
    rows = zip(scores.mean.tolist(), scores.std.tolist(), intervals.tolist(), strict=True)
    return [{"mean": mean, "std": std, "interval": interval} for mean, std, interval in rows]


def live_figures(rows: Sequence[tuple[dict[str, Any], str | float]]) -> dict[str, Any]:
    """Return the figures of rows of one version, given what it said of each and its label or
    target."""
    with may_be_damaged("what a version said of a control row"):
        return _of_classes(rows) if "probabilities" in rows[0][0] else _of_targets(rows)


def _of_classes(rows: Sequence[tuple[dict[str, Any], str | float]]) -> dict[str, Any]:
    likelihood, brier, confidence, correct, inside = [], [], [], [], []
    for said, label in rows:
        probs: dict[str, float] = said["probabilities"]
        best = max(probs, key=lambda name: probs[name])
        true = probs.get(str(label), 0.0)
        likelihood.append(math.log(max(true, LEAST_PROBABILITY)))
        brier.append(sum(p * p for p in probs.values()) - 2.0 * true + 1.0)
        confidence.append(probs[best])
        correct.append(best == label)
        inside.append(label in said["set"])
    means = np.array(likelihood), np.array(brier)
    gaps = _gaps(np.array(confidence), np.array(correct))
    *sampled, sampled_gaps = _resample_sums(*means, gaps)
    return {
        "accuracy": _share(correct),
        "log_likelihood": _mean(means[0], sampled[0]),
        "brier": _mean(means[1], sampled[1]),
        "expected_calibration_error": _calibration_error(gaps.sum(axis=0), sampled_gaps),
        "set_coverage_at_95": _share(inside),
    }


def _of_targets(rows: Sequence[tuple[dict[str, Any], str | float]]) -> dict[str, Any]:
    squares = np.array([(said["mean"] - float(target)) ** 2 for said, target in rows])
    inside = [said["interval"][0] <= float(target) <= said["interval"][1] for said, target in rows]
    stds = np.array([said["std"] for said, _ in rows])
    sampled_squares, sampled_stds = _resample_sums(squares, stds)
    return {
        "rmse": _mean(squares, sampled_squares, math.sqrt),
        "std": _mean(stds, sampled_stds),
        "interval_coverage_at_95": _share(inside),
    }


def wilson_interval(share: float, rows: int) -> tuple[float, float]:
    """Return the interval of a share, which need not be of whole rows (Wilson 1927)."""
    z = NormalDist().inv_cdf((1.0 + LEVEL) / 2.0)
    centre = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = (
        z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows)) / (1 + z * z / rows)
    )
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def _share(hits: Sequence[bool]) -> dict[str, Any]:
    share = sum(hits) / len(hits)
    return {"value": share, "interval": list(wilson_interval(share, len(hits)))}


def _mean(
    values: Float64[np.ndarray, "N"],
    sampled: Float64[np.ndarray, "R"],
    of_mean: Callable[[float], float] = float,
) -> dict[str, Any]:
    ends = np.quantile(sampled / len(values), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return {"value": of_mean(float(values.mean())), "interval": [of_mean(end) for end in ends]}


def _gaps(
    confidence: Float64[np.ndarray, "N"], correct: Bool[np.ndarray, "N"]
) -> Float64[np.ndarray, "N B"]:
    """Return what each row adds to the gap between confidence and accuracy of its bin."""
    index = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    gaps = np.zeros((len(confidence), BINS))
    gaps[np.arange(len(index)), index] = (correct - confidence) / len(index)
    return gaps


def _calibration_error(
    here: Float64[np.ndarray, "B"], sampled: Float64[np.ndarray, "R B"]
) -> dict[str, Any]:
    value = float(np.abs(here).sum())
    chance = float(np.quantile(np.abs(sampled - here).sum(axis=1), (1 + LEVEL) / 2))
    most = float(np.quantile(np.abs(sampled).sum(axis=1), (1 + LEVEL) / 2))
    return {"value": value, "interval": [max(0.0, value - chance), max(value, most)]}


def _resample_sums(*values: Float64[np.ndarray, "N ..."]) -> list[Float64[np.ndarray, "R ..."]]:
    """Return the sums of values over each of R samples of the rows with replacement, some samples
    at a time: all counts of all rows may be more than memory."""
    random, rows = np.random.default_rng(SEED), len(values[0])
    sums: list[list[np.ndarray]] = [[] for _ in values]
    step = max(1, CHUNK_NUMBERS // rows)
    for start in range(0, RESAMPLES, step):
        counts = np.empty((min(step, RESAMPLES - start), rows), dtype=np.int64)
        for sample in counts:
            sample[:] = np.bincount(random.integers(rows, size=rows), minlength=rows)
        for parts, of in zip(sums, values, strict=True):
            parts.append(counts @ of)
    return [np.concatenate(parts) for parts in sums]
