"""A version's quality metrics on live data, computed from labelled control rows.

The figures use the predictions that were saved with the control rows. Intervals have level 95 %:
Wilson's intervals for shares ("Probable inference, the law of succession, and statistical
inference", 1927), and normal intervals for means.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from jaxtyping import Float64

from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from model_store.state.database import may_be_damaged
from model_store.types import JsonObject

MIN_CONTROL_ROWS = 50  # labelled control rows
LEVEL = 0.95
COVERAGE = 0.95  # of the saved sets and intervals
Z = NormalDist().inv_cdf((1.0 + LEVEL) / 2.0)
LEAST_PROBABILITY = 1e-12


def prediction_records(prediction: Prediction, classes: Sequence[str] | None) -> list[JsonObject]:
    """Convert predictions to JSON records, one for each row.

    Records have probabilities and a prediction set, or the mean, std and interval in the target's
    units. Sets and intervals have coverage 95 %.
    """
    if isinstance(prediction.scores, Scores):
        names, inside = classes or (), prediction.prediction_sets(COVERAGE)
        assert inside is not None
        probabilities = prediction.scores.probabilities.tolist()
        return [
            {
                "probabilities": dict(zip(names, probs, strict=True)),
                "set": [name for name, is_inside in zip(names, row, strict=True) if is_inside],
            }
            for probs, row in zip(probabilities, inside.tolist(), strict=True)
        ]
    scores, intervals = prediction.scores.in_units, prediction.intervals(COVERAGE)
    assert intervals is not None
    rows = zip(scores.mean.tolist(), scores.std.tolist(), intervals.tolist(), strict=True)
    return [{"mean": mean, "std": std, "interval": interval} for mean, std, interval in rows]


def live_figures(rows: Sequence[tuple[JsonObject, str | float]]) -> JsonObject:
    with may_be_damaged("the prediction of a control row"):
        return _class_figures(rows) if "probabilities" in rows[0][0] else _target_figures(rows)


def _class_figures(rows: Sequence[tuple[JsonObject, str | float]]) -> JsonObject:
    likelihood, brier, correct, inside = [], [], [], []
    for prediction, label in rows:
        probs: dict[str, float] = prediction["probabilities"]
        best = max(probs, key=lambda name: probs[name])
        true = probs.get(str(label), 0.0)
        likelihood.append(math.log(max(true, LEAST_PROBABILITY)))
        brier.append(sum(p * p for p in probs.values()) - 2.0 * true + 1.0)
        correct.append(best == label)
        inside.append(label in prediction["set"])
    return {
        "accuracy": _share(correct),
        "log_likelihood": _mean(np.array(likelihood)),
        "brier": _mean(np.array(brier)),
        "set_coverage_at_95": _share(inside),
    }


def _target_figures(rows: Sequence[tuple[JsonObject, str | float]]) -> JsonObject:
    squares = np.array([(row["mean"] - float(target)) ** 2 for row, target in rows])
    inside = [row["interval"][0] <= float(target) <= row["interval"][1] for row, target in rows]
    return {
        "rmse": _mean(squares, math.sqrt),
        "std": _mean(np.array([row["std"] for row, _ in rows])),
        "interval_coverage_at_95": _share(inside),
    }


def wilson_interval(share: float, rows: float) -> tuple[float, float]:
    variance, scale = share * (1 - share) / rows, 1 + Z * Z / rows
    centre = (share + Z * Z / (2 * rows)) / scale
    half = Z * math.sqrt(variance + Z * Z / (4 * rows * rows)) / scale
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def _share(hits: Sequence[bool]) -> JsonObject:
    share = sum(hits) / len(hits)
    return {"value": share, "interval": list(wilson_interval(share, len(hits)))}


def _mean(
    values: Float64[np.ndarray, "N"], transform: Callable[[float], float] = float
) -> JsonObject:
    mean, half = float(values.mean()), Z * float(values.std()) / math.sqrt(len(values))
    low = max(mean - half, 0.0) if values.min() >= 0.0 else mean - half
    return {"value": transform(mean), "interval": [transform(low), transform(mean + half)]}
