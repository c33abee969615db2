import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from scipy import stats

from model_store.artifacts.manifest import DetectorNames
from model_store.conformal.abstention import Answers
from model_store.conformal.calibration import (
    DEFAULT_COVERAGE,
    Calibration,
    DetectorScores,
    few_rows_warning,
    format_rate,
)
from model_store.conformal.rank_tables import conformal_p_value, mass_above, quantile
from tests.support.p_values import find_p_values

DETECTORS = ("a", "b", "c")
NAMES = DetectorNames(combined=DETECTORS, density=("b", "c"), two_sided=("c",))
LABELS = 3
SPLITS = 400


# P-values


def test_p_values_match_hand_calculation():
    calibration = np.array([1.0, 2.0, 2.0, 5.0])
    scores = np.array([0.0, 1.0, 1.5, 2.0, 3.0, 5.0, 6.0])
    assert conformal_p_value(scores, calibration).tolist() == [1.0, 1.0, 0.8, 0.8, 0.4, 0.4, 0.2]


def test_smallest_p_value_is_smallest_fpr():
    calibration = fit_calibration(np.random.default_rng(0), reference=30, ranking=19)
    p_values = find_p_values(
        calibration, dict.fromkeys(DETECTORS, np.array([1e9])), np.array([0]), 1
    )
    assert p_values.p_value == calibration.smallest_fpr == 1.0 / 20.0
    assert all(p == 1.0 / 20.0 for p in p_values.detector_p_values.values())


@settings(max_examples=100)
@given(
    pool=st.lists(st.integers(0, 6), min_size=2, max_size=30),
    fpr=st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5]),
)
def test_ties_never_increase_the_flag_rate(pool, fpr):
    """Each member of an exchangeable pool serves once as the new row."""
    scores = np.array(pool, dtype=np.float64)
    is_flagged = [
        conformal_p_value(scores[i : i + 1], np.sort(np.delete(scores, i)))[0] <= fpr
        for i in range(len(pool))
    ]
    assert sum(is_flagged) <= math.floor(fpr * len(pool) + 1e-9)


@pytest.mark.parametrize("fpr", [0.01, 0.05, 0.2])
def test_flag_counts_over_splits_are_beta_binomial(fpr):
    """Combine three dependent detectors, with new data for each split.

    If F is the distribution of the count, F(count - 1) + U P(count) is uniform. The
    Kolmogorov-Smirnov test rejects a correct flag once in 1e7 runs.
    """
    generator = np.random.default_rng(int(fpr * 100))
    ranking, new = 99, 150
    k = round(fpr * (ranking + 1))
    law = stats.betabinom(new, k, ranking + 1 - k)
    counts = np.array([count_flagged(generator, ranking, new, fpr) for _ in range(SPLITS)])
    uniform = law.cdf(counts - 1) + generator.uniform(size=SPLITS) * law.pmf(counts)
    assert stats.kstest(uniform, "uniform").pvalue > 1e-7


def test_each_detector_p_value_is_uniform():
    generator = np.random.default_rng(4)
    levels = []
    for _ in range(SPLITS):
        p_values = find_p_values(
            fit_calibration(generator, reference=20, ranking=49), *get_scores(generator, 1), 1
        )
        levels.append([p_values.detector_p_values[name][0] for name in DETECTORS])
    counts = np.round(np.array(levels) * 50).astype(int)  # uniform over 1..50
    for detector_counts in counts.T:
        observed = np.bincount((detector_counts - 1) // 5, minlength=10)
        assert stats.chisquare(observed).pvalue > 1e-7


def test_rounded_scores_do_not_exceed_requested_flag_rate():
    generator = np.random.default_rng(5)
    rates = np.array(
        [count_flagged(generator, 99, 150, 0.05, decimals=0) / 150 for _ in range(SPLITS)]
    )
    assert rates.mean() <= 0.05 + 5.5 * rates.std() / math.sqrt(SPLITS)


@pytest.mark.parametrize(("reference", "ranking"), [(10, 19), (20, 30), (40, 60)])
def test_noise_is_flagged_with_few_calibration_rows(reference, ranking):
    """Combine a posterior score near 0 with three densities; two see the noise.

    With few ranking rows, a flagged row must exceed nearly all of them. If the reference rows make
    one ranking row's surprisal large by chance, that row hides all noise. With an exponential tail,
    this happens in a fifth to a third of the splits.
    """
    generator = np.random.default_rng(reference)
    names = DetectorNames(combined=("a", "b", "c", "d"), density=("b", "c", "d"), two_sided=("c",))

    def sample_scores(rows, shift=0.0):
        uncertainty = generator.random(rows)
        log_density = generator.normal(size=(3, rows)) + np.array([[shift], [shift], [0.0]])
        return {
            "a": np.where(uncertainty < 0.9, 1e-4 * uncertainty, uncertainty * 0.6),
            **dict(zip("bcd", np.exp(log_density), strict=True)),
        }

    def make_detector_scores(by_name):
        rows = len(by_name["a"])
        return DetectorScores(
            {n: s[None] for n, s in by_name.items()}, np.zeros((1, rows), dtype=int)
        )

    rates: dict[str, list[float]] = {"noise": [], "ordinary": []}
    for _ in range(SPLITS // 2):
        splits = (
            make_detector_scores(sample_scores(reference)),
            make_detector_scores(sample_scores(ranking)),
        )
        calibration = Calibration.fit([1], *splits, np.full((1, ranking), 0.5), names, 1)
        for kind, shift in (("noise", 6.0), ("ordinary", 0.0)):
            p_value = find_p_values(
                calibration, sample_scores(100, shift), np.zeros(100, dtype=int), 1
            ).p_value
            rates[kind].append(float(np.mean(p_value <= 0.05)))
    assert np.mean(rates["noise"]) > 0.97
    k = math.floor(0.05 * (ranking + 1))
    law = stats.betabinom(100, k, ranking + 1 - k)
    assert abs(np.mean(rates["ordinary"]) - k / (ranking + 1)) < 5.5 * law.std() / 100 / math.sqrt(
        SPLITS // 2
    )


# Draw counts


def test_largest_calibrated_draw_count_is_used():
    calibration = fit_calibration(np.random.default_rng(0), counts=(1, 2, 5, 100))
    expected = {1: 1, 2: 2, 3: 2, 4: 2, 5: 5, 99: 5, 100: 100, 1000: 100}
    assert {count: calibration.calibrated_draws(count) for count in expected} == expected


def test_each_draw_count_has_a_separate_calibration():
    rows = np.array([[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]])
    scores = DetectorScores({"a": rows}, np.zeros((2, 3), dtype=int))
    calibration = Calibration.fit(
        [1, 10], scores, scores, np.full((2, 3), 0.5), DetectorNames(combined=("a",)), 1
    )
    new, label = {"a": np.array([5.0])}, np.array([0])
    assert find_p_values(calibration, new, label, 1).p_value == 0.25
    assert find_p_values(calibration, new, label, 10).p_value == 1.0


def test_p_values_are_per_label_and_respect_two_sided_detectors():
    generator = np.random.default_rng(6)
    labels = np.repeat([0, 1], 200)[None]
    density = np.exp(
        generator.normal(size=(1, 400)) + 10.0 * labels
    )  # label 1 has scores e^10 times as large
    pair = DetectorScores({"low": density, "high": density}, labels)
    names = DetectorNames(combined=("low", "high"), density=("low", "high"), two_sided=("low",))
    calibration = Calibration.fit([1], pair, pair, np.full((1, 400), 0.5), names, 2)

    def get_p_values(log_score, label):
        score = np.array([math.exp(log_score)])
        scores = {"low": score, "high": score}
        calibrated = find_p_values(calibration, scores, np.array([label]), 1).detector_p_values
        return calibrated["low"][0], calibrated["high"][0]

    for label, centre in ((0, 0.0), (1, 10.0)):
        assert min(get_p_values(centre, label)) > 0.3
        assert max(get_p_values(centre + 6, label)) < 0.01
        below, one_sided = get_p_values(centre - 6, label)
        assert below < 0.01 < 0.9 < one_sided


# Prediction sets and intervals


def test_sets_and_intervals_use_calibration_of_draw_count():
    scores = {name: np.array([[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]]) for name in DETECTORS}
    nonconformity = np.array([[0.3, 0.1, 0.2], [0.9, 0.8, 0.7]])
    scores = DetectorScores(scores, np.zeros((2, 3), dtype=np.int64))
    calibration = Calibration.fit([1, 10], scores, scores, nonconformity, NAMES, LABELS)
    probs, mean, std = np.array([[0.5, 0.3, 0.2]]), np.array([10.0]), np.array([2.0])
    # ceil(4 x .5) = 2nd smallest: .2 and .8; the mass above the classes is 0, .5 and .8.
    assert calibration.rank_tables[1].prediction_sets(mass_above(probs), 0.5).tolist() == [
        [True, False, False]
    ]
    assert calibration.rank_tables[10].prediction_sets(mass_above(probs), 0.5).tolist() == [
        [True, True, True]
    ]
    assert calibration.rank_tables[1].intervals(mean, std, 0.5).tolist() == [[9.6, 10.4]]
    assert calibration.rank_tables[10].intervals(mean, std, 0.5).tolist() == [[8.4, 11.6]]


# Abstention


@settings(max_examples=100)
@given(
    rows=st.integers(1, 60),
    fpr=st.one_of(st.floats(0.0, 1.0), st.integers(1, 61).map(lambda k: k / 61)),
)
def test_count_flagged_counts_p_values_up_to_fpr(rows, fpr):
    calibration = fit_calibration(np.random.default_rng(rows), ranking=rows)
    statistic = calibration.rank_tables[1].statistic
    between = np.concatenate(
        [[statistic[0] - 1], (statistic[1:] + statistic[:-1]) / 2, [statistic[-1] + 1]]
    )
    is_flagged = conformal_p_value(between, statistic) <= fpr
    assert calibration.rank_tables[1].count_flagged(fpr) == min(is_flagged.sum(), rows)


def test_abstention_rows_are_sorted_by_statistic():
    generator = np.random.default_rng(0)
    uncertainty, is_wrong = generator.uniform(size=(2, 30)), generator.uniform(size=(2, 30)) < 0.5
    reference, ranking = (
        DetectorScores(
            {name: np.exp(generator.normal(size=(2, n))) for name in DETECTORS},
            generator.integers(0, LABELS, (2, n)),
        )
        for n in (40, 30)
    )
    answers = Answers.from_splits(generator.uniform(size=(2, 40)), uncertainty, is_wrong)
    calibration = Calibration.fit([1, 5], reference, ranking, uncertainty, NAMES, LABELS, answers)
    for j, count in enumerate((1, 5)):
        draw_scores = {name: scores[j] for name, scores in ranking.by_name.items()}
        p_value = find_p_values(calibration, draw_scores, ranking.labels[j], count).p_value
        order = np.argsort(-p_value)
        abstention = calibration.rank_tables[count].abstention
        assert abstention.uncertainty.tolist() == uncertainty[j][order].tolist()
        assert abstention.is_wrong.tolist() == is_wrong[j][order].tolist()


# Tensors


def test_tensors_round_trip_through_safetensors():
    calibration = fit_calibration(
        np.random.default_rng(3), counts=(1, 5, 20), ranking=30, answers=make_answers(3, 60, 30)
    )
    restored = Calibration.from_tensors(load(save(calibration.tensors())), NAMES, LABELS)
    scores = get_scores(np.random.default_rng(4), 50)
    for count in (1, 5, 20):
        expected, actual = (
            find_p_values(calibration, *scores, count),
            find_p_values(restored, *scores, count),
        )
        assert all(
            expected.detector_p_values[n].tolist() == actual.detector_p_values[n].tolist()
            for n in DETECTORS
        )
        assert expected.p_value.tolist() == actual.p_value.tolist()
        assert (
            calibration.rank_tables[count].largest_uncertainty(0.1, 0.5)
            == restored.rank_tables[count].largest_uncertainty(0.1, 0.5)
            > 0
        )
    assert restored.nonconformity.tolist() == calibration.nonconformity.tolist()


MALFORMED = {
    "no draw counts": ("draw_counts", lambda _: None),
    "no statistic": ("statistic", lambda _: None),
    "no reference for a combined detector": ("reference.a", lambda _: None),
    "draw counts not starting at 1": ("draw_counts", lambda t: t + 1),
    "draw counts not increasing": ("draw_counts", np.ones_like),
    "too few draw counts in statistic": ("statistic", lambda t: t[:1]),
    "NaN score": ("nonconformity", lambda t: t[:, :1] * np.nan),
    "no centres for a density": ("centre.b", lambda _: None),
    "spread of 0": ("spread.b", lambda t: t * 0),
    "too few rows in uncertainty": ("abstention.doubt", lambda t: t[:, 1:]),
    "uncertainty above 1": ("abstention.doubt", lambda t: t + 1),
    "is_wrong as float": ("abstention.is_wrong", lambda t: t.astype(np.float64)),
    "infinite score": ("statistic", lambda t: np.where(t == t.max(), np.inf, t)),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_error_names_malformed_tensor(fault):
    name, change = MALFORMED[fault]
    tensors = fit_calibration(
        np.random.default_rng(3), counts=(1, 5), answers=make_answers(2, 60, 50)
    ).tensors()
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    with pytest.raises(ValueError, match=re.escape(name)):
        Calibration.from_tensors(tensors, NAMES, LABELS)


# Helpers


def get_scores(generator, rows, decimals=None):
    common = generator.normal(size=rows)
    scores = {
        "a": common + 0.3 * generator.normal(size=rows),
        "b": np.exp(common - 0.5 * generator.normal(size=rows)),
        "c": np.exp(generator.normal(size=rows) - 0.2 * common),
    }
    labels = generator.integers(0, LABELS, rows)
    return (
        scores if decimals is None else {name: np.round(s, decimals) for name, s in scores.items()}
    ), labels


def fit_calibration(generator, counts=(1,), reference=60, ranking=50, decimals=None, answers=None):
    def stack(rows):
        samples = [get_scores(generator, rows, decimals) for _ in counts]
        by_name = {name: np.stack([scores[name] for scores, _ in samples]) for name in DETECTORS}
        return DetectorScores(by_name, np.stack([labels for _, labels in samples]))

    nonconformity = generator.uniform(size=(len(counts), ranking))
    return Calibration.fit(
        list(counts), stack(reference), stack(ranking), nonconformity, NAMES, LABELS, answers
    )


def count_flagged(generator, ranking, new, fpr, decimals=None):
    """Count flagged rows among `new` rows from the calibration distribution."""
    calibration = fit_calibration(generator, ranking=ranking, decimals=decimals)
    return int(
        np.sum(find_p_values(calibration, *get_scores(generator, new, decimals), 1).p_value <= fpr)
    )


def make_answers(counts, reference, ranking):
    """Build answers from rows that are mostly right."""
    generator = np.random.default_rng(counts)
    uncertainties = (generator.uniform(size=(counts, rows)) for rows in (reference, ranking))
    return Answers.from_splits(*uncertainties, generator.uniform(size=(counts, ranking)) < 0.1)


def test_formatted_rate_is_never_below_the_rate():
    for rows in [*range(1, 1000), 9_999, 123_456]:
        smallest = 1.0 / (rows + 1)
        assert smallest <= float(format_rate(smallest)) <= smallest * (1 + 1e-5)
    assert (format_rate(1 / 5), format_rate(1 / 3), format_rate(1 / 221)) == (
        "0.2",
        "0.333334",
        "0.00452489",
    )


def test_default_fpr_and_coverage_need_19_ranking_rows():
    assert few_rows_warning(19) is None
    assert few_rows_warning(18).startswith(
        "with 18 ranking rows the smallest fpr is 0.0526316: requests"
    )
    assert few_rows_warning(1).startswith("with 1 ranking row the smallest fpr is 0.5: ")
    assert "rejected (the default is 0.05), and sets" in few_rows_warning(18)
    assert few_rows_warning(18).endswith(
        "of coverage 0.95 contain everything; use at least 19 ranking rows"
    )
    assert math.isinf(quantile(np.zeros(18), DEFAULT_COVERAGE))
    assert quantile(np.zeros(19), DEFAULT_COVERAGE) == 0.0
