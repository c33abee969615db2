import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_store.scores.classification import predictive_scores, predictive_sums
from model_store.scores.records import concatenate, take
from model_store.scores.sums import GROUPS

LN2 = math.log(2.0)
ARRAYS = ("probabilities", "entropy", "expected_entropy", "bald", "mean_std", "variation_ratio")


# Subsets of rows


def test_take_and_concatenate_preserve_all_scores():
    log_probs = np.log(np.random.default_rng(5).dirichlet([1.0, 2.0, 3.0], size=(7, 9)))
    for draws in (1, 2, 7):
        full = predictive_scores(predictive_sums(log_probs[:draws]))
        singles = [
            predictive_scores(predictive_sums(log_probs[:draws, n : n + 1])) for n in range(9)
        ]
        order = np.array([3, 8, 0])
        for subset, rows in ((take(full, order), order), (take(full, slice(2, 5)), [2, 3, 4])):
            assert_same(subset, concatenate([singles[n] for n in rows]))
        assert_same(concatenate(singles), full)
        assert_same(concatenate(singles[:1]), singles[0])


def assert_same(actual, expected):
    for name in ("num_draws", "label", *ARRAYS):
        assert getattr(actual, name).tolist() == getattr(expected, name).tolist(), name
    if expected.standard_error is None:
        assert actual.standard_error is None
    else:
        assert actual.standard_error.keys() == expected.standard_error.keys()
        assert all(
            actual.standard_error[name].tolist() == e.tolist()
            for name, e in expected.standard_error.items()
        )


def test_bald_of_single_draw_is_exactly_zero():
    probs = np.random.default_rng(6).dirichlet(np.full(10, 0.3), size=(1, 1000))
    assert predictive_scores(predictive_sums(np.log(probs))).bald.tolist() == [0.0] * 1000


# Hand-computed values


def test_scores_of_two_certain_contradictory_draws():
    scores = score([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert (scores.num_draws == 2).all()
    assert scores.probabilities.tolist() == [[0.5, 0.5]]
    assert scores.entropy == pytest.approx(LN2, abs=1e-15)
    assert scores.expected_entropy == 0.0
    assert scores.bald == pytest.approx(LN2, abs=1e-15)
    assert scores.mean_std == 0.5
    assert scores.variation_ratio == 0.5


def test_scores_of_two_draws_over_three_classes():
    scores = score([[[0.5, 0.5, 0.0]], [[1.0, 0.0, 0.0]]])
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert scores.probabilities.tolist() == [[0.75, 0.25, 0.0]]
    assert scores.entropy == pytest.approx(entropy, rel=1e-14)
    assert scores.expected_entropy == pytest.approx(LN2 / 2.0, rel=1e-14)
    assert scores.bald == pytest.approx(entropy - LN2 / 2.0, rel=1e-14)
    assert scores.mean_std == pytest.approx(0.5 / 3.0, rel=1e-14)
    assert scores.variation_ratio == 0.25


def test_certain_row_has_zero_uncertainty_and_standard_errors():
    scores = score(np.tile([1.0, 0.0, 0.0], (7, 1, 1)))
    assert [str(getattr(scores, name)[0]) for name in ARRAYS[1:]] == ["0.0"] * 5  # not "-0.0"
    assert all(error == 0.0 for error in scores.standard_error.values())


def test_uniform_row_has_maximum_entropy_and_variation_ratio():
    scores = score(np.full((5, 1, 4), 0.25))
    assert scores.entropy == pytest.approx(math.log(4.0), rel=1e-14)
    assert scores.variation_ratio == 0.75
    assert scores.bald == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("num_draws", [1, 2, 99, 250])
def test_bald_and_mean_std_are_zero_when_draws_agree(num_draws):
    row = np.random.default_rng(0).dirichlet(np.full(10, 0.3), 5)
    scores = score(np.tile(row, (num_draws, 1, 1)))
    np.testing.assert_allclose(scores.bald, 0.0, atol=1e-14)
    np.testing.assert_allclose(scores.mean_std, 0.0, atol=1e-14)
    assert np.all(scores.bald >= 0.0)


# Brute force and identities


@pytest.mark.parametrize("num_draws", [1, 2, 7, GROUPS, GROUPS + 1, 3 * GROUPS, 777])
@pytest.mark.parametrize("concentration", [0.02, 0.3, 5.0])
def test_scores_match_their_definitions(num_draws, concentration):
    probs = dirichlet(num_draws, 6, 10, concentration)
    scores, expected = score(probs), brute_force(probs)
    for name in ARRAYS:
        np.testing.assert_allclose(
            getattr(scores, name), expected[name], rtol=1e-11, atol=1e-14, err_msg=name
        )


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(2, 6)),
    concentration=st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 2**32),
)
def test_scores_stay_in_range_and_bald_is_the_mean_divergence(shape, concentration, seed):
    probs = dirichlet(*shape, concentration, seed)
    scores = score(probs)
    classes = shape[2]
    tolerance = 1e-12
    for name, maximum in (
        ("entropy", math.log(classes)),
        ("expected_entropy", math.log(classes)),
        ("bald", math.log(classes)),
        ("mean_std", 0.5),
        ("variation_ratio", 1.0 - 1.0 / classes),
    ):
        value = getattr(scores, name)
        assert np.all((value >= -tolerance) & (value <= maximum + tolerance)), name
    ratio = np.divide(probs, probs.mean(axis=0), out=np.ones_like(probs), where=probs > 0)
    divergence = np.mean(np.sum(probs * np.log(ratio), axis=2), axis=0)
    np.testing.assert_allclose(scores.bald, divergence, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(scores.entropy, scores.expected_entropy + scores.bald, atol=1e-12)


def test_float32_log_probabilities_match_their_float64_scores():
    log_probs = np.log(dirichlet(20, 3, 10, 0.3)).astype(np.float32)
    single = predictive_scores(predictive_sums(log_probs))
    double = predictive_scores(predictive_sums(log_probs.astype(np.float64)))
    assert_same(single, double)


# Groups


def test_bald_is_accurate_for_many_draws_in_few_groups():
    probs = dirichlet(5000, 1, 3, 1.0)
    sums = predictive_sums(logs(probs), groups=2)
    np.testing.assert_allclose(predictive_scores(sums).bald, brute_force(probs)["bald"], rtol=1e-9)


# Cancellation


@pytest.mark.parametrize("num_draws", [4, 60, 230])
@pytest.mark.parametrize("scale", [1e-3, 1e-6, 1e-9])
def test_nearly_certain_rows_keep_full_precision(num_draws, scale):
    uncertainty = scale * np.random.default_rng(1).uniform(0.5, 1.5, num_draws)
    log_probs = np.stack([np.log1p(-uncertainty), np.log(uncertainty)], axis=1)[:, None]
    scores = predictive_scores(predictive_sums(log_probs))
    exact_mean = sum(map(Fraction, uncertainty)) / num_draws
    exact_std = math.sqrt(sum((Fraction(d) - exact_mean) ** 2 for d in uncertainty) / num_draws)
    mean = float(exact_mean)
    entropy = -mean * math.log(mean) - (1.0 - mean) * math.log1p(-mean)
    divergence = np.mean(
        uncertainty * np.log(uncertainty / mean)
        + (1.0 - uncertainty) * (np.log1p(-uncertainty) - math.log1p(-mean))
    )
    # float64 stores 1 - uncertainty with an absolute error of up to 1.1e-16.
    np.testing.assert_allclose(scores.mean_std, exact_std, rtol=1e-9, atol=3e-16)
    np.testing.assert_allclose(scores.variation_ratio, mean, rtol=1e-9, atol=3e-16)
    np.testing.assert_allclose(scores.entropy, entropy, rtol=1e-9, atol=3e-16)
    np.testing.assert_allclose(scores.bald, divergence, rtol=1e-9, atol=1e-15)


# Helpers


def dirichlet(draws, rows, classes, concentration, seed=0):
    return np.random.default_rng(seed).dirichlet(np.full(classes, concentration), (draws, rows))


def logs(probs):
    return np.log(probs, out=np.full(np.shape(probs), -np.inf), where=np.asarray(probs) > 0)


def score(probs):
    return predictive_scores(predictive_sums(logs(np.asarray(probs, dtype=np.float64))))


def brute_force(probs):
    mean = probs.mean(axis=0)
    entropy, expected_entropy = shannon(mean), shannon(probs).mean(axis=0)
    return {
        "probabilities": mean,
        "entropy": entropy,
        "expected_entropy": expected_entropy,
        "bald": entropy - expected_entropy,
        "mean_std": probs.std(axis=0).mean(axis=1),
        "variation_ratio": 1.0 - mean.max(axis=1),
    }


def shannon(probs):
    return -np.sum(probs * np.log(np.where(probs > 0, probs, 1.0)), axis=-1)
