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
NEW_ROWS = 100


def tables(nonconformity):
    return RankTables(1, nonconformity, {}, nonconformity, None)


def test_mass_above_matches_hand_calculation():
    probs = np.array([[0.2, 0.7, 0.1], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]])
    expected = [[0.7, 0.0, 0.9], [0.5, 0.0, 0.75], [1.0, 1.0, 0.0]]
    np.testing.assert_allclose(mass_above(probs), expected, atol=1e-15)


@settings(max_examples=100)
@given(
    weights=st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=5)
)
def test_mass_above_is_sum_of_more_probable_classes(weights):
    probs = np.array(weights, dtype=np.float64) + 1e-3
    probs /= probs.sum(axis=1, keepdims=True)
    for row, actual in zip(probs, mass_above(probs), strict=True):
        for c, p in enumerate(row):
            above = [q for j, q in enumerate(row) if q > p or (q == p and j < c)]
            assert actual[c] == pytest.approx(sum(above), abs=1e-12)


def test_sets_and_quantiles_match_hand_calculation():
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
def test_confident_rank_is_smallest_with_required_confidence(rows, coverage, confidence):
    ranks = np.arange(1, rows + 1)
    confidences = stats.beta.sf(coverage, ranks, rows + 1 - ranks)
    valid_ranks = ranks[confidences >= confidence * (1 - 1e-9)]
    expected = (
        max(int(valid_ranks[0]), coverage_rank(rows, coverage)) if len(valid_ranks) else rows + 1
    )
    assert confident_rank(rows, coverage, confidence) == expected


@pytest.mark.parametrize("rows", [9, 19, 99, 100, 999, 1234])
def test_coverage_rank_treats_coverage_as_exact_decimal(rows):
    for percent in range(1, 100):
        assert coverage_rank(rows, percent / 100) == math.ceil((rows + 1) * Fraction(percent, 100))


def test_ranks_stay_exact_for_many_rows():
    for rows, coverage, confidence in (
        (50_000, 0.9, 0.999999),
        (50_000, 0.999, 0.95),
        (7_000, 0.5, 0.9),
    ):
        rank = confident_rank(rows, coverage, confidence)
        confidences = stats.beta.sf(coverage, [rank - 1, rank], [rows + 2 - rank, rows + 1 - rank])
        assert confidences[0] < confidence <= confidences[1]


@given(st.integers(1, 500), RATES)
def test_largest_coverage_is_the_attainable_maximum(rows, confidence):
    largest = largest_coverage(rows, confidence)
    assert confident_rank(rows, largest * (1 - 1e-9), confidence) <= rows
    assert confident_rank(rows, largest + 1e-6 * (1 - largest), confidence) > rows


@pytest.mark.parametrize(("rows", "fpr"), [(99, 0.1), (400, 0.05)])
def test_flag_rate_given_calibration_is_valid_with_confidence(rows, fpr):
    """With uniform statistics, the rate is 1 minus the smallest flagged value."""
    generator, confidence = np.random.default_rng(rows), 0.9
    violations = marginal_violations = 0
    statistic = np.linspace(0, 1, 20_001)
    for _ in range(300):
        table = tables(np.sort(generator.uniform(size=rows)))
        p_values = table.p_values(statistic, {}).p_value
        violations += (p_values <= table.flag_levels(fpr, confidence)).mean() > fpr
        marginal_violations += (p_values <= table.flag_levels(fpr)).mean() > fpr
    max_violations = stats.binom(300, 1 - confidence).ppf(1 - 1e-6)
    assert violations <= max_violations < marginal_violations


def test_coverage_is_reached_with_requested_confidence():
    generator = np.random.default_rng(7)
    rows, coverage, calibrations = 60, 0.8, 4000
    nonconformity = np.sort(generator.exponential(size=(calibrations, rows)), axis=1)
    for confidence in (0.5, 0.9, 0.99):
        coverages = np.array(
            [-np.expm1(-quantile(scores, coverage, confidence)) for scores in nonconformity]
        )
        count = int(np.sum(coverages >= coverage))
        rank = confident_rank(rows, coverage, confidence)
        law = stats.binom(calibrations, stats.beta.sf(coverage, rank, rows + 1 - rank))
        assert law.mean() >= confidence * calibrations
        assert law.cdf(count) > 1e-7
        assert law.sf(count - 1) > 1e-7
        assert coverages.mean() >= coverage
    marginal_coverages = np.array(
        [-np.expm1(-quantile(scores, coverage)) for scores in nonconformity]
    )
    assert np.mean(marginal_coverages >= coverage) < 0.7


@pytest.mark.parametrize("ranking", [99, 160])
@pytest.mark.parametrize("coverage", [0.9, 0.95])
def test_set_coverage_is_beta_binomial(ranking, coverage):
    """Coverage must exceed the accuracy, which is about .6 here."""
    generator = np.random.default_rng([ranking, int(100 * coverage)])
    counts = []
    for _ in range(SPLITS):
        nonconformity = np.sort(class_nonconformity(*sample_labels(generator, ranking)))
        probs, labels = sample_labels(generator, NEW_ROWS)
        sets = tables(nonconformity).prediction_sets(mass_above(probs), coverage)
        assert np.all(sets[np.arange(NEW_ROWS), probs.argmax(axis=1)])
        counts.append(sets[np.arange(NEW_ROWS), labels].sum())
    assert is_beta_binomial(counts, ranking, coverage, generator)


def test_sets_below_accuracy_contain_only_the_predicted_label():
    generator = np.random.default_rng(0)
    probs, labels = sample_labels(generator, 999)
    nonconformity = np.sort(class_nonconformity(probs, labels))
    accuracy = np.mean(probs.argmax(axis=1) == labels)
    probs, _ = sample_labels(generator, NEW_ROWS)
    sets = tables(nonconformity).prediction_sets(mass_above(probs), accuracy - 0.01)
    assert sets.sum() == NEW_ROWS
    assert np.all(sets[np.arange(NEW_ROWS), probs.argmax(axis=1)])


def test_set_of_a_row_does_not_depend_on_other_rows():
    generator = np.random.default_rng(1)
    nonconformity = np.sort(class_nonconformity(*sample_labels(generator, 99)))
    probs, _ = sample_labels(generator, NEW_ROWS)
    together = tables(nonconformity).prediction_sets(mass_above(probs), 0.9)
    assert np.array_equal(
        np.concatenate(
            [tables(nonconformity).prediction_sets(mass_above(row[None]), 0.9) for row in probs]
        ),
        together,
    )


@pytest.mark.parametrize(("ranking", "coverage"), [(99, 0.5), (99, 0.95), (39, 0.9), (40, 0.9)])
def test_interval_coverage_is_beta_binomial(ranking, coverage):
    generator = np.random.default_rng([ranking, int(100 * coverage)])
    counts = []
    for _ in range(SPLITS):
        y, mean, std = sample_targets(generator, ranking)
        nonconformity = np.sort(target_nonconformity(mean, std, y))
        y, mean, std = sample_targets(generator, NEW_ROWS)
        bounds = tables(nonconformity).intervals(mean, std, coverage)
        counts.append(np.sum((bounds[:, 0] <= y) & (y <= bounds[:, 1])))
    assert is_beta_binomial(counts, ranking, coverage, generator)


def test_intervals_match_hand_calculation():
    mean, std = np.array([10.0, -1.0]), np.array([1.0, 0.25])
    # ceil(5 x .6) = 3rd smallest of |y - mean| / std: 2.
    nonconformity = np.array([0.5, 1.0, 2.0, 4.0])
    assert tables(nonconformity).intervals(mean, std, 0.6).tolist() == [[8.0, 12.0], [-1.5, -0.5]]
    assert tables(nonconformity).intervals(mean, std, 0.8).tolist() == [[6.0, 14.0], [-2.0, 0.0]]
    assert tables(nonconformity).intervals(mean[:1], std[:1], 0.81).tolist() == [[-np.inf, np.inf]]


def is_beta_binomial(counts, ranking, coverage, generator):
    position = math.ceil((ranking + 1) * coverage)
    law = stats.betabinom(NEW_ROWS, position, ranking + 1 - position)
    counts = np.array(counts)
    uniform = law.cdf(counts - 1) + generator.uniform(size=len(counts)) * law.pmf(counts)
    return stats.kstest(uniform, "uniform").pvalue > 1e-7


def sample_labels(generator, rows):
    probs = generator.dirichlet(np.full(5, 0.6), rows)
    true = 0.8 * probs + 0.04
    labels = (true.cumsum(axis=1) < generator.uniform(size=(rows, 1))).sum(axis=1).clip(max=4)
    return probs, labels


def sample_targets(generator, rows):
    std = np.exp(generator.normal(size=rows))
    mean = generator.normal(size=rows)
    return (
        mean + 0.5 + std * generator.standard_t(3, rows),
        mean,
        std * generator.uniform(0.5, 2.0, rows),
    )
