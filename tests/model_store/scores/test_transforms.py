import numpy as np
import pytest
from scipy import integrate, stats

from model_store.scores.records import concatenate, take
from model_store.scores.regression import Target, log_density
from model_store.scores.transforms import (
    LogTransform,
    RankTransform,
    log_slope,
    mixture_median,
    normal_cdf,
    target_moments,
    to_fitted,
    to_target,
)
from training.evaluation.metrics import TargetMeasures, distribution_function

LOG = LogTransform(offset=0.0)
SHIFTED = LogTransform(offset=2.0)
RANK = RankTransform(values=(-1.0, 0.0, 5.0, 100.0), scores=(-2.0, 0.0, 1.0, 2.5))
COUNTS = RankTransform(values=(0.0, 1.0, 7.0), scores=(-1.0, 0.5, 2.0), least=0.0)
ALL = [LOG, SHIFTED, RANK, COUNTS]
Y = np.array([0.01, 0.5, 1.0, 4.0, 80.0, 3000.0])


def outputs(mean, std):
    return np.stack([np.asarray(mean), 2.0 * np.log(std)], axis=-1).astype(np.float32)


def draws(rows=4, num_draws=30, seed=0):
    generator = np.random.default_rng(seed)
    return outputs(
        generator.normal(size=(num_draws, rows)), generator.uniform(0.1, 0.9, (num_draws, rows))
    )


@pytest.mark.parametrize("transform", ALL, ids=lambda transform: transform.kind)
def test_a_target_comes_back_and_its_slope_is_the_derivative(transform):
    np.testing.assert_allclose(to_target(transform, to_fitted(transform, Y)), Y, rtol=1e-12)
    assert (np.diff(to_fitted(transform, Y)) > 0).all()
    step = 1e-6 * Y
    slope = (to_fitted(transform, Y + step) - to_fitted(transform, Y - step)) / (2 * step)
    inside = ~np.isin(Y, getattr(transform, "values", ()))
    np.testing.assert_allclose(np.exp(log_slope(transform, Y))[inside], slope[inside], rtol=1e-6)


def test_the_ends_stay_what_they_are_and_nothing_is_less_than_the_least():
    for transform in ALL:
        assert to_target(transform, np.array([-np.inf, np.inf])).tolist() == [-np.inf, np.inf]
    assert to_target(SHIFTED, np.array([-3.0])) == 0.0
    assert to_target(COUNTS, np.array([-5.0])) == 0.0
    assert to_target(RANK, np.array([-5.0])) < -1.0
    assert to_fitted(LOG, np.array([0.0, -1.0])).tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize("std", [1e-4, 0.3, 1.0, 1.6])
def test_moments_of_a_log_normal_target_are_scipys(std):
    mean, variance = target_moments(LOG, np.array([0.7]), np.array([std**2]))
    reference = stats.lognorm(std, scale=np.exp(0.7))
    np.testing.assert_allclose(
        [mean[0], variance[0]], [reference.mean(), reference.var()], rtol=1e-5
    )


SCORES = np.linspace(-3.3, 3.3, 41)
MANY = RankTransform(
    values=tuple(stats.t.ppf(stats.norm.cdf(SCORES), 2).tolist()), scores=tuple(SCORES.tolist())
)


@pytest.mark.parametrize(
    "transform", [SHIFTED, MANY, COUNTS], ids=["shifted", "heavy tails", "few knots"]
)
def test_moments_are_integrals_over_the_transformed_target(transform):
    z = np.linspace(-7.0, 7.0, 100_001)
    y, density = to_target(transform, z), stats.norm.pdf(z, 0.4, 0.8)
    mean, variance = target_moments(transform, np.array([0.4]), np.array([0.64]))
    expected = integrate.trapezoid(y * density, z)
    assert mean[0] == pytest.approx(expected, rel=0.02)
    assert variance[0] == pytest.approx(
        integrate.trapezoid((y - expected) ** 2 * density, z), rel=0.03
    )


def test_the_density_is_that_of_the_target_and_integrates_to_1():
    y = np.array([0.5, 3.0, 20.0])
    created = draws(rows=3, num_draws=1)
    mean, std = (
        created[0, :, 0].astype(np.float64),
        np.exp(0.5 * created[0, :, 1].astype(np.float64)),
    )
    np.testing.assert_allclose(
        log_density(created, y, LOG), stats.lognorm.logpdf(y, std, scale=np.exp(mean)), rtol=1e-9
    )
    total = integrate.quad(
        lambda t: np.exp(log_density(created[:, :1], np.array([t]), RANK))[0],
        -60,
        400,
        limit=900,
        points=[-1, 0, 5, 100],
    )[0]
    assert total == pytest.approx(1.0, abs=1e-5)


def test_what_flags_stops_and_covers_is_of_the_transformed_target_and_what_is_reported_of_the_target():
    created = draws()
    plain, target = Target(), Target(LOG)
    scores, model = target.scores(target.sums(created)), plain.scores(plain.sums(created))
    for name, values in model.by_name().items():
        np.testing.assert_array_equal(scores.by_name()[name], values)
    mean, std = np.moveaxis(target.samples(created), -1, 0)
    reported = scores.in_units
    np.testing.assert_allclose(reported.mean, mean.mean(0), rtol=1e-12)
    np.testing.assert_allclose(reported.aleatoric_std, np.sqrt((std**2).mean(0)), rtol=1e-12)
    np.testing.assert_allclose(reported.epistemic_std, mean.std(0, ddof=1), rtol=1e-12)
    np.testing.assert_allclose(
        reported.std**2, reported.aleatoric_std**2 + reported.epistemic_std**2, rtol=1e-12
    )
    np.testing.assert_array_equal(target.acquisition(scores, "variance"), reported.std**2)
    below = distribution_function(created.astype(np.float64), np.log(reported.median))
    np.testing.assert_allclose(below, 0.5, atol=1e-5)


def test_parts_of_draws_merge_and_a_row_alone_has_the_same_bits():
    created, target = draws(num_draws=150), Target(RANK)
    full = target.scores(target.sums(created))
    parts = target.sums(created[:40]).merge(target.sums(created[40:], 40))
    np.testing.assert_allclose(target.scores(parts).in_units.std, full.in_units.std, rtol=1e-10)
    together = concatenate([full, target.scores(target.sums(draws(num_draws=150, seed=5)))])
    for row in range(2):
        alone = target.scores(target.sums(created[:, row : row + 1]))
        for name in ("mean", "median", "std", "aleatoric_std", "epistemic_std"):
            assert getattr(alone.in_units, name)[0] == getattr(full.in_units, name)[row], name
            assert getattr(take(together, slice(row, row + 1)).in_units, name) == getattr(
                alone.in_units, name
            )


def test_a_multiple_of_the_target_has_the_same_multiple_of_every_answer():
    for scale in (1e-12, 1e12):
        rank = RankTransform(values=tuple(scale * v for v in RANK.values), scores=RANK.scores)
        item, large = (t.scores(t.sums(draws())).in_units for t in (Target(RANK), Target(rank)))
        for name in ("mean", "median", "std", "aleatoric_std", "epistemic_std"):
            np.testing.assert_allclose(getattr(large, name), scale * getattr(item, name), rtol=1e-9)
        updated = draws() + np.float32([np.log(scale), 0.0])
        item, large = (
            Target(LOG).scores(Target(LOG).sums(created)).in_units for created in (draws(), updated)
        )
        np.testing.assert_allclose(
            large.std, scale * item.std, rtol=1e-4
        )  # of a logarithm in float32


def test_a_row_that_the_model_knows_nothing_of_has_finite_answers():
    far = outputs(np.full((3, 1), 40.0), np.full((3, 1), 2e3))
    for transform in ALL:
        reported = Target(transform).scores(Target(transform).sums(far)).in_units
        assert np.isfinite([reported.mean[0], reported.std[0], reported.median[0]]).all()


@pytest.mark.parametrize("transform", [LOG, RANK], ids=["log", "rank"])
def test_measures_of_a_target_are_their_integrals(transform):
    created, y = draws(rows=1, num_draws=3), np.array([2.0])

    def below(value):
        z = to_fitted(transform, np.array([value]))
        return distribution_function(created.astype(np.float64), z)[0]

    low = 0.0 if transform is LOG else -20.0
    size = integrate.quad(lambda t: below(t) ** 2, low, 2.0, limit=300)[0]
    size += integrate.quad(lambda t: (1 - below(t)) ** 2, 2.0, 300.0, limit=300)[0]
    measures = TargetMeasures.compute(created, y, transform)
    assert measures.crps[0] == pytest.approx(size, rel=0.01)
    assert measures.pit[0] == pytest.approx(below(2.0))


def test_the_normal_distribution_and_the_median_of_one_gaussian_are_right():
    z = np.linspace(-8.0, 8.0, 2001)
    np.testing.assert_allclose(normal_cdf(z), stats.norm.cdf(z), atol=1e-7)
    same = mixture_median(np.full((2, 5), 3.5), np.ones((2, 5)), np.full(5, 0.2))
    np.testing.assert_allclose(same, 3.5, rtol=1e-12)
