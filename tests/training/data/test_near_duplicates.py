import numpy as np
import pytest

from tests.support.environment import working_in
from tests.support.recipes import get_recipe
from tests.support.refusals import assert_invalid
from training.__main__ import main
from training.data import load
from training.data.findings import duplicate_warnings
from training.data.rows import Rows, Splits

RNG = np.random.default_rng(0)
CLASSES = ["a", "b", "c", "d"]


def make_splits(dtype=np.float32):
    train = (RNG.normal(size=(50, 4)) * 100).astype(dtype)
    parts = [(RNG.normal(size=(20, 4)) * 100).astype(dtype) for _ in range(4)]
    for part, copies in zip(parts, (5, 0, 1, 20), strict=True):
        part[:copies] = train[:copies]
    return Splits(*(Rows(x, np.zeros(len(x), dtype=np.int64)) for x in (train, *parts)))


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_copies_of_training_rows_are_counted_by_split(dtype):
    splits = make_splits(dtype)
    (warning,) = duplicate_warnings(splits)
    assert "5 of 20 validation, 20 of 20 test" in warning
    assert duplicate_warnings(Splits(splits.train, *[splits.reference] * 4)) == []


def write(folder, copies):
    rows = [
        f"{RNG.normal():.4f},{RNG.normal():.4f},{CLASSES[i % 4]},{CLASSES[i % 4]}"
        for i in range(120)
    ] * copies
    (folder / "a.csv").write_text("size,weight,code,kind\n" + "\n".join(rows) + "\n")


@pytest.mark.parametrize("copies", [1, 2])
def test_inspect_reports_copies_across_splits(tmp_path, capsys, copies):
    write(tmp_path, copies)
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:a.csv", "--target", "kind"]) == 0
    assert ("rows that equal a training row" in capsys.readouterr().out) == (copies == 2)


def test_tables_leave_classes_out_before_encoding_columns(tmp_path):
    write(tmp_path, 1)
    full = load(get_recipe("csv:a.csv", target="kind"), tmp_path)
    reduced = load(get_recipe("csv:a.csv", target="kind", leave_out=["b"]), tmp_path)
    assert reduced.classes == ("a", "c", "d")
    assert reduced.columns[2].categories == ("a", "c", "d")
    assert len(reduced.left_out) == int((full.test.y == 1).sum()) > 0
    assert len(reduced.test) + len(reduced.left_out) == len(full.test)
    assert (reduced.left_out[:, -1] == 1).all()  # an unknown code
    assert reduced.left_out.shape[1] == reduced.train.x.shape[1]
    assert_invalid(
        lambda: load(get_recipe("csv:a.csv", target="kind", leave_out=["z"]), tmp_path),
        "data.leave_out: expected some of ['a', 'b', 'c', 'd']",
    )
    assert_invalid(
        lambda: load(get_recipe("csv:a.csv", target="kind", leave_out=["a", "b", "c"]), tmp_path),
        "data.leave_out: expected at least two remaining classes",
    )
    assert_invalid(
        lambda: load(
            get_recipe("csv:a.csv", "regression", target="size", leave_out=["a"]), tmp_path
        ),
        "data.leave_out: expected an empty list for regression",
    )
