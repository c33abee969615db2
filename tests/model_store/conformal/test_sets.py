import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from model_store.conformal.rank_tables import (
    RankTables,
    class_nonconformity,
    confident_rank,
    coverage_rank,
    largest_coverage,
    mass_above,
    quantile,
    target_nonconformity,
)

SPLITS = 400
NEW = 100


def tables(nonconformity):
    return RankTables(1, nonconformity, {}, nonconformity, None)


def test_the_mass_above_a_class_by_hand():
    probs = np.array([[0.2, 0.7, 0.1], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]])
    expected = [[0.7, 0.0, 0.9], [0.5, 0.0, 0.75], [1.0, 1.0, 0.0]]
    np.testing.assert_allclose(mass_above(probs), expected, atol=1e-15)


@settings(max_examples=100)
@given(
    weights=st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=5)
)
def test_the_mass_above_a_class_is_the_sum_of_the_more_probable_ones(weights):
    probs = np.array(weights, dtype=np.float64) + 1e-3
    probs /= probs.sum(axis=1, keepdims=True)
    for row, actual in zip(probs, mass_above(probs), strict=True):
        for c, p in enumerate(row):
            above = [q for j, q in enumerate(row) if q > p or (q == p and j < c)]
            assert actual[c] == pytest.approx(sum(above), abs=1e-12)


def test_sets_and_quantiles_by_hand():
    nonconformity = np.array([0.0, 0.0, 0.5, 0.8])
    assert [quantile(nonconformity, coverage) for coverage in (0.4, 0.6, 0.8, 0.81)] == [
        0.0,
        0.5,
        0.8,
        math.inf,
    ]
    probs = np.array([[0.7, 0.2, 0.1], [0.35, 0.33, 0.32], [0.24, 0.25, 0.51]])
    assert tables(nonconformity).prediction_sets(mass_above(probs), 0.4).tolist() == [
        [True, False, False],
        [True, False, False],
        [False, False, True],
    ]
    assert tables(nonconformity).prediction_sets(mass_above(probs), 0.6).tolist() == [
        [True, False, False],
        [True, True, False],
        [False, False, True],
    ]
    assert tables(nonconformity).prediction_sets(mass_above(probs), 0.8).tolist() == [
        [True, True, False],
        [True, True, True],
        [True, True, True],
    ]
    assert tables(nonconformity).prediction_sets(mass_above(probs), 0.81).all()


RATES = st.floats(0.01, 0.99)


@given(st.integers(1, 300), RATES, RATES)
def test_a_confident_rank_is_the_smallest_whose_beta_law_keeps_the_coverage(
    rows, coverage, confidence
):
    ranks = np.arange(1, rows + 1)
    retained = stats.beta.sf(coverage, ranks, rows + 1 - ranks)
    enough = ranks[retained >= confidence * (1 - 1e-9)]
    expected = max(int(enough[0]), coverage_rank(rows, coverage)) if len(enough) else rows + 1
    assert confident_rank(rows, coverage, confidence) == expected


@pytest.mark.parametrize("rows", [9, 19, 99, 100, 999, 1234])
def test_a_coverage_is_the_decimal_number_that_was_asked_for_whatever_its_binary_digits(rows):
    for percent in range(1, 100):
        assert coverage_rank(rows, percent / 100) == math.ceil((rows + 1) * Fraction(percent, 100))


def test_ranks_of_many_rows_are_as_exact():
    for rows, coverage, confidence in (
        (50_000, 0.9, 0.999999),
        (50_000, 0.999, 0.95),
        (7_000, 0.5, 0.9),
    ):
        rank = confident_rank(rows, coverage, confidence)
        retained = stats.beta.sf(coverage, [rank - 1, rank], [rows + 2 - rank, rows + 1 - rank])
        assert retained[0] < confidence <= retained[1]


@given(st.integers(1, 500), RATES)
def test_the_largest_coverage_is_kept_and_a_larger_one_is_not(rows, confidence):
    largest = largest_coverage(rows, confidence)
    assert confident_rank(rows, largest * (1 - 1e-9), confidence) <= rows
    assert confident_rank(rows, largest + 1e-6 * (1 - largest), confidence) > rows


@pytest.mark.parametrize(("rows", "fpr"), [(99, 0.1), (400, 0.05)])
def test_the_flag_s_rate_given_the_calibration_is_kept_with_the_confidence(rows, fpr):
    """300 calibrations by uniform statistics, under which the rate is 1 - the smallest flagged."""
    generator, confidence = np.random.default_rng(rows), 0.9
    broken = broken_on_average = 0
    statistic = np.linspace(0, 1, 20_001)
    for _ in range(300):
        table = tables(np.sort(generator.uniform(size=rows)))
        p_values = table.p_values(statistic, {}).p_value
        broken += (p_values <= table.flag_levels(fpr, confidence)).mean() > fpr
        broken_on_average += (p_values <= table.flag_levels(fpr)).mean() > fpr
    largest = stats.binom(300, 1 - confidence).ppf(1 - 1e-6)
    assert broken <= largest < broken_on_average


def test_coverage_is_kept_with_the_confidence_asked_for():
    generator = np.random.default_rng(7)
    rows, coverage, choices = 60, 0.8, 4000
    nonconformity = np.sort(generator.exponential(size=(choices, rows)), axis=1)
    for confidence in (0.5, 0.9, 0.99):
        retained = np.array(
            [-np.expm1(-quantile(item, coverage, confidence)) for item in nonconformity]
        )
        count = int(np.sum(retained >= coverage))
        rank = confident_rank(rows, coverage, confidence)
        law = stats.binom(choices, stats.beta.sf(coverage, rank, rows + 1 - rank))
        assert law.mean() >= confidence * choices
        assert law.cdf(count) > 1e-7
        assert law.sf(count - 1) > 1e-7
        assert retained.mean() >= coverage
    on_average = np.array([-np.expm1(-quantile(item, coverage)) for item in nonconformity])
    assert np.mean(on_average >= coverage) < 0.7


@pytest.mark.parametrize("ranking", [99, 160])
@pytest.mark.parametrize("coverage", [0.9, 0.95])
def test_sets_hold_the_label_as_often_as_the_beta_binomial_says(ranking, coverage):
    """Where the coverage is above the accuracy, here about .6: see
    `test_sets_of_a_coverage_below_the_accuracy`."""
    generator = np.random.default_rng([ranking, int(100 * coverage)])
    covered = []
    for _ in range(SPLITS):
        nonconformity = np.sort(class_nonconformity(*labelled(generator, ranking)))
        probs, labels = labelled(generator, NEW)
        inside = tables(nonconformity).prediction_sets(mass_above(probs), coverage)
        assert np.all(inside[np.arange(NEW), probs.argmax(axis=1)])
        covered.append(inside[np.arange(NEW), labels].sum())
    assert is_beta_binomial(covered, ranking, coverage, generator)


def test_sets_of_a_coverage_below_the_accuracy_are_the_labels_alone():
    generator = np.random.default_rng(0)
    probs, labels = labelled(generator, 999)
    nonconformity = np.sort(class_nonconformity(probs, labels))
    accuracy = np.mean(probs.argmax(axis=1) == labels)
    probs, _ = labelled(generator, NEW)
    inside = tables(nonconformity).prediction_sets(mass_above(probs), accuracy - 0.01)
    assert inside.sum() == NEW
    assert np.all(inside[np.arange(NEW), probs.argmax(axis=1)])


def test_a_row_s_set_does_not_depend_on_the_rows_beside_it():
    generator = np.random.default_rng(1)
    nonconformity = np.sort(class_nonconformity(*labelled(generator, 99)))
    probs, _ = labelled(generator, NEW)
    together = tables(nonconformity).prediction_sets(mass_above(probs), 0.9)
    assert np.array_equal(
        np.concatenate(
            [tables(nonconformity).prediction_sets(mass_above(row[None]), 0.9) for row in probs]
        ),
        together,
    )


@pytest.mark.parametrize(("ranking", "coverage"), [(99, 0.5), (99, 0.95), (39, 0.9), (40, 0.9)])
def test_intervals_hold_the_target_as_often_as_the_beta_binomial_says(ranking, coverage):
    generator = np.random.default_rng([ranking, int(100 * coverage)])
    covered = []
    for _ in range(SPLITS):
        y, mean, std = targets(generator, ranking)
        nonconformity = np.sort(target_nonconformity(mean, std, y))
        y, mean, std = targets(generator, NEW)
        bounds = tables(nonconformity).intervals(mean, std, coverage)
        covered.append(np.sum((bounds[:, 0] <= y) & (y <= bounds[:, 1])))
    assert is_beta_binomial(covered, ranking, coverage, generator)


def test_intervals_by_hand():
    mean, std = np.array([10.0, -1.0]), np.array([1.0, 0.25])
    # ceil(5 x .6) = 3rd smallest of |y - mean| / std: 2.
    nonconformity = np.array([0.5, 1.0, 2.0, 4.0])
    assert tables(nonconformity).intervals(mean, std, 0.6).tolist() == [[8.0, 12.0], [-1.5, -0.5]]
    assert tables(nonconformity).intervals(mean, std, 0.8).tolist() == [[6.0, 14.0], [-2.0, 0.0]]
    assert tables(nonconformity).intervals(mean[:1], std[:1], 0.81).tolist() == [[-np.inf, np.inf]]


def is_beta_binomial(counts, ranking, coverage, generator):
    position = math.ceil((ranking + 1) * coverage)
    law = stats.betabinom(NEW, position, ranking + 1 - position)
    counts = np.array(counts)
    uniform = law.cdf(counts - 1) + generator.uniform(size=len(counts)) * law.pmf(counts)
    return stats.kstest(uniform, "uniform").pvalue > 1e-7


def labelled(generator, rows):
    probs = generator.dirichlet(np.full(5, 0.6), rows)
    true = 0.8 * probs + 0.04
    labels = (true.cumsum(axis=1) < generator.uniform(size=(rows, 1))).sum(axis=1).clip(max=4)
    return probs, labels


def targets(generator, rows):
    std = np.exp(generator.normal(size=rows))
    mean = generator.normal(size=rows)
    return (
        mean + 0.5 + std * generator.standard_t(3, rows),
        mean,
        std * generator.uniform(0.5, 2.0, rows),
    )
