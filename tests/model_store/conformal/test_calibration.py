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


def test_p_values_by_hand():
    calibration = np.array([1.0, 2.0, 2.0, 5.0])
    scores = np.array([0.0, 1.0, 1.5, 2.0, 3.0, 5.0, 6.0])
    assert conformal_p_value(scores, calibration).tolist() == [1.0, 1.0, 0.8, 0.8, 0.4, 0.4, 0.2]


def test_the_smallest_p_value_is_the_smallest_fpr():
    calibration = fitted(np.random.default_rng(0), reference=30, ranking=19)
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
def test_ties_never_make_the_rate_larger(pool, fpr):
    """Each member of an exchangeable pool in turn is the new row: at most floor(fpr (n + 1)) of
    them are flagged."""
    scores = np.array(pool, dtype=np.float64)
    flagged = [
        conformal_p_value(scores[i : i + 1], np.sort(np.delete(scores, i)))[0] <= fpr
        for i in range(len(pool))
    ]
    assert sum(flagged) <= math.floor(fpr * len(pool) + 1e-9)


@pytest.mark.parametrize("fpr", [0.01, 0.05, 0.2])
def test_flags_over_many_splits_are_beta_binomial(fpr):
    """Three dependent detectors combined, fresh data for each split. Given the count's distribution
    F, the randomised F(count - 1) + U P(count) is uniform: the Kolmogorov-Smirnov test fails a
    correct flag once in 1e7 runs."""
    generator = np.random.default_rng(int(fpr * 100))
    ranking, new = 99, 150
    k = round(fpr * (ranking + 1))
    law = stats.betabinom(new, k, ranking + 1 - k)
    counts = np.array([flags(generator, ranking, new, fpr) for _ in range(SPLITS)])
    uniform = law.cdf(counts - 1) + generator.uniform(size=SPLITS) * law.pmf(counts)
    assert stats.kstest(uniform, "uniform").pvalue > 1e-7


def test_each_detectors_own_p_value_is_uniform():
    generator = np.random.default_rng(4)
    levels = []
    for _ in range(SPLITS):
        p_values = find_p_values(
            fitted(generator, reference=20, ranking=49), *get_scores(generator, 1), 1
        )
        levels.append([p_values.detector_p_values[name][0] for name in DETECTORS])
    counts = np.round(np.array(levels) * 50).astype(int)  # uniform over 1..50
    for of_one in counts.T:
        observed = np.bincount((of_one - 1) // 5, minlength=10)
        assert stats.chisquare(observed).pvalue > 1e-7


def test_rounded_scores_are_flagged_no_more_often_than_asked():
    generator = np.random.default_rng(5)
    rates = np.array([flags(generator, 99, 150, 0.05, decimals=0) / 150 for _ in range(SPLITS)])
    assert rates.mean() <= 0.05 + 5.5 * rates.std() / math.sqrt(SPLITS)


@pytest.mark.parametrize(("reference", "ranking"), [(10, 19), (20, 30), (40, 60)])
def test_noise_is_flagged_where_few_rows_calibrate(reference, ranking):
    """A posterior score that is nearly always 0, two densities that see the noise, one that does
    not.

    With so few ranking rows a flagged row must beat nearly all of them: one whose surprisal is
        large by chance of the
    reference rows hides all noise (with an exponential tail in a fifth to a third of the splits).
    """
    generator = np.random.default_rng(reference)
    names = DetectorNames(combined=("a", "b", "c", "d"), density=("b", "c", "d"), two_sided=("c",))

    def drawn(rows, shift=0.0):
        doubt = generator.random(rows)
        log_density = generator.normal(size=(3, rows)) + np.array([[shift], [shift], [0.0]])
        return {
            "a": np.where(doubt < 0.9, 1e-4 * doubt, doubt * 0.6),
            **dict(zip("bcd", np.exp(log_density), strict=True)),
        }

    def as_scores(by_name):
        rows = len(by_name["a"])
        return DetectorScores(
            {n: s[None] for n, s in by_name.items()}, np.zeros((1, rows), dtype=int)
        )

    actual: dict[str, list[float]] = {"noise": [], "ordinary": []}
    for _ in range(SPLITS // 2):
        parts = as_scores(drawn(reference)), as_scores(drawn(ranking))
        calibration = Calibration.fit([1], *parts, np.full((1, ranking), 0.5), names, 1)
        for kind, shift in (("noise", 6.0), ("ordinary", 0.0)):
            p_value = find_p_values(
                calibration, drawn(100, shift), np.zeros(100, dtype=int), 1
            ).p_value
            actual[kind].append(float(np.mean(p_value <= 0.05)))
    assert np.mean(actual["noise"]) > 0.97
    k = math.floor(0.05 * (ranking + 1))
    law = stats.betabinom(100, k, ranking + 1 - k)
    assert abs(np.mean(actual["ordinary"]) - k / (ranking + 1)) < 5.5 * law.std() / 100 / math.sqrt(
        SPLITS // 2
    )


# Numbers of draws


def test_the_largest_calibrated_number_of_draws_is_used():
    calibration = fitted(np.random.default_rng(0), counts=(1, 2, 5, 100))
    request = {1: 1, 2: 2, 3: 2, 4: 2, 5: 5, 99: 5, 100: 100, 1000: 100}
    assert {number: calibration.calibrated_draws(number) for number in request} == request


def test_each_number_of_draws_has_its_own_calibration():
    rows = np.array([[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]])
    scores = DetectorScores({"a": rows}, np.zeros((2, 3), dtype=int))
    calibration = Calibration.fit(
        [1, 10], scores, scores, np.full((2, 3), 0.5), DetectorNames(combined=("a",)), 1
    )
    new, label = {"a": np.array([5.0])}, np.array([0])
    assert find_p_values(calibration, new, label, 1).p_value == 0.25
    assert find_p_values(calibration, new, label, 10).p_value == 1.0


def test_a_score_is_judged_among_those_of_its_label_and_from_both_sides_where_the_detector_is():
    generator = np.random.default_rng(6)
    labels = np.repeat([0, 1], 200)[None]
    density = np.exp(
        generator.normal(size=(1, 400)) + 10.0 * labels
    )  # label 1 has scores e^10 times as large
    pair = DetectorScores({"low": density, "high": density}, labels)
    names = DetectorNames(combined=("low", "high"), density=("low", "high"), two_sided=("low",))
    calibration = Calibration.fit([1], pair, pair, np.full((1, 400), 0.5), names, 2)

    def p_values(log_score, label):
        score = np.array([math.exp(log_score)])
        scores = {"low": score, "high": score}
        calibrated = find_p_values(calibration, scores, np.array([label]), 1).detector_p_values
        return calibrated["low"][0], calibrated["high"][0]

    for label, centre in ((0, 0.0), (1, 10.0)):
        assert min(p_values(centre, label)) > 0.3
        assert max(p_values(centre + 6, label)) < 0.01
        below, one_sided = p_values(centre - 6, label)
        assert below < 0.01 < 0.9 < one_sided


# Prediction sets and intervals


def test_sets_and_intervals_are_those_of_the_number_of_draws():
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
def test_as_many_ranking_rows_count_as_flagged_as_p_values_are_at_most_fpr(rows, fpr):
    calibration = fitted(np.random.default_rng(rows), ranking=rows)
    statistic = calibration.rank_tables[1].statistic
    between = np.concatenate(
        [[statistic[0] - 1], (statistic[1:] + statistic[:-1]) / 2, [statistic[-1] + 1]]
    )
    fires = conformal_p_value(between, statistic) <= fpr
    assert calibration.rank_tables[1].count_flagged(fpr) == min(fires.sum(), rows)


def test_the_doubt_is_kept_in_the_order_of_the_statistic():
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
        of_count = {name: scores[j] for name, scores in ranking.by_name.items()}
        p_value = find_p_values(calibration, of_count, ranking.labels[j], count).p_value
        order = np.argsort(-p_value)
        abstention = calibration.rank_tables[count].abstention
        assert abstention.uncertainty.tolist() == uncertainty[j][order].tolist()
        assert abstention.is_wrong.tolist() == is_wrong[j][order].tolist()


# Tensors


def test_tensors_round_trip_through_safetensors():
    calibration = fitted(
        np.random.default_rng(3), counts=(1, 5, 20), ranking=30, answers=answers(3, 60, 30)
    )
    read = Calibration.from_tensors(load(save(calibration.tensors())), NAMES, LABELS)
    scores = get_scores(np.random.default_rng(4), 50)
    for count in (1, 5, 20):
        ours, theirs = (
            find_p_values(calibration, *scores, count),
            find_p_values(read, *scores, count),
        )
        assert all(
            ours.detector_p_values[n].tolist() == theirs.detector_p_values[n].tolist()
            for n in DETECTORS
        )
        assert ours.p_value.tolist() == theirs.p_value.tolist()
        assert (
            calibration.rank_tables[count].largest_uncertainty(0.1, 0.5)
            == read.rank_tables[count].largest_uncertainty(0.1, 0.5)
            > 0
        )
    assert read.nonconformity.tolist() == calibration.nonconformity.tolist()


MALFORMED = {
    "no draw counts": ("draw_counts", lambda _: None),
    "no statistic": ("statistic", lambda _: None),
    "no reference of a combined detector": ("reference.a", lambda _: None),
    "draw counts not from 1": ("draw_counts", lambda t: t + 1),
    "draw counts that do not rise": ("draw_counts", np.ones_like),
    "statistics of fewer draws": ("statistic", lambda t: t[:1]),
    "a score that is not a number": ("nonconformity", lambda t: t[:, :1] * np.nan),
    "no centres of a density": ("centre.b", lambda _: None),
    "a spread of 0": ("spread.b", lambda t: t * 0),
    "doubt of fewer rows": ("abstention.doubt", lambda t: t[:, 1:]),
    "doubt above 1": ("abstention.doubt", lambda t: t + 1),
    "wrong labels as numbers": ("abstention.is_wrong", lambda t: t.astype(np.float64)),
    "an infinite score": ("statistic", lambda t: np.where(t == t.max(), np.inf, t)),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_tensors_are_refused_by_name(fault):
    name, change = MALFORMED[fault]
    tensors = fitted(np.random.default_rng(3), counts=(1, 5), answers=answers(2, 60, 50)).tensors()
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


def fitted(generator, counts=(1,), reference=60, ranking=50, decimals=None, answers=None):
    def stacked(rows):
        created = [get_scores(generator, rows, decimals) for _ in counts]
        by_name = {name: np.stack([scores[name] for scores, _ in created]) for name in DETECTORS}
        return DetectorScores(by_name, np.stack([labels for _, labels in created]))

    nonconformity = generator.uniform(size=(len(counts), ranking))
    return Calibration.fit(
        list(counts), stacked(reference), stacked(ranking), nonconformity, NAMES, LABELS, answers
    )


def flags(generator, ranking, new, fpr, decimals=None):
    """How many of `new` rows like the calibration data are flagged."""
    calibration = fitted(generator, ranking=ranking, decimals=decimals)
    return int(
        np.sum(find_p_values(calibration, *get_scores(generator, new, decimals), 1).p_value <= fpr)
    )


def answers(counts, reference, ranking):
    """Doubt of rows that are mostly right."""
    generator = np.random.default_rng(counts)
    uncertainties = (generator.uniform(size=(counts, rows)) for rows in (reference, ranking))
    return Answers.from_splits(*uncertainties, generator.uniform(size=(counts, ranking)) < 0.1)


def test_a_rate_as_it_is_written_is_never_below_itself():
    for rows in [*range(1, 1000), 9_999, 123_456]:
        smallest = 1.0 / (rows + 1)
        assert smallest <= float(format_rate(smallest)) <= smallest * (1 + 1e-5)
    assert (format_rate(1 / 5), format_rate(1 / 3), format_rate(1 / 221)) == (
        "0.2",
        "0.333334",
        "0.00452489",
    )


def test_a_model_of_nineteen_ranking_rows_keeps_the_default_rate_and_one_of_eighteen_does_not():
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
