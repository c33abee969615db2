import math

import numpy as np
import pytest
from scipy import integrate, stats

from model_store.scores.regression import (
    MIXTURE_ERROR_NAMES,
    log_density,
    mixture_scores,
    mixture_sums,
)
from model_store.scores.sums import GROUPS

ARRAYS = MIXTURE_ERROR_NAMES


# Hand-computed values


def test_scores_of_two_contradictory_draws():
    scores = score(mean=[[1.0], [5.0]], std=[[1.0], [3.0]])
    assert (scores.num_draws == 2).all()
    assert scores.mean == 3.0
    assert scores.aleatoric_std == pytest.approx(math.sqrt(5.0), rel=1e-15)
    assert scores.epistemic_std == pytest.approx(math.sqrt(8.0), rel=1e-15)
    assert scores.std == pytest.approx(math.sqrt(13.0), rel=1e-15)


def test_single_draw_has_no_epistemic_std_or_standard_error():
    scores = score(mean=[[-1.5, 1e9]], std=[[0.25, 2.0]])
    assert scores.mean.tolist() == [-1.5, 1e9]
    np.testing.assert_allclose(scores.std, [0.25, 2.0], rtol=1e-15)
    assert scores.std.tolist() == scores.aleatoric_std.tolist()
    assert scores.epistemic_std.tolist() == [0.0, 0.0]
    assert scores.standard_error is None


@pytest.mark.parametrize("num_draws", [2, 7, 100, 250])
def test_equal_draws_have_zero_epistemic_std_and_standard_error(num_draws):
    scores = score(np.full((num_draws, 1), 0.1), np.full((num_draws, 1), 0.7))
    assert scores.mean == 0.1
    assert scores.epistemic_std == 0.0
    np.testing.assert_allclose(scores.std, 0.7, rtol=1e-14)
    assert all(error < 1e-14 for error in scores.standard_error.values())


# Mixture


@pytest.mark.parametrize("num_draws", [2, 7, GROUPS, GROUPS + 1, 3 * GROUPS, 777])
def test_scores_match_moments_of_draws(num_draws):
    mean, std = draws(num_draws, 6)
    scores = score(mean, std)
    aleatoric, epistemic = np.mean(std**2, axis=0), mean.var(axis=0, ddof=1)
    np.testing.assert_allclose(scores.mean, mean.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(scores.std, np.sqrt(aleatoric + epistemic), rtol=1e-10)
    np.testing.assert_allclose(scores.aleatoric_std, np.sqrt(aleatoric), rtol=1e-12)
    np.testing.assert_allclose(scores.epistemic_std, np.sqrt(epistemic), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("num_draws", [2, 5, 10])
def test_variances_of_few_draws_are_unbiased(num_draws):
    generator = np.random.default_rng(num_draws)
    scores = score(generator.normal(0.0, 2.0, (num_draws, 20_000)), np.ones((num_draws, 20_000)))
    error = 4.0 * 4.0 * math.sqrt(2.0 / (num_draws - 1) / 20_000)
    assert np.mean(scores.epistemic_std**2) == pytest.approx(4.0, abs=error)
    assert np.mean(scores.std**2) == pytest.approx(5.0, abs=error)


def test_log_density_integrates_to_the_mixture_moments():
    mean, std = draws(5, 1)
    variance = np.mean(std**2, axis=0) + mean.var(axis=0)

    def moment(power):
        return integrate.quad(
            lambda y: y**power * math.exp(log_density(outputs(mean, std), np.array([y]))[0]),
            -40,
            40,
            limit=400,
        )[0]

    assert moment(0) == pytest.approx(1.0, rel=1e-8)
    assert moment(1) == pytest.approx(mean.mean(), rel=1e-7)
    assert moment(2) - moment(1) ** 2 == pytest.approx(variance[0], rel=1e-6)


def test_log_density_is_finite_far_from_all_draws():
    mean, std = draws(3, 2)
    actual = log_density(outputs(mean, std), np.array([1e6, -1e9]))
    expected = stats.norm.logpdf([1e6, -1e9], mean, std)
    np.testing.assert_allclose(
        actual, np.logaddexp.reduce(expected, axis=0) - math.log(3.0), rtol=1e-12
    )


def test_epistemic_std_stays_precise_for_means_far_from_zero():
    mean, std = draws(50, 4)
    base, shifted = score(mean, std), score(mean + 2.0**30, std)
    np.testing.assert_allclose(shifted.epistemic_std, base.epistemic_std, rtol=1e-6)
    np.testing.assert_allclose(
        shifted.standard_error["epistemic_std"], base.standard_error["epistemic_std"], rtol=1e-5
    )


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_scores_scale_with_target_units(factor):
    mean, std = draws(20, 3)
    base, scaled = score(mean, std), score(factor * mean, factor * std)
    for name in ARRAYS:
        np.testing.assert_allclose(getattr(scaled, name), factor * getattr(base, name), rtol=1e-9)
        np.testing.assert_allclose(
            scaled.standard_error[name], factor * base.standard_error[name], rtol=1e-9
        )


# Helpers


def draws(num_draws, rows, seed=0):
    """Return means and standard deviations, each of shape (num_draws, rows)."""
    generator = np.random.default_rng([num_draws, rows, seed])
    return generator.normal(1.0, 2.0, (num_draws, rows)), np.exp(
        0.5 * generator.normal(size=(num_draws, rows))
    )


def outputs(mean, std):
    return np.stack([np.asarray(mean), 2.0 * np.log(std)], axis=-1)


def score(mean, std):
    return mixture_scores(mixture_sums(outputs(mean, std)))
