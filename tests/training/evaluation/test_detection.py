import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from training.evaluation.detection import class_probabilities
from training.evaluation.figures import Resamples, values
from training.evaluation.metrics import class_figures


def rows(count=300, classes=4):
    random = np.random.default_rng(0)
    logits = random.normal(size=(count, classes))
    y = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    probs = np.exp(2 * logits)
    return probs / probs.sum(axis=1, keepdims=True), y


def test_classes_are_measured_each_against_all_others():
    probs, y = rows()
    measured = class_probabilities(probs, y, ("a", "b", "c", "d"), Resamples.draw(300, 0, 200))
    for c, item in enumerate(measured):
        assert item.rows == np.sum(y == c)
        assert item.average_precision == pytest.approx(average_precision_score(y == c, probs[:, c]))
        assert sum(b.rows for b in item.reliability) == 300
        for name in ("calibration_error", "average_precision"):
            low, high = item.confidence_intervals[name]
            assert low <= getattr(item, name) <= high
    classwise = values(class_figures(probs, y))["classwise_calibration_error"]
    assert np.mean([item.calibration_error for item in measured]) == pytest.approx(classwise)


def test_a_class_without_rows_has_no_average_precision():
    probs, y = rows()
    y[y == 2] = 0
    assert (
        class_probabilities(probs, y, ("a", "b", "c", "d"), Resamples.draw(300, 0, 50))[
            2
        ].average_precision
        is None
    )
