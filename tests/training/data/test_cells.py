import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.recipes import get_recipe
from tests.support.refusals import refused
from training.commands import print_messages
from training.data import load

ROWS = 40
AGES = [str(20 + i) for i in range(ROWS)]
BAD = {3: "?", 17: " n/k", 30: "?"}
MOSTLY_AGES = [BAD.get(i, age) for i, age in enumerate(AGES)]
HEIGHTS = [150.0 + i for i in range(ROWS)]
LABELS = [["no", "yes"][i % 2] for i in range(ROWS)]


def write(folder, kind, columns):
    if kind == "parquet":
        parquet.write_table(pa.table(columns), folder / "a.parquet")
        return
    rows = zip(*columns.values(), strict=True)
    lines = [
        ",".join(columns),
        *(",".join("" if c is None else str(c) for c in row) for row in rows),
    ]
    (folder / "a.csv").write_text("\n".join(lines) + "\n")


def read(folder, kind, table, task="classification", **data):
    write(folder, kind, table)
    return load(get_recipe(f"{kind}:a.{kind}", task, **{"target": "label", **data}), folder)


TABLE = {"age": MOSTLY_AGES, "height": HEIGHTS, "label": LABELS}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_that_is_numeric_but_for_a_few_cells_is_refused_with_the_cells_and_the_key(
    tmp_path, kind
):
    message = "column age: expected numbers, like 37 of its 40 values (set data.missing_values = ["
    refused(lambda: read(tmp_path, kind, TABLE), message)
    blank = "" if kind == "csv" else " "
    refused(
        lambda: read(tmp_path, kind, TABLE), f"'?' in row 3, '{blank}n/k' in row 17, '?' in row 30"
    )
    refused(lambda: read(tmp_path, kind, TABLE), 'data.missing_values = ["?", "n/k"]')
    large = [*(["?"] * 4), *AGES[4:]]
    refused(lambda: read(tmp_path, kind, {**TABLE, "age": large}), "'?' in row 2 and 1 more")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_key_that_the_refusal_names_reads_those_cells_as_missing(tmp_path, kind):
    data = read(tmp_path, kind, TABLE, missing_values=["?", "n/k"])
    age = data.columns[0]
    assert (age.name, age.kind, age.indicator) == ("age", "numeric", True)
    assert data.shape == (3,)
    missing = np.concatenate([data.train.x, data.test.x])[:, 1]
    assert missing.sum() == len(BAD)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_declared_categorical_keeps_every_value(tmp_path, kind):
    data = read(tmp_path, kind, TABLE, columns={"age": "categorical"})
    assert data.columns[0].kind == "categorical"
    again = load(get_recipe(f"{kind}:a.{kind}", target="label"), tmp_path, data.columns)
    assert again.columns == data.columns


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("words", [5, ROWS])
def test_a_column_whose_values_are_categories_is_categorical(tmp_path, kind, words):
    """Numbers are at most 35 of 40: less than nine tenths."""
    codes = [f"A{i % 3}" if i < words else str(i % 4) for i in range(ROWS)]
    data = read(tmp_path, kind, {**TABLE, "age": codes})
    assert data.columns[0].kind == "categorical"


def test_a_plus_sign_makes_a_number(tmp_path):
    data = read(tmp_path, "csv", {**TABLE, "age": [f"+{age}" for age in AGES]})
    assert data.columns[0].kind == "numeric"


def test_underscores_make_no_numbers_but_are_named(tmp_path):
    refused(
        lambda: read(tmp_path, "csv", {**TABLE, "age": [*AGES[:-1], "1_000"]}), "'1_000' in row 39"
    )


def test_strings_of_numbers_are_numeric_where_the_recipe_says_so(tmp_path):
    table = {**TABLE, "age": AGES}
    assert read(tmp_path, "parquet", table).columns[0].kind == "categorical"
    assert read(tmp_path, "parquet", table, columns={"age": "numeric"}).columns[0].kind == "numeric"


@pytest.mark.parametrize(
    ("kind", "name", "first"),
    [("csv", "", True), ("csv", "Unnamed: 0", True), ("parquet", "__index_level_0__", False)],
)
def test_pandas_unnamed_index_is_left_out_and_said(tmp_path, capsys, kind, name, first):
    table = {**TABLE, "age": AGES}
    index = {name: list(range(ROWS))}
    with print_messages():
        data = read(tmp_path, kind, {**index, **table} if first else {**table, **index})
    assert [column.name for column in data.columns] == ["age", "height"]
    assert (
        f"ignoring the column {name!r}, which is pandas' unnamed index" in capsys.readouterr().err
    )


def test_an_index_that_the_recipe_names_is_kept(tmp_path):
    table = {"Unnamed: 0": list(range(ROWS)), **TABLE, "age": AGES}
    data = read(tmp_path, "csv", table, columns={"Unnamed: 0": "numeric"})
    assert [column.name for column in data.columns] == ["Unnamed: 0", "age", "height"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rows_without_a_target_are_dropped_and_counted(tmp_path, capsys, kind, task):
    full = LABELS if task == "classification" else HEIGHTS
    labels = [None if i in (0, 7) else label for i, label in enumerate(full)]
    table = {"age": AGES, "height": HEIGHTS, "label": labels}
    with print_messages():
        data = read(tmp_path, kind, table, task)
    assert len(data.train) + len(data.test) == ROWS - 2
    assert "dropping 2 of 40 rows without a value of label" in capsys.readouterr().err
    retained = {
        name: [v for i, v in enumerate(values) if i not in (0, 7)] for name, values in table.items()
    }
    assert read(tmp_path, kind, retained, task).digest() == data.digest()


def test_cells_of_the_target_that_say_missing_drop_their_rows(tmp_path):
    labels = ["?" if i == 5 else label for i, label in enumerate(LABELS)]
    data = read(tmp_path, "csv", {**TABLE, "age": AGES, "label": labels}, missing_values=["?"])
    assert data.classes == ("no", "yes")
    assert len(data.train) + len(data.test) == ROWS - 1
