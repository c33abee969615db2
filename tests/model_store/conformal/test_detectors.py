import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_store.conformal.detectors import (
    PRIOR_EXCESSES,
    SHRINKAGE_ROWS,
    Standard,
    Surprisal,
    Tail,
    flag_statistic,
    harmonic_shares,
)


@settings(max_examples=100)
@given(
    reference=st.lists(st.integers(-5, 5), min_size=1, max_size=30),
    scores=st.lists(st.floats(-20, 20), min_size=2, max_size=20),
)
def test_surprisal_is_monotonic_and_non_negative(reference, scores):
    values = Surprisal.fit(np.sort(np.array(reference, dtype=np.float64)))(
        np.sort(np.array(scores))
    )
    assert np.all(values >= 0.0)
    assert np.all(np.diff(values) >= -1e-12)  # interpolation rounds


@pytest.mark.parametrize("is_two_sided", [False, True])
@pytest.mark.parametrize(
    "reference", [[0.0], [3.0, 3.0, 3.0], np.linspace(0, 1, 50), np.zeros(50), -np.ones(3)]
)
def test_surprisal_increases_strictly_beyond_reference(reference, is_two_sided):
    reference = np.asarray(reference)
    surprisal = Surprisal.fit(reference, is_two_sided)
    distances = np.array([0.0, 1e-3, 1.0, 10.0, 1000.0])
    sides = [reference[-1] + distances, reference[0] - distances]
    for values in (surprisal(side) for side in sides[: 1 + is_two_sided]):
        assert np.all(np.diff(values) > 0.0)
        assert np.all(np.isfinite(values))
    assert is_two_sided or np.all(surprisal(sides[1]) <= surprisal(reference[:1]))


def test_surprisal_of_reference_scores_is_negative_log_p_value():
    reference = np.sort(np.random.default_rng(0).normal(size=40))
    expected = -np.log(np.arange(40, 0, -1) / 41.0)
    np.testing.assert_allclose(Surprisal.fit(reference)(reference), expected, rtol=1e-12)


def test_two_sided_surprisal_uses_twice_the_smaller_tail():
    reference = np.sort(np.random.default_rng(0).normal(size=40))
    smaller = np.minimum(np.arange(40, 0, -1), np.arange(1, 41)) / 41.0
    expected = -np.log(np.minimum(2 * smaller, 1.0))
    np.testing.assert_allclose(
        Surprisal.fit(reference, is_two_sided=True)(reference), expected, rtol=1e-12, atol=1e-15
    )


def test_tail_of_exponential_scores_has_exponential_slope():
    reference = np.sort(np.random.default_rng(1).exponential(2.0, 20_000))
    surprisal = Surprisal.fit(reference)
    assert surprisal.upper_tail.scale == pytest.approx(
        2.0, rel=0.15
    )  # six standard errors of the mean of 2,000 excesses
    assert surprisal.upper_tail(np.array([10.0])) == pytest.approx(
        10 / surprisal.upper_tail.scale, rel=0.01
    )


@pytest.mark.parametrize("rows", [2, 9, 20, 300])
def test_predictive_tail_is_a_valid_p_value(rows):
    """P(nats beyond the last score >= t) = e^-t, averaged over random scales."""
    rng, unit = np.random.default_rng(rows), 2.0
    rate = rng.gamma(PRIOR_EXCESSES, 1 / (PRIOR_EXCESSES * unit), (4000, 1))
    reference = np.sort(rng.exponential(1.0, (4000, rows)), axis=1) / rate
    excess = rng.exponential(1.0, (4000, 1)) / rate
    nats = np.array([Tail.fit(r, unit)(e)[0] for r, e in zip(reference, excess, strict=True)])
    for t in (0.5, 1.0, 2.0, 4.0):
        share = np.exp(-t)
        assert abs((nats >= t).mean() - share) < 6 * np.sqrt(share / 4000)


def test_two_close_reference_scores_do_not_inflate_surprisal():
    reference = np.array([*np.linspace(0, 1, 18), 1.9, 1.9 + 1e-9])
    low, high = np.array([1.95]), np.array([20.0])
    grid = np.linspace(0, 2, 20)
    assert Surprisal.fit(reference, unit=1.0)(low) < 4.0 < Surprisal.fit(grid, unit=1.0)(high)


def test_scores_are_standardised_per_label():
    generator = np.random.default_rng(2)
    labels = np.repeat([0, 1], 5000)
    score = np.exp(
        np.where(labels == 0, 1.0, 8.0)
        + np.where(labels == 0, 0.5, 2.0) * generator.normal(size=10_000)
    )
    z = Standard.fit(score, labels, 2)(score, labels)
    for label in (0, 1):
        assert abs(z[labels == label].mean()) < 0.1
        assert z[labels == label].std() == pytest.approx(1.0, abs=0.1)


def test_label_without_rows_uses_location_and_spread_of_all_rows():
    score = np.exp(np.random.default_rng(3).normal(size=100))
    standard = Standard.fit(score, np.zeros(100, dtype=int), 2)
    assert standard.centre[1] == pytest.approx(np.log(score).mean())
    assert standard.spread[1] == pytest.approx(np.log(score).std())
    share = 100 / (100 + SHRINKAGE_ROWS)
    assert standard.centre[0] == pytest.approx(np.log(score).mean())
    assert standard.spread[0] == pytest.approx(
        math.sqrt(share * np.log(score).var() + (1 - share) * np.log(score).var())
    )


def test_label_with_20_rows_is_shrunk_halfway_to_all_rows():
    log_score = np.concatenate([np.tile([2.0, 4.0], 10), np.tile([8.0, 10.0], 90)])
    standard = Standard.fit(np.exp(log_score), np.repeat([0, 1], [20, 180]), 2)
    assert standard.centre[0] == pytest.approx((3.0 + log_score.mean()) / 2)
    assert standard.spread[0] == pytest.approx(math.sqrt((1.0 + log_score.var()) / 2))


def test_equal_and_zero_scores_stay_finite():
    for score in (np.zeros(5), np.full(5, 7.0)):
        standard = Standard.fit(score, np.zeros(5, dtype=int), 1)
        assert np.all(np.isfinite(standard(np.array([0.0, 1.0, 1e30]), np.zeros(3, dtype=int))))


def test_combined_statistic_is_negative_log_harmonic_mean_p_value():
    p_values = np.random.default_rng(4).uniform(1e-6, 1.0, (3, 50))
    harmonic_mean = 3 / (1 / p_values).sum(axis=0)
    surprisals = dict(zip("abc", -np.log(p_values), strict=True))
    statistic = flag_statistic(surprisals, ("a", "b", "c"))
    np.testing.assert_allclose(statistic, -np.log(harmonic_mean), rtol=1e-12, atol=1e-12)


def test_harmonic_shares_split_mean_inverse_p_value():
    surprisals = {
        name: np.array(values)
        for name, values in {"a": [0.0, 900.0], "b": [math.log(3), 0.0]}.items()
    }
    shares = harmonic_shares(surprisals)
    assert shares["a"] == pytest.approx([0.25, 1.0])
    assert shares["a"] + shares["b"] == pytest.approx([1.0, 1.0])
    means = np.exp(flag_statistic(surprisals, ("a", "b"))[0])
    assert [shares[name][0] * 2 * means for name in surprisals] == pytest.approx(
        [1.0, 3.0]
    )  # 1 / p per detector


def test_only_two_sided_detector_reports_low_scores():
    reference = np.linspace(0.0, 1.0, 11)
    scores = np.array([-3.0, 0.4, 0.6, 3.0])
    assert Surprisal.fit(reference, is_two_sided=True).is_low(scores).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert not Surprisal.fit(reference).is_low(scores).any()
