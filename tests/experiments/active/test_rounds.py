import numpy as np
import pytest
from scipy import stats

from experiments.active.rounds import Needed, Round, count_needed, mean_needed, measure_saved


def rounds(*metrics):
    return [Round(20 + 10 * i, metric, -1.0, [], 0.0, 0.0, 0.0) for i, metric in enumerate(metrics)]


def reached(*labels):
    return [Needed(round(n), True) for n in labels]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ((0.5, 0.9, 0.96, 0.94, 0.95, 0.96), Needed(40, True)),
        ((0.95, 0.2), Needed(20, True)),
        ((0.5, 0.6, 0.949), Needed(40, False)),
    ],
)
def test_labels_needed_are_those_of_the_first_round_at_the_target(metrics, expected):
    assert count_needed(rounds(*metrics), 0.95, "classification") == expected


def test_of_a_regression_less_is_better():
    assert count_needed(rounds(3.0, 2.0, 1.0), 2.0, "regression") == Needed(30, True)


def test_the_interval_is_students_of_the_differences():
    actual = measure_saved(reached(100, 120, 90), reached(150, 160, 170))
    differences = [50, 40, 80]
    low, high = stats.t.interval(0.95, 2, np.mean(differences), stats.sem(differences))
    assert (actual.mean.value, actual.mean.bound, actual.seeds) == (
        pytest.approx(np.mean(differences)),
        "",
        3,
    )
    assert (actual.low, actual.high) == (pytest.approx(low), pytest.approx(high))


def test_an_interval_of_many_seeds_covers_the_true_difference_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        mine, its = rng.normal(1000, 150, size=5), rng.normal(1300, 250, size=5)
        actual = measure_saved(reached(*mine), reached(*its))
        hits += actual.low <= 300 <= actual.high
    assert stats.binomtest(hits, 400, 0.95).pvalue > 1e-3


def test_a_seed_below_the_target_makes_bounds_of_means_and_is_never_left_out():
    below = [*reached(100, 120), Needed(200, False)]
    there = reached(150, 160, 170)
    assert (mean_needed(below).value, mean_needed(below).bound) == (140.0, "at least")
    assert mean_needed([item for item in below if not item.is_reached]).bound == "more than"
    mine, its = measure_saved(there, below), measure_saved(below, there)
    assert (mine.mean.value, mine.mean.bound, mine.high) == (-20.0, "at least", None)
    assert (its.mean.value, its.mean.bound, its.low) == (20.0, "at most", None)
    assert mine.low is not None
    assert its.high == pytest.approx(-mine.low)
    assert measure_saved(below, below).mean.bound == "unknown"


def test_of_a_single_seed_there_is_no_interval():
    actual = measure_saved(reached(100), reached(150))
    assert (actual.mean.value, actual.low, actual.high) == (50.0, None, None)
