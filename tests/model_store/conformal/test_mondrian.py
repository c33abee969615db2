import math

import numpy as np
import pytest
from scipy import stats

from model_store.artifacts.manifest import DetectorNames
from model_store.conformal.abstention import Answers
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.conformal.mondrian import MIN_CAUTIOUS_ROWS, UNKNOWN, Categories
from model_store.conformal.rank_tables import (
    class_nonconformity,
    mass_above,
    quantile,
    target_nonconformity,
)
from tests.support.p_values import find_p_values

NAMES = DetectorNames(combined=("a",))
SPLITS = 150
ROWS = np.array([79, 59, 99])  # ranking rows per category
NEW_ROWS = 60
SCALES = np.array([0.3, 1.0, 3.0])
CATEGORIES = ("easy", "usual", "hard")


def fit_calibration(generator, kind, rows=ROWS, **overrides):
    """Fit a calibration whose score `a` has a different scale in each category."""
    category = np.repeat(np.arange(len(rows)), rows)
    names = CATEGORIES[: len(rows)]
    reference = DetectorScores(
        {"a": generator.exponential(size=(1, 40))}, np.zeros((1, 40), dtype=int)
    )
    score = generator.exponential(SCALES[category])[None]
    by_group = Categories.by_group(names, category, 1)
    categories = {
        "class": Categories("class", names, category[None], category),
        "group": by_group,
        None: None,
    }[kind]
    options = {"nonconformity": generator.random((1, len(category))), "answers": None} | overrides
    return Calibration.fit(
        [1],
        reference,
        DetectorScores({"a": score}, category[None]),
        options["nonconformity"],
        NAMES,
        len(rows),
        options["answers"],
        categories,
    )


def is_beta_binomial(generator, counts, law):
    uniform = law.cdf(counts - 1) + generator.uniform(size=len(counts)) * law.pmf(counts)
    return stats.kstest(uniform, "uniform").pvalue > 1e-7


@pytest.mark.parametrize("kind", ["class", "group"])
def test_flag_rate_is_valid_per_category_only_with_categories(kind):
    generator = np.random.default_rng(0)
    fpr, flags = 0.1, {kind: np.zeros((SPLITS, 3)), None: np.zeros((SPLITS, 3))}
    new_categories = np.repeat(np.arange(3), NEW_ROWS)
    for split in range(SPLITS):
        for grouping, counts in flags.items():
            scores = {"a": generator.exponential(SCALES[new_categories])}
            p_values = find_p_values(
                fit_calibration(generator, grouping),
                scores,
                new_categories,
                1,
                new_categories if grouping == "group" else None,
            )
            counts[split] = np.bincount(new_categories, p_values.p_value <= fpr)
    for c, rows in enumerate(ROWS):
        k = math.floor(fpr * (rows + 1))
        law = stats.betabinom(NEW_ROWS, k, rows + 1 - k)
        assert is_beta_binomial(generator, flags[kind][:, c].astype(int), law)
    pooled_rates = flags[None].mean(axis=0) / NEW_ROWS
    assert pooled_rates[0] < 0.01
    assert pooled_rates[2] > 0.2


def test_interval_coverage_is_valid_per_group_only_with_groups():
    generator = np.random.default_rng(1)
    coverage, hits = 0.9, {"group": np.zeros((SPLITS, 3)), None: np.zeros((SPLITS, 3))}
    groups, new_groups = np.repeat(np.arange(3), ROWS), np.repeat(np.arange(3), NEW_ROWS)
    for split in range(SPLITS):
        for grouping, counts in hits.items():
            y = generator.normal(0, SCALES[groups])  # the model predicts mean 0 and std 1
            nonconformity = target_nonconformity(np.zeros(len(y)), np.ones(len(y)), y)[None]
            tables = fit_calibration(generator, grouping, nonconformity=nonconformity).rank_tables[
                1
            ]
            target = generator.normal(0, SCALES[new_groups])
            ends = tables.intervals(
                np.zeros(len(new_groups)), np.ones(len(new_groups)), coverage, categories=new_groups
            )
            counts[split] = np.bincount(new_groups, (ends[:, 0] <= target) & (target <= ends[:, 1]))
    for c, rows in enumerate(ROWS):
        k = math.ceil(coverage * (rows + 1))
        assert is_beta_binomial(
            generator, hits["group"][:, c].astype(int), stats.betabinom(NEW_ROWS, k, rows + 1 - k)
        )
    pooled_coverage = hits[None].mean(axis=0) / NEW_ROWS
    assert pooled_coverage[0] > 0.99
    assert pooled_coverage[2] < 0.8


def test_set_coverage_is_valid_per_class_only_with_classes():
    """The logit of the true class leads by 5, 3 or 1, plus noise."""
    generator = np.random.default_rng(2)
    coverage, hits = 0.9, {"class": np.zeros((SPLITS, 3)), None: np.zeros((SPLITS, 3))}
    labels, new_labels = np.repeat(np.arange(3), ROWS), np.repeat(np.arange(3), NEW_ROWS)

    def sample_probs(y):
        logits = (
            generator.normal(size=(len(y), 3))
            + np.eye(3)[y] * np.array([5.0, 3.0, 1.0])[y][:, None]
        )
        return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    for split in range(SPLITS):
        for grouping, counts in hits.items():
            nonconformity = class_nonconformity(sample_probs(labels), labels)[None]
            tables = fit_calibration(generator, grouping, nonconformity=nonconformity).rank_tables[
                1
            ]
            sets = tables.prediction_sets(
                mass_above(sample_probs(new_labels)), coverage, categories=new_labels
            )
            counts[split] = np.bincount(new_labels, sets[np.arange(len(new_labels)), new_labels])
    k = math.ceil(coverage * (ROWS[2] + 1))
    law = stats.betabinom(NEW_ROWS, k, ROWS[2] + 1 - k)
    assert is_beta_binomial(generator, hits["class"][:, 2].astype(int), law)
    for c, rows in enumerate(ROWS):
        class_coverage = hits["class"][:, c] / NEW_ROWS
        assert (
            class_coverage.mean()
            > math.ceil(coverage * (rows + 1)) / (rows + 1)
            - 5.5 * law.std() / NEW_ROWS / SPLITS**0.5
        )
    assert hits[None].mean(axis=0)[2] / NEW_ROWS < 0.85


def test_answer_risk_is_controlled_per_group_only_with_groups():
    generator = np.random.default_rng(3)
    risk, fpr, rows = 0.2, 0.05, np.array([150, 150, 150])
    error = np.array([0.01, 0.05, 0.2])
    groups = np.repeat(np.arange(3), rows)
    violations = {"group": np.zeros(3), None: np.zeros(3)}
    for _ in range(SPLITS):
        uncertainty = generator.random((1, len(groups)))
        is_wrong = generator.random((1, len(groups))) < error[groups] * (1 + uncertainty)
        answers = Answers.from_splits(generator.random((1, 200)), uncertainty, is_wrong)
        for grouping, count in violations.items():
            tables = fit_calibration(generator, grouping, rows, answers=answers).rank_tables[1]
            thresholds = np.broadcast_to(tables.thresholds(fpr, risk, np.arange(3)), 3)
            count += (thresholds >= 0) & (error * (1 + np.maximum(thresholds, 0) / 2) > risk)
    max_violations = stats.binom(SPLITS, 0.05).isf(1e-7)
    assert np.all(violations["group"] <= max_violations)
    assert violations[None][2] > 2 * max_violations


def test_small_category_gets_valid_but_trivial_results():
    generator = np.random.default_rng(4)
    rows = np.array([50, 50, 8])
    by_class = fit_calibration(generator, "class", rows)
    assert by_class.smallest_fpr == 1 / 51
    tables = by_class.rank_tables[1]
    extreme_scores = {"a": np.full(3, 1e6)}
    p_value = find_p_values(by_class, extreme_scores, np.arange(3), 1).p_value
    assert p_value.tolist() == [1 / 51, 1 / 51, 1 / 9]
    sets = tables.prediction_sets(np.full((1, 3), 0.999999), 0.95)
    assert sets.tolist() == [[False, False, True]]
    by_group = fit_calibration(generator, "group", rows).rank_tables[1]
    ends = by_group.intervals(np.zeros(3), np.ones(3), 0.95, categories=np.arange(3))
    assert np.isinf(ends).tolist() == [[False, False], [False, False], [True, True]]


def test_unknown_group_uses_most_cautious_group_with_enough_rows():
    generator = np.random.default_rng(5)
    rows = np.array([MIN_CAUTIOUS_ROWS, 50, MIN_CAUTIOUS_ROWS - 1])
    model = fit_calibration(generator, "group", rows)
    tables, scores = model.rank_tables[1], generator.exponential(2.0, 40)
    unknown = np.full(40, UNKNOWN)
    actual = find_p_values(model, {"a": scores}, np.zeros(40, dtype=int), 1, unknown)
    by_group = [
        find_p_values(model, {"a": scores}, np.zeros(40, dtype=int), 1, np.full(40, g))
        for g in (0, 1)
    ]
    assert actual.p_value.tolist() == np.maximum(by_group[0].p_value, by_group[1].p_value).tolist()
    without_groups = find_p_values(model, {"a": scores}, np.zeros(40, dtype=int), 1)
    assert without_groups.p_value.tolist() == actual.p_value.tolist()
    widest = max(quantile(table.nonconformity, 0.9) for table in tables.by_category[:2])
    ends = tables.intervals(np.zeros(1), np.ones(1), 0.9)
    assert ends.tolist() == [[-widest, widest]]
    small = fit_calibration(generator, "group", np.array([3, 2, 4]))
    assert find_p_values(small, {"a": np.array([1e6])}, np.array([0]), 1).p_value == 1 / 3


def test_rows_of_unknown_group_are_not_answered():
    generator = np.random.default_rng(6)
    correct_answers = Answers.from_splits(
        generator.random((1, 50)),
        generator.random((1, ROWS.sum())),
        np.zeros((1, ROWS.sum()), bool),
    )
    tables = fit_calibration(generator, "group", answers=correct_answers).rank_tables[1]
    assert tables.thresholds(0.05, 0.2, np.array([0, UNKNOWN])).tolist() == [1.0, -math.inf]
    assert tables.certifies(0.05, 0.2)
    assert tables.smallest_risk(0.05) == tables.by_category[2].smallest_risk(0.05)


@pytest.mark.parametrize("kind", ["class", "group"])
def test_categories_round_trip_and_invalid_tensors_are_refused(kind):
    original = fit_calibration(np.random.default_rng(7), kind)
    tensors = original.tensors()
    restored = Calibration.from_tensors(tensors, NAMES, 3, (kind, CATEGORIES))
    for expected, actual in zip(
        original.rank_tables[1].by_category, restored.rank_tables[1].by_category, strict=True
    ):
        assert expected.statistic.tolist() == actual.statistic.tolist()
        assert expected.nonconformity.tolist() == actual.nonconformity.tolist()
    assert Calibration.from_tensors(tensors, NAMES, 3).rank_tables[1].by_category == ()
    for name in ("category.judged", "category.true"):
        for invalid in (
            tensors[name] + 3,
            tensors[name] - 1,
            tensors[name][..., :-1],
            tensors[name].astype(float),
        ):
            with pytest.raises(ValueError, match=name):
                Calibration.from_tensors({**tensors, name: invalid}, NAMES, 3, (kind, CATEGORIES))
    with pytest.raises(ValueError, match="judged"):
        Calibration.from_tensors(
            {n: t for n, t in tensors.items() if "category" not in n}, NAMES, 3, (kind, ("a",))
        )


def test_groups_without_ranking_rows_are_unknown():
    categories = Categories.by_group(("a", "b", "c"), np.array([2, 0, 2]), 2)
    assert categories.names == ("a", "c")
    assert categories.judged.tolist() == [[1, 0, 1], [1, 0, 1]]
    assert categories.judged_rows.tolist() == categories.true_rows.tolist() == [1, 2]
