"""Measures of detection: against brute force over pairs and thresholds, scikit-learn, and by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn import metrics

from model_store.scores.classification import Scores
from training.evaluation.metrics import (
    area_under_risk_coverage,
    auroc,
    average_precision,
    detection,
    expected_calibration_error,
    false_positive_rate,
    quality,
    reliability,
    risk_coverage,
    roc_curve,
)

# Few values, so that there are many ties.
SCORES = st.integers(1, 12).flatmap(lambda n: arrays(np.float64, n, elements=st.sampled_from([-1.5, 0.0, 0.25, 3.0])))


@given(SCORES, SCORES)
def test_auroc_is_the_share_of_pairs_in_order_ties_counting_half(positive, negative):
    pairs = positive[:, None] - negative
    assert auroc(positive, negative) == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)))


@given(SCORES, SCORES)
def test_auroc_and_average_precision_are_scikit_learns(positive, negative):
    is_positive = np.repeat([1, 0], [len(positive), len(negative)])
    scores = np.concatenate([positive, negative])
    assert auroc(positive, negative) == pytest.approx(metrics.roc_auc_score(is_positive, scores))
    expected = metrics.average_precision_score(is_positive, scores)
    assert average_precision(positive, negative) == pytest.approx(expected)


@given(SCORES, SCORES)
def test_the_area_under_the_roc_curve_is_auroc(positive, negative):
    false, true = roc_curve(positive, negative)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(true, false) == pytest.approx(auroc(positive, negative))


@given(SCORES, SCORES, st.sampled_from([0.2, 0.5, 0.95, 1.0]))
def test_the_false_positive_rate_is_the_least_over_thresholds_that_detect_enough(positive, negative, rate):
    thresholds = np.concatenate([positive, negative])
    enough = [np.mean(negative >= t) for t in thresholds if np.mean(positive >= t) >= rate - 1e-12]
    assert false_positive_rate(positive, negative, rate) == pytest.approx(min(enough))


def test_a_score_that_says_nothing_comes_to_the_base_rates():
    nothing = detection(np.zeros(30), np.zeros(90))
    assert nothing.content() == pytest.approx({"auroc": 0.5, "pr_plus": 0.25, "pr_minus": 0.75, "fpr_at_95": 1.0})


def test_a_score_that_says_all_detects_all():
    assert detection(np.arange(5.0) + 10, np.arange(9.0)).content() == {
        "auroc": 1.0,
        "pr_plus": 1.0,
        "pr_minus": 1.0,
        "fpr_at_95": 0.0,
    }


def test_risk_against_coverage_by_hand():
    score = np.array([0.1, 0.5, 0.5, 0.9])
    loss = np.array([0.0, 1.0, 0.0, 1.0])
    coverage, risk = risk_coverage(score, loss)
    assert coverage.tolist() == [0.25, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([0.0, 1 / 3, 0.5])
    # the two of equal score in either order: risks 0, 1/2 or 0, then 1/3, 1/2
    assert area_under_risk_coverage(score, loss) == pytest.approx((0 + 1 / 4 + 1 / 3 + 1 / 2) / 4)


@given(st.permutations(range(8)))
def test_risk_does_not_depend_on_the_order_of_rows(order):
    score = np.array([0, 0, 1, 1, 1, 2, 3, 3], dtype=float)
    loss = np.array([0, 1, 0, 0, 1, 1, 1, 0], dtype=float)
    expected = area_under_risk_coverage(score, loss)
    assert area_under_risk_coverage(score[list(order)], loss[list(order)]) == pytest.approx(expected)


def test_calibration_error_by_hand():
    confidence = np.array([0.95, 0.99, 0.55, 0.52])
    correct = np.array([True, False, True, True])
    expected = (abs(1 - 1.94) + abs(2 - 1.07)) / 4
    assert expected_calibration_error(confidence, correct, bins=10) == pytest.approx(expected)
    assert [entry.rows for entry in reliability(confidence, correct, bins=10)] == [2, 2]


def with_probabilities(probs):
    """Scores of which only the probabilities matter."""
    rest = np.zeros(len(probs))
    return Scores(
        num_draws=np.ones(len(probs), dtype=int),
        probabilities=probs,
        label=probs.argmax(axis=1),
        entropy=rest,
        expected_entropy=rest,
        bald=rest,
        mean_std=rest,
        variation_ratio=rest,
        standard_error=None,
    )


def test_quality_is_scikit_learns():
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(4), size=200)
    y = np.array([rng.choice(4, p=p) for p in probs])
    found = quality(with_probabilities(probs), y)
    assert found["accuracy"] == metrics.accuracy_score(y, probs.argmax(1))
    assert found["log_likelihood"] == pytest.approx(-metrics.log_loss(y, probs, labels=range(4)))
    assert found["brier"] == pytest.approx(
        sum((probs[n, c] - (y[n] == c)) ** 2 for n in range(200) for c in range(4)) / 200
    )
    gap = 0.0
    for b in range(15):
        inside = [n for n in range(200) if b / 15 <= probs[n].max() < (b + 1) / 15 + (b == 14)]
        if inside:
            correct = np.mean([probs[n].argmax() == y[n] for n in inside])
            gap += len(inside) / 200 * abs(correct - np.mean([probs[n].max() for n in inside]))
    assert found["expected_calibration_error"] == pytest.approx(gap)


def test_quality_of_certain_answers_is_finite():
    y = np.array([0, 1, 1])
    right = quality(with_probabilities(np.eye(2)[y]), y)
    assert right == {"accuracy": 1, "log_likelihood": 0, "brier": 0, "expected_calibration_error": 0}
    wrong = quality(with_probabilities(np.eye(2)[1 - y]), y)
    assert wrong["accuracy"] == 0
    assert wrong["brier"] == 2
    assert wrong["expected_calibration_error"] == 1
    assert -1000 < wrong["log_likelihood"] < -600
