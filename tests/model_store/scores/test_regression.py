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


# By hand


def test_two_draws_that_contradict_each_other():
    scores = score(mean=[[1.0], [5.0]], std=[[1.0], [3.0]])
    assert (scores.num_draws == 2).all()
    assert scores.mean == 3.0
    assert scores.aleatoric_std == pytest.approx(math.sqrt(5.0), rel=1e-15)
    assert scores.epistemic_std == pytest.approx(math.sqrt(8.0), rel=1e-15)
    assert scores.std == pytest.approx(math.sqrt(13.0), rel=1e-15)


def test_one_draw_is_itself_and_disagrees_with_nothing():
    scores = score(mean=[[-1.5, 1e9]], std=[[0.25, 2.0]])
    assert scores.mean.tolist() == [-1.5, 1e9]
    np.testing.assert_allclose(scores.std, [0.25, 2.0], rtol=1e-15)
    assert scores.std.tolist() == scores.aleatoric_std.tolist()
    assert scores.epistemic_std.tolist() == [0.0, 0.0]
    assert scores.standard_error is None


@pytest.mark.parametrize("num_draws", [2, 7, 100, 250])
def test_equal_draws_disagree_about_nothing_and_have_no_error(num_draws):
    scores = score(np.full((num_draws, 1), 0.1), np.full((num_draws, 1), 0.7))
    assert scores.mean == 0.1
    assert scores.epistemic_std == 0.0
    np.testing.assert_allclose(scores.std, 0.7, rtol=1e-14)
    assert all(error < 1e-14 for error in scores.standard_error.values())


# The mixture itself


@pytest.mark.parametrize("num_draws", [2, 7, GROUPS, GROUPS + 1, 3 * GROUPS, 777])
def test_scores_are_the_draws_moments(num_draws):
    mean, std = draws(num_draws, 6)
    scores = score(mean, std)
    aleatoric, epistemic = np.mean(std**2, axis=0), mean.var(axis=0, ddof=1)
    np.testing.assert_allclose(scores.mean, mean.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(scores.std, np.sqrt(aleatoric + epistemic), rtol=1e-10)
    np.testing.assert_allclose(scores.aleatoric_std, np.sqrt(aleatoric), rtol=1e-12)
    np.testing.assert_allclose(scores.epistemic_std, np.sqrt(epistemic), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("num_draws", [2, 5, 10])
def test_variances_of_few_draws_are_not_too_small_on_average(num_draws):
    generator = np.random.default_rng(num_draws)
    scores = score(generator.normal(0.0, 2.0, (num_draws, 20_000)), np.ones((num_draws, 20_000)))
    error = 4.0 * 4.0 * math.sqrt(2.0 / (num_draws - 1) / 20_000)
    assert np.mean(scores.epistemic_std**2) == pytest.approx(4.0, abs=error)
    assert np.mean(scores.std**2) == pytest.approx(5.0, abs=error)


def test_the_log_density_is_that_of_a_density_with_the_scores_moments():
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


def test_the_log_density_far_from_every_draw_is_finite():
    mean, std = draws(3, 2)
    far = log_density(outputs(mean, std), np.array([1e6, -1e9]))
    expected = stats.norm.logpdf([1e6, -1e9], mean, std)
    np.testing.assert_allclose(
        far, np.logaddexp.reduce(expected, axis=0) - math.log(3.0), rtol=1e-12
    )


def test_means_far_from_zero_lose_no_digit_of_the_disagreement():
    mean, std = draws(50, 4)
    near, far = score(mean, std), score(mean + 2.0**30, std)
    np.testing.assert_allclose(far.epistemic_std, near.epistemic_std, rtol=1e-6)
    np.testing.assert_allclose(
        far.standard_error["epistemic_std"], near.standard_error["epistemic_std"], rtol=1e-5
    )


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_other_units_scale_every_score(factor):
    mean, std = draws(20, 3)
    ours, theirs = score(mean, std), score(factor * mean, factor * std)
    for name in ARRAYS:
        np.testing.assert_allclose(getattr(theirs, name), factor * getattr(ours, name), rtol=1e-9)
        np.testing.assert_allclose(
            theirs.standard_error[name], factor * ours.standard_error[name], rtol=1e-9
        )


# Helpers


def draws(num_draws, rows, seed=0):
    """Means and standard deviations of draws and rows."""
    generator = np.random.default_rng([num_draws, rows, seed])
    return generator.normal(1.0, 2.0, (num_draws, rows)), np.exp(
        0.5 * generator.normal(size=(num_draws, rows))
    )


def outputs(mean, std):
    return np.stack([np.asarray(mean), 2.0 * np.log(std)], axis=-1)


def score(mean, std):
    return mixture_scores(mixture_sums(outputs(mean, std)))
