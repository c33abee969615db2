import csv
from itertools import pairwise

import numpy as np
import pytest

from tests.support.recipes import content_with, recipe_with
from tests.support.refusals import assert_invalid
from training.data import load
from training.data.rows import Keys, SplitSizes, default_test_fraction, hold_out, split, split_sizes
from training.recipe import Recipe

NAMES = ("validation", "reference", "ranking")


def get_parts(sizes, rows, keys=None):
    parts = sizes.split(rows, keys)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(rows))
    return parts


def test_shares_are_rounded_and_default_sizes_suit_any_row_count():
    assert SplitSizes(0.1, 0.05, 0.2, 0).rows(100) == (10, 5, 20)
    assert SplitSizes(None, None, None, 0).rows(80) == (11, 10, 19)
    assert SplitSizes(None, None, None, 0).rows(10_000_000) == (5_000, 2_000, 4_000)
    assert (default_test_fraction(100), default_test_fraction(10_000_000)) == (0.2, 0.001)
    for rows in range(8, 3_000):
        assert sum(SplitSizes(None, None, None, 0).rows(rows)) <= rows // 2


def test_share_smaller_than_one_row_is_rejected():
    assert_invalid(
        lambda: SplitSizes(0.001, 1, 1, 0).rows(100),
        "data.validation: expected at least one of 100 training rows",
    )


@pytest.mark.parametrize("counts", [(500, 300, 200), (970, 20, 10), (334, 333, 333)])
def test_stratified_splits_preserve_class_shares(counts):
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(3), counts))
    parts = get_parts(SplitSizes(0.1, 0.1, 0.2, 5, is_stratified=True), 1000, Keys(labels))
    for part in parts:
        actual = np.bincount(labels[part], minlength=3)
        assert np.all(np.abs(actual - len(part) * np.array(counts) / 1000) <= 2)


def test_stratified_splits_select_all_rows_with_equal_probability():
    labels = np.repeat(np.arange(2), [33, 7])
    counts = np.zeros((4, 40))
    for seed in range(2000):
        for part, index in enumerate(
            SplitSizes(4, 5, 9, seed, is_stratified=True).split(40, Keys(labels))
        ):
            counts[part, index] += 1
    expected = np.array([4, 5, 9, 22])[:, None] / 40
    error = np.sqrt(expected * (1 - expected) / 2000)
    assert np.abs(counts / 2000 - expected).max() < 5 * error.max()


def test_stratified_splits_do_not_depend_on_class_numbering():
    labels = np.random.default_rng(0).integers(0, 3, 60)
    sizes = SplitSizes(6, 6, 6, 0, is_stratified=True)
    first, second = (sizes.split(60, Keys(numbers)) for numbers in (labels, 2 - labels))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_stratified_calibration_keeps_the_false_positive_rate():
    """Measure the flag's rate at alpha 0.1 over 4,000 splits, with scores that depend on class."""
    rng = np.random.default_rng(3)
    flags = []
    for seed in range(4000):
        labels = (rng.random(61) < 0.2).astype(np.int64)
        scores = labels * 3 + rng.normal(size=61)
        ranking = SplitSizes(5, 5, 19, seed, is_stratified=True).split(60, Keys(labels[:60]))[2]
        flags.append((1 + (scores[ranking] >= scores[60]).sum()) / 20 <= 0.1)
    assert np.mean(flags) < 0.1 + 3 * np.sqrt(0.09 / 4000)


def test_groups_are_never_divided_between_splits():
    groups = np.random.default_rng(0).integers(0, 60, 600)
    parts = get_parts(SplitSizes(60, 60, 90, 1), 600, Keys(groups=groups))
    train, test = hold_out(600, 0.2, Keys(groups=groups))
    for partition in (parts, (train, test)):
        group_sets = [set(groups[part].tolist()) for part in partition]
        assert sum(map(len, group_sets)) == len(set().union(*group_sets))
    assert [len(part) for part in parts[:3]] == pytest.approx([60, 60, 90], abs=20)
    assert len(test) == pytest.approx(120, abs=20)


def test_too_large_groups_are_rejected():
    groups = np.repeat([0, 1, 2], 30)
    assert_invalid(
        lambda: SplitSizes(5, 5, 5, 0).split(90, Keys(groups=groups)),
        "data.group: expected more groups, of up to 5 rows, for the validation split, "
        "got 3 groups of at least 30 rows",
    )


def test_latest_rows_are_used_for_calibration_and_test():
    times = np.random.default_rng(0).permutation(200).astype(float)
    train, test = hold_out(200, 0.1, Keys(times=times))
    assert times[test].min() > times[train].max()
    validation, reference, ranking, model = get_parts(
        SplitSizes(20, 20, 30, 0), 180, Keys(times=times[train])
    )
    times = times[train]
    assert times[model].max() < times[validation].min() < times[validation].max()
    assert times[validation].max() < min(times[reference].min(), times[ranking].min())
    assert times[reference].max() > times[ranking].min()
    assert times[ranking].max() > times[reference].min()


def write_visits(folder, rows=120):
    lines = [("when", "patient", "pulse", "ill")]
    for i in range(rows):
        date = np.datetime64("2023-01-01") + (i * 37) % rows
        lines.append((str(date), f"p{i % 30}", 60 + i % 17, ["no", "yes"][i % 2]))
    with (folder / "visits.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)


def visits(folder, **data):
    sizes = {"validation": 0.1, "reference": 0.1, "ranking": 0.2}
    recipe = recipe_with(data={"source": "csv:visits.csv", "target": "ill", **sizes, **data})
    dataset = load(recipe, folder)
    return dataset, split(dataset, split_sizes(recipe))


def test_tables_are_split_by_the_configured_group_or_time_column(tmp_path):
    write_visits(tmp_path)
    data, _ = visits(tmp_path, group="patient", columns={"when": "ignored"})
    assert [column.name for column in data.columns] == ["pulse"]
    assert len(set(data.groups.tolist())) == 24
    data, splits = visits(tmp_path, time="when", columns={"patient": "ignored", "when": "time"})
    assert [column.name for column in data.columns] == ["when", "pulse"]
    days = [part.x[:, 0] for part in (splits.train, splits.validation, splits.ranking, splits.test)]
    assert all(earlier.max() < later.min() for earlier, later in pairwise(days))
    _, splits = visits(tmp_path, columns={"patient": "ignored"})
    assert [int(part.y.sum()) * 2 for part in (splits.train, splits.ranking)] == pytest.approx(
        [57, 19], abs=2
    )


def test_missing_groups_and_unknown_split_columns_are_rejected(tmp_path):
    write_visits(tmp_path)
    text = (tmp_path / "visits.csv").read_text()
    (tmp_path / "visits.csv").write_text(text.replace(",p3,", ",,", 1))
    assert_invalid(
        lambda: visits(tmp_path, group="patient"),
        "data.group: expected a value of patient in every row",
    )
    assert_invalid(lambda: visits(tmp_path, time="day"), "data.time: expected one of the columns")
    assert_invalid(
        lambda: visits(tmp_path, time="ill"), "data.time: expected a column other than the target"
    )
    assert_invalid(
        lambda: load(recipe_with(data={"group": "a"}), tmp_path),
        "data.group: expected no value, because `digits`",
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"validation": 1.5}, "a number of rows, or a share above 0"),
        ({"reference": 0}, "a number of rows, or a share above 0"),
        ({"group": "a", "time": "b"}, "no value with group"),
        ({"ranking": 0.5}, "above 0 and below 0.5"),
    ],
)
def test_recipe_rejects_invalid_or_conflicting_split_options(data, message):
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate(content_with(data=data))
