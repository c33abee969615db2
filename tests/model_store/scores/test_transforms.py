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
TRANSFORMS = [LOG, SHIFTED, RANK, COUNTS]
Y = np.array([0.01, 0.5, 1.0, 4.0, 80.0, 3000.0])


def outputs(mean, std):
    return np.stack([np.asarray(mean), 2.0 * np.log(std)], axis=-1).astype(np.float32)


def draws(rows=4, num_draws=30, seed=0):
    generator = np.random.default_rng(seed)
    return outputs(
        generator.normal(size=(num_draws, rows)), generator.uniform(0.1, 0.9, (num_draws, rows))
    )


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.kind)
def test_transform_round_trips_and_log_slope_is_its_derivative(transform):
    np.testing.assert_allclose(to_target(transform, to_fitted(transform, Y)), Y, rtol=1e-12)
    assert (np.diff(to_fitted(transform, Y)) > 0).all()
    step = 1e-6 * Y
    slope = (to_fitted(transform, Y + step) - to_fitted(transform, Y - step)) / (2 * step)
    smooth = ~np.isin(Y, getattr(transform, "values", ()))
    np.testing.assert_allclose(np.exp(log_slope(transform, Y))[smooth], slope[smooth], rtol=1e-6)


def test_transforms_preserve_infinities_and_respect_the_lower_bound():
    for transform in TRANSFORMS:
        assert to_target(transform, np.array([-np.inf, np.inf])).tolist() == [-np.inf, np.inf]
    assert to_target(SHIFTED, np.array([-3.0])) == 0.0
    assert to_target(COUNTS, np.array([-5.0])) == 0.0
    assert to_target(RANK, np.array([-5.0])) < -1.0
    assert to_fitted(LOG, np.array([0.0, -1.0])).tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize("std", [1e-4, 0.3, 1.0, 1.6])
def test_log_normal_moments_match_scipy(std):
    mean, variance = target_moments(LOG, np.array([0.7]), np.array([std**2]))
    reference = stats.lognorm(std, scale=np.exp(0.7))
    np.testing.assert_allclose(
        [mean[0], variance[0]], [reference.mean(), reference.var()], rtol=1e-5
    )


SCORES = np.linspace(-3.3, 3.3, 41)
HEAVY_TAILS = RankTransform(
    values=tuple(stats.t.ppf(stats.norm.cdf(SCORES), 2).tolist()), scores=tuple(SCORES.tolist())
)


@pytest.mark.parametrize(
    "transform", [SHIFTED, HEAVY_TAILS, COUNTS], ids=["shifted", "heavy tails", "few knots"]
)
def test_moments_match_integrals_over_the_target(transform):
    z = np.linspace(-7.0, 7.0, 100_001)
    y, density = to_target(transform, z), stats.norm.pdf(z, 0.4, 0.8)
    mean, variance = target_moments(transform, np.array([0.4]), np.array([0.64]))
    expected = integrate.trapezoid(y * density, z)
    assert mean[0] == pytest.approx(expected, rel=0.02)
    assert variance[0] == pytest.approx(
        integrate.trapezoid((y - expected) ** 2 * density, z), rel=0.03
    )


def test_log_density_is_in_target_units_and_integrates_to_1():
    y = np.array([0.5, 3.0, 20.0])
    samples = draws(rows=3, num_draws=1)
    mean, std = (
        samples[0, :, 0].astype(np.float64),
        np.exp(0.5 * samples[0, :, 1].astype(np.float64)),
    )
    np.testing.assert_allclose(
        log_density(samples, y, LOG), stats.lognorm.logpdf(y, std, scale=np.exp(mean)), rtol=1e-9
    )
    total = integrate.quad(
        lambda t: np.exp(log_density(samples[:, :1], np.array([t]), RANK))[0],
        -60,
        400,
        limit=900,
        points=[-1, 0, 5, 100],
    )[0]
    assert total == pytest.approx(1.0, abs=1e-5)


def test_scores_use_the_transformed_target_and_reports_use_target_units():
    samples = draws()
    plain, target = Target(), Target(LOG)
    scores, model = target.scores(target.sums(samples)), plain.scores(plain.sums(samples))
    for name, values in model.by_name().items():
        np.testing.assert_array_equal(scores.by_name()[name], values)
    mean, std = np.moveaxis(target.samples(samples), -1, 0)
    reported = scores.in_units
    np.testing.assert_allclose(reported.mean, mean.mean(0), rtol=1e-12)
    np.testing.assert_allclose(reported.aleatoric_std, np.sqrt((std**2).mean(0)), rtol=1e-12)
    np.testing.assert_allclose(reported.epistemic_std, mean.std(0, ddof=1), rtol=1e-12)
    np.testing.assert_allclose(
        reported.std**2, reported.aleatoric_std**2 + reported.epistemic_std**2, rtol=1e-12
    )
    np.testing.assert_array_equal(target.acquisition(scores, "variance"), reported.std**2)
    cdf = distribution_function(samples.astype(np.float64), np.log(reported.median))
    np.testing.assert_allclose(cdf, 0.5, atol=1e-5)


def test_draw_parts_merge_and_rows_are_bit_identical_in_any_batch():
    samples, target = draws(num_draws=150), Target(RANK)
    full = target.scores(target.sums(samples))
    parts = target.sums(samples[:40]).merge(target.sums(samples[40:], 40))
    np.testing.assert_allclose(target.scores(parts).in_units.std, full.in_units.std, rtol=1e-10)
    combined = concatenate([full, target.scores(target.sums(draws(num_draws=150, seed=5)))])
    for row in range(2):
        single = target.scores(target.sums(samples[:, row : row + 1]))
        for name in ("mean", "median", "std", "aleatoric_std", "epistemic_std"):
            assert getattr(single.in_units, name)[0] == getattr(full.in_units, name)[row], name
            assert getattr(take(combined, slice(row, row + 1)).in_units, name) == getattr(
                single.in_units, name
            )


def test_answers_scale_with_the_target():
    for scale in (1e-12, 1e12):
        rank = RankTransform(values=tuple(scale * v for v in RANK.values), scores=RANK.scores)
        base, large = (t.scores(t.sums(draws())).in_units for t in (Target(RANK), Target(rank)))
        for name in ("mean", "median", "std", "aleatoric_std", "epistemic_std"):
            np.testing.assert_allclose(getattr(large, name), scale * getattr(base, name), rtol=1e-9)
        shifted = draws() + np.float32([np.log(scale), 0.0])
        base, large = (
            Target(LOG).scores(Target(LOG).sums(samples)).in_units for samples in (draws(), shifted)
        )
        np.testing.assert_allclose(large.std, scale * base.std, rtol=1e-4)  # float32 logarithm


def test_extremely_uncertain_row_has_finite_answers():
    samples = outputs(np.full((3, 1), 40.0), np.full((3, 1), 2e3))
    for transform in TRANSFORMS:
        reported = Target(transform).scores(Target(transform).sums(samples)).in_units
        assert np.isfinite([reported.mean[0], reported.std[0], reported.median[0]]).all()


@pytest.mark.parametrize("transform", [LOG, RANK], ids=["log", "rank"])
def test_target_measures_match_integrals(transform):
    samples, y = draws(rows=1, num_draws=3), np.array([2.0])

    def cdf(value):
        z = to_fitted(transform, np.array([value]))
        return distribution_function(samples.astype(np.float64), z)[0]

    lower_limit = 0.0 if transform is LOG else -20.0
    crps = integrate.quad(lambda t: cdf(t) ** 2, lower_limit, 2.0, limit=300)[0]
    crps += integrate.quad(lambda t: (1 - cdf(t)) ** 2, 2.0, 300.0, limit=300)[0]
    measures = TargetMeasures.compute(samples, y, transform)
    assert measures.crps[0] == pytest.approx(crps, rel=0.01)
    assert measures.pit[0] == pytest.approx(cdf(2.0))


def test_normal_cdf_and_median_of_identical_gaussians_are_accurate():
    z = np.linspace(-8.0, 8.0, 2001)
    np.testing.assert_allclose(normal_cdf(z), stats.norm.cdf(z), atol=1e-7)
    median = mixture_median(np.full((2, 5), 3.5), np.ones((2, 5)), np.full(5, 0.2))
    np.testing.assert_allclose(median, 3.5, rtol=1e-12)
