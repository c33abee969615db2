import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from model_store.conformal.abstention import (
    CONFIDENCE,
    NO_THRESHOLD,
    Abstention,
    Answers,
    binomial_cdf,
)

CALIBRATIONS = 400
REFERENCE, RANKING, FLAGGED = 300, 600, 30
TYPES = 50_000


@settings(max_examples=100)
@given(
    rows=st.lists(st.integers(0, 3000), min_size=1, max_size=5),
    share=st.floats(0, 0.2),
    risk=st.floats(1e-6, 1 - 1e-9),
)
def test_binomial_cdf_matches_scipy(rows, share, risk):
    rows = np.array(rows)
    wrong = np.round(share * rows).astype(int)
    np.testing.assert_allclose(
        binomial_cdf(wrong, rows, risk), stats.binom.cdf(wrong, rows, risk), rtol=1e-8, atol=1e-12
    )


@pytest.mark.parametrize("risk", [0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_threshold_is_largest_rejected_by_fallback_procedure(risk, seed):
    generator = np.random.default_rng(seed)
    abstention, reference = fit_abstention(generator, *sample_population(generator))
    rows = RANKING - FLAGGED
    can_have_error = stats.binom.cdf(1, rows * np.arange(1, 101) // 100, risk) <= 1 - CONFIDENCE
    start = 1 + int(np.flatnonzero(can_have_error)[0])
    assert start < 75
    threshold, level = NO_THRESHOLD, 0.0
    for percent in range(1, 101):
        level += {start: 0.7, 75: 0.3}.get(percent, 0.0) * (1 - CONFIDENCE)
        limit = np.sort(reference)[percent * REFERENCE // 100 - 1] if percent < 100 else 1.0
        is_answered = abstention.uncertainty[:rows] <= limit
        wrong = abstention.is_wrong[:rows][is_answered].sum()
        test = stats.binomtest(wrong, max(is_answered.sum(), 1), risk, "less")
        if level > 0 and test.pvalue <= level:
            threshold = limit
        else:
            level = 0.0
    assert abstention.threshold(FLAGGED, risk) == threshold


def test_99_calibration_rows_often_allow_answers():
    """Use risk .1 and a model with an overall error of .13."""
    generator = np.random.default_rng(0)
    uncertainty, _, wrong_probability = sample_population(generator)
    thresholds = []
    for _ in range(300):
        reference, ranking = generator.integers(TYPES, size=(2, 99))
        is_wrong = generator.uniform(size=99) < wrong_probability[ranking]
        abstention = make_abstention(
            uncertainty[reference], uncertainty[ranking], is_wrong, np.arange(99)
        )
        thresholds.append(abstention.threshold(5, 0.1))
    assert np.mean(np.array(thresholds) != NO_THRESHOLD) > 0.4


@pytest.mark.parametrize("risk", [0.05, 0.1])
def test_answer_risk_exceeds_level_no_more_often_than_stated(risk):
    """Use new calibrations and a flag that is correlated with uncertainty.

    A correct rule fails once in 1e6 runs. A naive rule, which limits the observed error rate,
    exceeds the level in about half of the calibrations. So the test has power.
    """
    generator = np.random.default_rng(int(1000 * risk))
    population = sample_population(generator)
    violations, naive_violations, answer_shares = 0, 0, []
    for _ in range(CALIBRATIONS):
        abstention, _ = fit_abstention(generator, *population)
        limit = abstention.threshold(FLAGGED, risk)
        share, true_risk = answer_risk(population, limit, abstention.statistic[RANKING - FLAGGED])
        answer_shares.append(share)
        violations += true_risk > risk
        uncertainty, is_wrong = (
            values[: RANKING - FLAGGED] for values in (abstention.uncertainty, abstention.is_wrong)
        )
        order = np.argsort(uncertainty)
        error_rates = is_wrong[order].cumsum() / np.arange(1, len(order) + 1)
        limit = uncertainty[order][np.flatnonzero(error_rates <= risk)[-1]]
        naive_violations += (
            answer_risk(population, limit, abstention.statistic[RANKING - FLAGGED])[1] > risk
        )
    max_violations = stats.binom(CALIBRATIONS, 1 - CONFIDENCE).ppf(1 - 1e-6)
    assert violations <= max_violations
    assert naive_violations > max_violations
    assert np.mean(answer_shares) > 0.1


@pytest.mark.parametrize("flagged", [0, FLAGGED, RANKING - 20])
def test_smallest_risk_is_the_smallest_that_allows_answers(flagged):
    generator = np.random.default_rng(5)
    abstention, _ = fit_abstention(generator, *sample_population(generator))
    smallest = abstention.smallest_risk(flagged)
    assert 0 < smallest < 1
    assert abstention.threshold(flagged, smallest) > 0
    assert abstention.threshold(flagged, smallest - 1e-4) == NO_THRESHOLD


def test_no_risk_is_certified_if_all_rows_are_flagged_or_wrong():
    uncertainty = np.linspace(0, 0.5, 40)
    all_wrong = make_abstention(uncertainty, uncertainty, np.ones(40, dtype=bool), np.arange(40))
    assert all_wrong.smallest_risk(0) == 1
    all_right = make_abstention(uncertainty, uncertainty, np.zeros(40, dtype=bool), np.arange(40))
    assert all_right.smallest_risk(40) == 1
    # All 40 rows are right: (1 - risk)^40 = .05.
    smallest = all_right.smallest_risk(0)
    assert smallest == pytest.approx(1 - 0.05 ** (1 / 40), abs=1e-4)
    assert all_right.smallest_risk(0, above=smallest) > smallest


def sample_population(generator):
    uncertainty = 0.8 * generator.beta(0.4, 2.0, TYPES)
    statistic = uncertainty + generator.normal(scale=0.3, size=TYPES)
    return uncertainty, statistic, np.clip(0.9 * uncertainty + 0.1 * (statistic > 0.5), 0, 1)


def fit_abstention(generator, uncertainty, statistic, wrong_probability):
    reference, ranking = (
        generator.integers(len(uncertainty), size=n) for n in (REFERENCE, RANKING)
    )
    is_wrong = generator.uniform(size=RANKING) < wrong_probability[ranking]
    order = np.argsort(statistic[ranking], kind="stable")
    abstention = make_abstention(uncertainty[reference], uncertainty[ranking], is_wrong, order)
    return SortedAbstention(**vars(abstention), statistic=statistic[ranking][order]), uncertainty[
        reference
    ]


def make_abstention(reference_uncertainty, ranking_uncertainty, is_wrong, order):
    """Build the abstention for one draw count."""
    answers = Answers.from_splits(
        reference_uncertainty[None], ranking_uncertainty[None], is_wrong[None]
    )
    return answers.abstention(0, order)


class SortedAbstention(Abstention):
    """An abstention with sorted flag statistics."""

    def __init__(self, statistic, **fields):
        super().__init__(**fields)
        object.__setattr__(self, "statistic", statistic)


def answer_risk(population, limit, flag_above):
    uncertainty, statistic, wrong_probability = population
    is_answered = (uncertainty <= limit) & (statistic <= flag_above)
    return is_answered.mean(), wrong_probability[is_answered].mean() if is_answered.any() else 0.0
