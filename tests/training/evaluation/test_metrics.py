import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn import metrics

from training.evaluation.metrics import (
    RiskCoverage,
    class_figures,
    detection,
    flag_range,
    reliability,
    values,
)

# Few values, so that there are many ties.
SCORES = st.integers(1, 12).flatmap(
    lambda n: arrays(np.float64, n, elements=st.sampled_from([-1.5, 0.0, 0.25, 3.0]))
)


@given(SCORES, SCORES)
def test_auroc_is_share_of_ordered_pairs_with_ties_counted_half(positive, negative):
    pairs = positive[:, None] - negative
    assert detection(positive, negative)["auroc"] == pytest.approx(
        np.mean((pairs > 0) + 0.5 * (pairs == 0))
    )


def without_intervals(record):
    return {name: value for name, value in record.items() if name != "confidence_intervals"}


def test_constant_score_gets_base_rates():
    constant = detection(np.zeros(30), np.zeros(90))
    assert without_intervals(constant) == pytest.approx({"auroc": 0.5, "average_precision": 0.25})


def test_separating_score_gets_perfect_detection():
    assert without_intervals(detection(np.arange(5.0) + 10, np.arange(9.0))) == {
        "auroc": 1.0,
        "average_precision": 1.0,
    }


def test_risk_coverage_matches_hand_calculation():
    score = np.array([0.1, 0.5, 0.5, 0.9])
    loss = np.array([0.0, 1.0, 0.0, 1.0])
    # The tie averages both orders: risks 0, (1/2 or 0), 1/3, 1/2.
    assert RiskCoverage(score, loss).value == pytest.approx((0 + 1 / 4 + 1 / 3 + 1 / 2) / 4)


@given(st.permutations(range(8)))
def test_risk_coverage_does_not_depend_on_row_order(order):
    score = np.array([0, 0, 1, 1, 1, 2, 3, 3], dtype=float)
    loss = np.array([0, 1, 0, 0, 1, 1, 1, 0], dtype=float)
    expected = RiskCoverage(score, loss).value
    assert RiskCoverage(score[list(order)], loss[list(order)]).value == pytest.approx(expected)


def test_calibration_error_matches_hand_calculation():
    confidence = np.array([0.95, 0.99, 0.55, 0.52])
    correct = np.array([True, False, True, True])
    expected = (abs(1 - 1.94) + abs(2 - 1.07)) / 4
    probs = np.stack([confidence, 1 - confidence], axis=1)
    actual = class_figures(probs, np.where(correct, 0, 1))["expected_calibration_error"].value
    assert actual == pytest.approx(expected)  # 15 bins pair these rows as 10 bins do
    assert [entry["rows"] for entry in reliability(confidence, correct, bins=10)] == [2, 2]


def test_class_figures_match_scikit_learn():
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(4), size=200)
    y = np.array([rng.choice(4, p=p) for p in probs])
    actual = values(class_figures(probs, y))
    assert actual["accuracy"] == metrics.accuracy_score(y, probs.argmax(1))
    assert actual["log_likelihood"] == pytest.approx(-metrics.log_loss(y, probs, labels=range(4)))
    assert actual["brier"] == pytest.approx(
        sum((probs[n, c] - (y[n] == c)) ** 2 for n in range(200) for c in range(4)) / 200
    )
    gap = 0.0
    for b in range(15):
        inside = [n for n in range(200) if b / 15 <= probs[n].max() < (b + 1) / 15 + (b == 14)]
        if inside:
            correct = np.mean([probs[n].argmax() == y[n] for n in inside])
            gap += len(inside) / 200 * abs(correct - np.mean([probs[n].max() for n in inside]))
    assert actual["expected_calibration_error"] == pytest.approx(gap)


def test_class_figures_are_finite_for_certain_predictions():
    y = np.array([0, 1, 1])
    right = values(class_figures(np.eye(2)[y], y))
    error = "expected_calibration_error"
    assert right == {"accuracy": 1, "log_likelihood": 0, "brier": 0, error: 0}
    wrong = values(class_figures(np.eye(2)[1 - y], y))
    assert wrong["accuracy"] == 0
    assert wrong["brier"] == 2
    assert wrong["expected_calibration_error"] == 1
    assert -1000 < wrong["log_likelihood"] < -600


@pytest.mark.parametrize(("calibration_rows", "rows"), [(55, 114), (300, 50)])
def test_flag_range_has_its_probability(calibration_rows, rows):
    random = np.random.default_rng(0)
    calibration = np.sort(random.random((20_000, calibration_rows)))
    scores = random.random((20_000, rows))
    rank = int(0.05 * (calibration_rows + 1))
    share = (scores > calibration[:, [-rank]]).mean(1)
    low, high = flag_range(rows, calibration_rows, 0.05)
    assert ((share >= low) & (share <= high)).mean() > 0.985
    assert (share < low).mean() < 0.007
    assert (share > high).mean() < 0.007
    assert high < share.max()


def test_no_ordinary_row_is_flagged_with_too_few_calibration_rows():
    assert flag_range(100, 18, 0.05) == (0.0, 0.0)
