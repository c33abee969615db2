import numpy as np
import pytest
from scipy import stats

from experiments.active.rounds import Needed, Round, count_needed, mean_needed, measure_saved


def create_rounds(*metrics):
    return [Round(20 + 10 * i, metric, -1.0, [], 0.0, 0.0, 0.0) for i, metric in enumerate(metrics)]


def create_reached(*labels):
    return [Needed(round(n), True) for n in labels]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ((0.5, 0.9, 0.96, 0.94, 0.95, 0.96), Needed(40, True)),
        ((0.95, 0.2), Needed(20, True)),
        ((0.5, 0.6, 0.949), Needed(40, False)),
    ],
)
def test_needed_labels_are_counted_at_first_round_at_target(metrics, expected):
    assert count_needed(create_rounds(*metrics), 0.95, "classification") == expected


def test_lower_metric_is_better_for_regression():
    assert count_needed(create_rounds(3.0, 2.0, 1.0), 2.0, "regression") == Needed(30, True)


def test_saved_labels_interval_is_student_t_of_differences():
    actual = measure_saved(create_reached(100, 120, 90), create_reached(150, 160, 170))
    differences = [50, 40, 80]
    low, high = stats.t.interval(0.95, 2, np.mean(differences), stats.sem(differences))
    assert (actual.mean.value, actual.mean.bound, actual.seeds) == (
        pytest.approx(np.mean(differences)),
        "",
        3,
    )
    assert (actual.low, actual.high) == (pytest.approx(low), pytest.approx(high))


def test_saved_labels_interval_has_nominal_coverage():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        candidate, baseline = rng.normal(1000, 150, size=5), rng.normal(1300, 250, size=5)
        actual = measure_saved(create_reached(*candidate), create_reached(*baseline))
        hits += actual.low <= 300 <= actual.high
    assert stats.binomtest(hits, 400, 0.95).pvalue > 1e-3


def test_seed_below_target_turns_means_into_bounds():
    incomplete = [*create_reached(100, 120), Needed(200, False)]
    complete = create_reached(150, 160, 170)
    assert (mean_needed(incomplete).value, mean_needed(incomplete).bound) == (140.0, "at least")
    assert mean_needed([item for item in incomplete if not item.is_reached]).bound == "more than"
    saved, reverse = measure_saved(complete, incomplete), measure_saved(incomplete, complete)
    assert (saved.mean.value, saved.mean.bound, saved.high) == (-20.0, "at least", None)
    assert (reverse.mean.value, reverse.mean.bound, reverse.low) == (20.0, "at most", None)
    assert saved.low is not None
    assert reverse.high == pytest.approx(-saved.low)
    assert measure_saved(incomplete, incomplete).mean.bound == "unknown"


def test_single_seed_has_no_interval():
    actual = measure_saved(create_reached(100), create_reached(150))
    assert (actual.mean.value, actual.low, actual.high) == (50.0, None, None)
