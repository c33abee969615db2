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
ROWS = np.array([79, 59, 99])  # ranking rows of each category
NEW = 60
SCALES = np.array([0.3, 1.0, 3.0])
CATEGORIES = ("easy", "usual", "hard")


def calibration(generator, kind, rows=ROWS, **changed):
    """A calibration whose score `a` has another scale in each category."""
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
    options = {"nonconformity": generator.random((1, len(category))), "answers": None} | changed
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
def test_the_flag_keeps_its_rate_in_each_category_where_that_of_all_rows_does_not(kind):
    generator = np.random.default_rng(0)
    fpr, flags = 0.1, {kind: np.zeros((SPLITS, 3)), None: np.zeros((SPLITS, 3))}
    new = np.repeat(np.arange(3), NEW)
    for split in range(SPLITS):
        for by, counts in flags.items():
            scores = {"a": generator.exponential(SCALES[new])}
            p_values = find_p_values(
                calibration(generator, by), scores, new, 1, new if by == "group" else None
            )
            counts[split] = np.bincount(new, p_values.p_value <= fpr)
    for c, rows in enumerate(ROWS):
        k = math.floor(fpr * (rows + 1))
        law = stats.betabinom(NEW, k, rows + 1 - k)
        assert is_beta_binomial(generator, flags[kind][:, c].astype(int), law)
    of_all = flags[None].mean(axis=0) / NEW
    assert of_all[0] < 0.01
    assert of_all[2] > 0.2


def test_intervals_hold_the_target_in_each_group_where_those_of_all_rows_do_not():
    generator = np.random.default_rng(1)
    coverage, stored = 0.9, {"group": np.zeros((SPLITS, 3)), None: np.zeros((SPLITS, 3))}
    groups, new = np.repeat(np.arange(3), ROWS), np.repeat(np.arange(3), NEW)
    for split in range(SPLITS):
        for by, counts in stored.items():
            y = generator.normal(0, SCALES[groups])  # the model predicts 0 -/+ 1 of every row
            wrong_by = target_nonconformity(np.zeros(len(y)), np.ones(len(y)), y)[None]
            tables = calibration(generator, by, nonconformity=wrong_by).rank_tables[1]
            target = generator.normal(0, SCALES[new])
            ends = tables.intervals(np.zeros(len(new)), np.ones(len(new)), coverage, categories=new)
            counts[split] = np.bincount(new, (ends[:, 0] <= target) & (target <= ends[:, 1]))
    for c, rows in enumerate(ROWS):
        k = math.ceil(coverage * (rows + 1))
        assert is_beta_binomial(
            generator, stored["group"][:, c].astype(int), stats.betabinom(NEW, k, rows + 1 - k)
        )
    of_all = stored[None].mean(axis=0) / NEW
    assert of_all[0] > 0.99
    assert of_all[2] < 0.8


def test_sets_hold_each_class_where_those_of_all_rows_do_not():
    """Classes of which the model gives the right one's logit 5, 3 and 1 more than the others', and
    noise."""
    generator = np.random.default_rng(2)
    coverage, stored = 0.9, {"class": np.zeros((SPLITS, 3)), None: np.zeros((SPLITS, 3))}
    true, new = np.repeat(np.arange(3), ROWS), np.repeat(np.arange(3), NEW)

    def probabilities(y):
        logits = (
            generator.normal(size=(len(y), 3))
            + np.eye(3)[y] * np.array([5.0, 3.0, 1.0])[y][:, None]
        )
        return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    for split in range(SPLITS):
        for by, counts in stored.items():
            far = class_nonconformity(probabilities(true), true)[None]
            tables = calibration(generator, by, nonconformity=far).rank_tables[1]
            inside = tables.prediction_sets(
                mass_above(probabilities(new)), coverage, categories=new
            )
            counts[split] = np.bincount(new, inside[np.arange(len(new)), new])
    k = math.ceil(coverage * (ROWS[2] + 1))
    law = stats.betabinom(NEW, k, ROWS[2] + 1 - k)
    assert is_beta_binomial(generator, stored["class"][:, 2].astype(int), law)
    for c, rows in enumerate(ROWS):
        of_class = stored["class"][:, c] / NEW
        assert (
            of_class.mean()
            > math.ceil(coverage * (rows + 1)) / (rows + 1) - 5.5 * law.std() / NEW / SPLITS**0.5
        )
    assert stored[None].mean(axis=0)[2] / NEW < 0.85


def test_the_risk_of_answers_is_kept_in_each_group_where_that_of_all_rows_is_not():
    generator = np.random.default_rng(3)
    risk, fpr, rows = 0.2, 0.05, np.array([150, 150, 150])
    error = np.array([0.01, 0.05, 0.2])
    groups = np.repeat(np.arange(3), rows)
    exceeded = {"group": np.zeros(3), None: np.zeros(3)}
    for _ in range(SPLITS):
        uncertainty = generator.random((1, len(groups)))
        wrong = generator.random((1, len(groups))) < error[groups] * (1 + uncertainty)
        answers = Answers.from_splits(generator.random((1, 200)), uncertainty, wrong)
        for by, count in exceeded.items():
            tables = calibration(generator, by, rows, answers=answers).rank_tables[1]
            largest = np.broadcast_to(tables.thresholds(fpr, risk, np.arange(3)), 3)
            count += (largest >= 0) & (error * (1 + np.maximum(largest, 0) / 2) > risk)
    allowed = stats.binom(SPLITS, 0.05).isf(1e-7)
    assert np.all(exceeded["group"] <= allowed)
    assert exceeded[None][2] > 2 * allowed


def test_a_category_of_few_rows_loses_everything_but_its_guarantee():
    generator = np.random.default_rng(4)
    rows = np.array([50, 50, 8])
    by_class = calibration(generator, "class", rows)
    assert by_class.smallest_fpr == 1 / 51
    tables = by_class.rank_tables[1]
    far = {"a": np.full(3, 1e6)}
    p_value = find_p_values(by_class, far, np.arange(3), 1).p_value
    assert p_value.tolist() == [1 / 51, 1 / 51, 1 / 9]
    inside = tables.prediction_sets(np.full((1, 3), 0.999999), 0.95)
    assert inside.tolist() == [[False, False, True]]
    by_group = calibration(generator, "group", rows).rank_tables[1]
    ends = by_group.intervals(np.zeros(3), np.ones(3), 0.95, categories=np.arange(3))
    assert np.isinf(ends).tolist() == [[False, False], [False, False], [True, True]]


def test_an_unknown_group_is_judged_by_the_most_cautious_of_those_with_enough_rows():
    generator = np.random.default_rng(5)
    rows = np.array([MIN_CAUTIOUS_ROWS, 50, MIN_CAUTIOUS_ROWS - 1])
    model = calibration(generator, "group", rows)
    tables, new = model.rank_tables[1], generator.exponential(2.0, 40)
    unknown = np.full(40, UNKNOWN)
    actual = find_p_values(model, {"a": new}, np.zeros(40, dtype=int), 1, unknown)
    each = [
        find_p_values(model, {"a": new}, np.zeros(40, dtype=int), 1, np.full(40, g)) for g in (0, 1)
    ]
    assert actual.p_value.tolist() == np.maximum(each[0].p_value, each[1].p_value).tolist()
    without = find_p_values(model, {"a": new}, np.zeros(40, dtype=int), 1)
    assert without.p_value.tolist() == actual.p_value.tolist()
    widest = max(quantile(table.nonconformity, 0.9) for table in tables.by_category[:2])
    ends = tables.intervals(np.zeros(1), np.ones(1), 0.9)
    assert ends.tolist() == [[-widest, widest]]
    small = calibration(generator, "group", np.array([3, 2, 4]))
    assert find_p_values(small, {"a": np.array([1e6])}, np.array([0]), 1).p_value == 1 / 3


def test_rows_of_an_unknown_group_are_not_answered():
    generator = np.random.default_rng(6)
    sure = Answers.from_splits(
        generator.random((1, 50)),
        generator.random((1, ROWS.sum())),
        np.zeros((1, ROWS.sum()), bool),
    )
    tables = calibration(generator, "group", answers=sure).rank_tables[1]
    assert tables.thresholds(0.05, 0.2, np.array([0, UNKNOWN])).tolist() == [1.0, -math.inf]
    assert tables.certifies(0.05, 0.2)
    assert tables.smallest_risk(0.05) == tables.by_category[2].smallest_risk(0.05)


@pytest.mark.parametrize("kind", ["class", "group"])
def test_categories_are_read_back_and_wrong_ones_refused(kind):
    content = calibration(np.random.default_rng(7), kind)
    tensors = content.tensors()
    read = Calibration.from_tensors(tensors, NAMES, 3, (kind, CATEGORIES))
    for old, new in zip(
        content.rank_tables[1].by_category, read.rank_tables[1].by_category, strict=True
    ):
        assert old.statistic.tolist() == new.statistic.tolist()
        assert old.nonconformity.tolist() == new.nonconformity.tolist()
    assert Calibration.from_tensors(tensors, NAMES, 3).rank_tables[1].by_category == ()
    for name in ("category.judged", "category.true"):
        for wrong in (
            tensors[name] + 3,
            tensors[name] - 1,
            tensors[name][..., :-1],
            tensors[name].astype(float),
        ):
            with pytest.raises(ValueError, match=name):
                Calibration.from_tensors({**tensors, name: wrong}, NAMES, 3, (kind, CATEGORIES))
    with pytest.raises(ValueError, match="judged"):
        Calibration.from_tensors(
            {n: t for n, t in tensors.items() if "category" not in n}, NAMES, 3, (kind, ("a",))
        )


def test_groups_without_a_ranking_row_are_unknown():
    categories = Categories.by_group(("a", "b", "c"), np.array([2, 0, 2]), 2)
    assert categories.names == ("a", "c")
    assert categories.judged.tolist() == [[1, 0, 1], [1, 0, 1]]
    assert categories.judged_rows.tolist() == categories.true_rows.tolist() == [1, 2]
