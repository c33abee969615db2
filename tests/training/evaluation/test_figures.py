import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from model_store.state.live import wilson_interval
from training.evaluation.metrics import (
    BinnedGap,
    Mean,
    Resamples,
    RiskCoverage,
    RootMean,
    Share,
    auroc_interval,
    detection,
    share_interval,
)

SAMPLES = 250
RARE = 1e-6  # probability of a chance failure


def is_plausible(count, level=0.95):
    return stats.binom.cdf(count, SAMPLES, level) > RARE


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_share_intervals_match_scipy(hits_and_rows):
    hits, rows = hits_and_rows
    test = stats.binomtest(hits, rows)
    exact, wilson = (test.proportion_ci(0.95, method) for method in ("exact", "wilson"))
    assert share_interval(hits, rows) == pytest.approx((exact.low, exact.high), abs=1e-9)
    assert wilson_interval(hits / rows, rows) == pytest.approx((wilson.low, wilson.high), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "std"), [(0.7, 1.0), (4.0, 1.0), (3.0, 3.0)])
def test_detection_intervals_cover_true_values(shift, std):
    generator = np.random.default_rng(1)
    true_area = stats.norm.cdf(shift / np.hypot(1.0, std))
    large = generator.normal(shift, std, 100_000), generator.normal(0.0, 1.0, 100_000)
    true_precision = detection(*large)["average_precision"]
    covered = np.zeros(2, dtype=int)
    for _ in range(SAMPLES):
        positive, negative = generator.normal(shift, std, 100), generator.normal(0.0, 1.0, 100)
        ends = detection(positive, negative)["confidence_intervals"].values()
        truth = (true_area, true_precision)
        covered += [low <= true <= high for (low, high), true in zip(ends, truth, strict=True)]
    assert [is_plausible(count) for count in covered] == [True] * 2, covered


def test_auroc_interval_of_perfect_score_allows_for_few_rows():
    for rows in (1, 2, 30, 300):
        low, high = auroc_interval(1.0, rows, rows)
        assert 1 - 8 / rows < low < 1 - 0.5 / rows or rows < 30
        assert high == 1.0
        assert auroc_interval(0.0, rows, rows) == pytest.approx((0.0, 1.0 - low), abs=1e-9)


def test_resamples_keep_row_count_and_depend_on_seed():
    resamples = Resamples.draw(30, 5)
    assert resamples.counts.shape == (1000, 30)
    assert (resamples.counts.sum(axis=1) == 30).all()
    assert np.array_equal(resamples.counts, Resamples.draw(30, 5).counts)
    assert not np.array_equal(resamples.counts, Resamples.draw(30, 6).counts)
    variance = resamples.counts.var(axis=0).mean()
    assert variance == pytest.approx(1 - 1 / 30, rel=0.05)  # variance of Binomial(30, 1/30)


@pytest.mark.parametrize("kind", [Mean, RootMean, Share, BinnedGap, RiskCoverage])
def test_resampled_figure_equals_figure_of_repeated_rows(kind):
    generator = np.random.default_rng(2)
    rows = 40
    score, loss = generator.integers(0, 8, rows).astype(float), generator.random(rows)
    gaps, bins = generator.normal(size=rows), generator.integers(0, 4, rows)

    def figure(index):
        if kind is RiskCoverage:
            return RiskCoverage(score[index], loss[index])
        if kind is BinnedGap:
            return BinnedGap(gaps[index], bins[index], 4)
        return kind(loss[index] < 0.5) if kind is Share else kind(loss[index])

    counts = Resamples.draw(rows, 0, 20).counts.astype(float)
    expected = [figure(np.repeat(np.arange(rows), sample.astype(int))).value for sample in counts]
    assert figure(np.arange(rows))(counts) == pytest.approx(np.array(expected))


def test_risk_coverage_area_matches_random_order_of_ties():
    generator = np.random.default_rng(3)
    score, loss = generator.integers(0, 5, 12).astype(float), generator.random(12)
    risks = []
    for _ in range(4000):  # random order within ties
        order = np.lexsort((generator.random(12), score))
        risks.append(np.mean(np.cumsum(loss[order]) / np.arange(1, 13)))
    error = np.std(risks) / np.sqrt(len(risks))
    assert RiskCoverage(score, loss).value == pytest.approx(np.mean(risks), abs=5 * error)


def test_binned_gap_sums_absolute_gaps_of_bins():
    generator = np.random.default_rng(4)
    gaps, bins = generator.normal(size=50), generator.integers(0, 4, 50)
    expected = sum(abs(gaps[bins == b].sum()) for b in range(4)) / 50
    assert BinnedGap(gaps, bins, 4).value == pytest.approx(expected)


def test_mean_and_root_mean_intervals_cover_true_values():
    generator = np.random.default_rng(5)
    covered = np.zeros(2, dtype=int)
    resamples = Resamples.draw(100, 0, 400)
    for _ in range(SAMPLES):
        values = generator.gamma(3.0, size=100)
        ends = (Mean(values).interval(resamples), RootMean(np.square(values)).interval(resamples))
        truth = (3.0, np.sqrt(12.0))  # E[g] and sqrt(E[g^2]) of Gamma(3)
        covered += [low <= true <= high for (low, high), true in zip(ends, truth, strict=True)]
    assert [is_plausible(count, 0.92) for count in covered] == [True] * 2, (
        covered
    )  # intervals of skewed data cover slightly less


@pytest.mark.parametrize("offset", [0.0, 0.02, 0.1])
def test_calibration_error_interval_covers_truth_despite_biased_estimate(offset):
    generator = np.random.default_rng(6)
    bins, rows = 10, 300
    resamples = Resamples.draw(rows, 0, 300)
    covered, actual = 0, []
    for _ in range(SAMPLES):
        confidence = generator.uniform(0.5, 1.0, rows)
        correct = generator.random(rows) < confidence - offset
        index = np.minimum((confidence * bins).astype(int), bins - 1)
        figure = BinnedGap(correct - confidence, index, bins)
        low, high = figure.interval(resamples)
        covered += low <= offset <= high
        actual.append(figure.value)
    assert is_plausible(covered), covered
    if offset < 0.1:
        assert np.mean(actual) > offset + 0.01
