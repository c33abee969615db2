"""Test rows by part: each class, each label that is given, each group. Coverage and rates of all
rows say little of one of these, unless a version is calibrated by category.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from training.data import Rows
from training.evaluation.figures import Figure, RootMean, Share
from training.evaluation.intervals import Resamples
from training.evaluation.metrics import values
from training.evaluation.quality import ServedPrediction, intervals_of, losses
from training.evaluation.records import PartMeasures

COVERAGE, FPR = 0.95, 0.05
MOST_GROUPS = 100  # that are told apart, those of the most rows


def measure_parts(
    predicted: ServedPrediction,
    test: Rows,
    classes: tuple[str, ...],
    groups: tuple[str, ...],
    seed: int,
) -> list[PartMeasures]:
    """Return what is measured of each part that has test rows; `classes` and `groups` are what
    numbers mean."""
    prediction = predicted.prediction
    loss, held = losses(prediction.scores, test.y), _held(prediction, test.y)
    is_flagged = prediction.judged_p_values.p_value <= FPR
    is_usable = f"{FPR:g}" in predicted.flagged
    measured = []
    for by, name, rows in _parts(prediction, test, classes, groups):
        error: dict[str, Figure]
        error = {"accuracy": Share(loss[rows] == 0)} if classes else {"rmse": RootMean(loss[rows])}
        figures: dict[str, Figure] = {**error, "covered": Share(held[rows])}
        if is_usable:
            figures["flagged"] = Share(is_flagged[rows])
        found = {"flagged": None, **values(figures)}
        intervals = intervals_of(figures, Resamples.of(len(rows), seed))
        content = {
            "by": by,
            "name": name,
            "rows": len(rows),
            **found,
            "confidence_intervals": intervals,
        }
        measured.append(PartMeasures.model_validate(content))
    return measured


def _parts(
    prediction: Prediction, test: Rows, classes: tuple[str, ...], groups: tuple[str, ...]
) -> Iterator[tuple[str, str, Int64[np.ndarray, "n"]]]:
    """Yield kind, name and rows of each part."""
    if isinstance(prediction.scores, Scores):
        for by, numbers in (("class", test.y), ("label", prediction.scores.label)):
            for number, name in enumerate(classes):
                rows = np.flatnonzero(numbers == number)
                if len(rows):
                    yield by, name, rows
    if test.groups is not None:
        present, counts = np.unique(test.groups, return_counts=True)
        kept = present[np.argsort(-counts, kind="stable")[:MOST_GROUPS]]
        for number in sorted(kept.tolist()):
            yield "group", groups[number], np.flatnonzero(test.groups == number)


def _held(prediction: Prediction, y: np.ndarray) -> Bool[np.ndarray, "N"]:
    """Return whether each row's set or interval holds the truth."""
    inside = prediction.prediction_sets(COVERAGE)
    if inside is not None:
        return inside[np.arange(len(y)), y]
    ends: Float64[np.ndarray, "N 2"] | None = prediction.intervals(COVERAGE)
    assert ends is not None
    return (ends[:, 0] <= y) & (y <= ends[:, 1])
