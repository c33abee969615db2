from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.recipes import get_recipe
from tests.support.refusals import assert_invalid
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
def test_mostly_numeric_column_is_rejected_with_cells_and_setting(tmp_path, kind):
    message = "column age: expected numbers, like 37 of its 40 values (set data.missing_values = ["
    assert_invalid(lambda: read(tmp_path, kind, TABLE), message)
    space = "" if kind == "csv" else " "
    assert_invalid(
        lambda: read(tmp_path, kind, TABLE), f"'?' in row 3, '{space}n/k' in row 17, '?' in row 30"
    )
    assert_invalid(lambda: read(tmp_path, kind, TABLE), 'data.missing_values = ["?", "n/k"]')
    ages = [*(["?"] * 4), *AGES[4:]]
    assert_invalid(lambda: read(tmp_path, kind, {**TABLE, "age": ages}), "'?' in row 2 and 1 more")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_suggested_setting_reads_cells_as_missing(tmp_path, kind):
    data = read(tmp_path, kind, TABLE, missing_values=["?", "n/k"])
    age = data.columns[0]
    assert (age.name, age.kind, age.indicator) == ("age", "numeric", True)
    assert data.shape == (3,)
    missing = np.concatenate([data.train.x, data.test.x])[:, 1]
    assert missing.sum() == len(BAD)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_column_declared_categorical_keeps_every_value(tmp_path, kind):
    data = read(tmp_path, kind, TABLE, columns={"age": "categorical"})
    assert data.columns[0].kind == "categorical"
    reloaded = load(get_recipe(f"{kind}:a.{kind}", target="label"), tmp_path, data.columns)
    assert reloaded.columns == data.columns


def test_version_reads_new_file_in_formats_of_its_training_data(tmp_path):
    """In the new file alone, 70.0 would imply decimal points, and 01.02.2024 fits two formats."""
    shares = [f"{i},5 %" for i in range(ROWS)]
    days = [f"{1 + i % 28}/02/2024" for i in range(ROWS)]
    quoted = [f'"{share}"' for share in shares]
    table = {"age": AGES, "share": quoted, "day": days, "label": LABELS}
    data = read(tmp_path, "csv", table)
    new = {**table, "age": [f"{age}.0" for age in AGES], "day": ["03/02/2024"] * ROWS}
    write(tmp_path, "csv", new)
    new_data = load(get_recipe("csv:a.csv", target="label"), tmp_path, data.columns)
    np.testing.assert_array_equal(new_data.train.x[:, :2], data.train.x[:, :2])
    day = data.columns[2]
    expected = (day.mean - 1706918400) / day.std  # 3 February
    assert new_data.train.x[0, 2] == pytest.approx(-expected, abs=1e-5)
    write(tmp_path, "csv", {**new, "share": ["half", *quoted[1:]]})
    assert_invalid(
        lambda: load(get_recipe("csv:a.csv", target="label"), tmp_path, data.columns),
        "column share: expected numbers such as '1200,5 %', got 'half' in row 0",
    )


FORMATS = {
    "accounting": {"value": [f"({i})" if i % 3 == 0 else str(i) for i in range(ROWS)]},
    "trailing minus": {"value": [f"{i}-" if i % 3 == 0 else str(i) for i in range(ROWS)]},
    "currency": {"value": [f'"${i},234.50"' for i in range(1, ROWS + 1)]},
    "percent": {"value": [f"{i}.5%" for i in range(ROWS)]},
    "duration": {"value": [f"{i}:30:00" for i in range(ROWS)]},
    "points between thousands": {
        "price": [f'"1.{100 + i},50"' if i % 2 else f'"{i},50"' for i in range(ROWS)],
        "width": [f'"2,{100 + i}"' for i in range(ROWS)],
    },
    "decimal commas": {"width": [f'"{i},25"' for i in range(ROWS)]},
}


@pytest.mark.parametrize("columns", FORMATS.values(), ids=FORMATS)
def test_training_file_has_the_same_encoding_with_its_versions_columns(tmp_path, columns):
    data = read(tmp_path, "csv", {**columns, "label": LABELS})
    assert [column.kind for column in data.columns] == ["numeric"] * len(columns)
    again = load(get_recipe("csv:a.csv", target="label"), tmp_path, data.columns)
    np.testing.assert_array_equal(again.train.x, data.train.x)


def test_configured_formats_replace_those_of_a_version(tmp_path):
    days = [f"{1 + i % 28}/02/2024" for i in range(ROWS)]
    table = {"price": [f"${i}.50" for i in range(ROWS)], "day": days, "label": LABELS}
    data = read(tmp_path, "csv", table)
    write(tmp_path, "csv", {**table, "price": ['"$1,5"'] * ROWS, "day": ["03/04/2024"] * ROWS})
    options = {"target": "label", "date_format": "%m/%d/%Y", "decimal": ","}
    x = load(get_recipe("csv:a.csv", **options), tmp_path, data.columns).train.x
    price, day = data.columns
    assert x[0, 0] == pytest.approx((1.5 - price.mean) / price.std, abs=1e-5)
    assert x[0, 1] == pytest.approx((1709510400 - day.mean) / day.std, abs=1e-4)  # 4 March


def test_version_reads_the_times_that_split_the_rows(tmp_path):
    days = [f"{1 + i % 28}/02/2024" for i in range(ROWS)]
    table = {"age": AGES, "day": days, "label": LABELS}
    options = {"time": "day", "columns": {"day": "time"}, "target": "label"}
    data = read(tmp_path, "csv", table, **options)
    write(tmp_path, "csv", {**table, "day": [f"{1 + i % 12}/02/2024" for i in range(ROWS)]})
    new = load(get_recipe("csv:a.csv", **options), tmp_path, data.columns)
    assert {datetime.fromtimestamp(time, UTC).month for time in new.times} == {2}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("num_codes", [5, ROWS])
def test_column_with_too_few_numbers_is_categorical(tmp_path, kind, num_codes):
    """Up to 35 of 40 cells are numbers, which is below the limit of 90 %."""
    codes = [f"A{i % 3}" if i < num_codes else str(i % 4) for i in range(ROWS)]
    data = read(tmp_path, kind, {**TABLE, "age": codes})
    assert data.columns[0].kind == "categorical"


def test_numbers_can_have_a_plus_sign(tmp_path):
    data = read(tmp_path, "csv", {**TABLE, "age": [f"+{age}" for age in AGES]})
    assert data.columns[0].kind == "numeric"


def test_number_with_underscore_is_rejected_with_its_row(tmp_path):
    assert_invalid(
        lambda: read(tmp_path, "csv", {**TABLE, "age": [*AGES[:-1], "1_000"]}), "'1_000' in row 39"
    )


def test_numeric_strings_are_numeric_only_if_configured(tmp_path):
    table = {**TABLE, "age": AGES}
    assert read(tmp_path, "parquet", table).columns[0].kind == "categorical"
    assert read(tmp_path, "parquet", table, columns={"age": "numeric"}).columns[0].kind == "numeric"


@pytest.mark.parametrize(
    ("kind", "name", "is_first"),
    [("csv", "", True), ("csv", "Unnamed: 0", True), ("parquet", "__index_level_0__", False)],
)
def test_unnamed_pandas_index_is_ignored_with_a_message(tmp_path, capsys, kind, name, is_first):
    table = {**TABLE, "age": AGES}
    index = {name: list(range(ROWS))}
    with print_messages():
        data = read(tmp_path, kind, {**index, **table} if is_first else {**table, **index})
    assert [column.name for column in data.columns] == ["age", "height"]
    assert (
        f"ignoring the column {name!r}, which is pandas' unnamed index" in capsys.readouterr().err
    )


def test_index_named_in_the_recipe_is_kept(tmp_path):
    table = {"Unnamed: 0": list(range(ROWS)), **TABLE, "age": AGES}
    data = read(tmp_path, "csv", table, columns={"Unnamed: 0": "numeric"})
    assert [column.name for column in data.columns] == ["Unnamed: 0", "age", "height"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rows_without_a_target_are_dropped_and_counted(tmp_path, capsys, kind, task):
    targets = LABELS if task == "classification" else HEIGHTS
    labels = [None if i in (0, 7) else label for i, label in enumerate(targets)]
    table = {"age": AGES, "height": HEIGHTS, "label": labels}
    with print_messages():
        data = read(tmp_path, kind, table, task)
    assert len(data.train) + len(data.test) == ROWS - 2
    assert "dropping 2 of 40 rows without a value of label" in capsys.readouterr().err
    complete_rows = {
        name: [v for i, v in enumerate(values) if i not in (0, 7)] for name, values in table.items()
    }
    assert read(tmp_path, kind, complete_rows, task).digest() == data.digest()


def test_rows_with_missing_values_in_the_target_are_dropped(tmp_path):
    labels = ["?" if i == 5 else label for i, label in enumerate(LABELS)]
    data = read(tmp_path, "csv", {**TABLE, "age": AGES, "label": labels}, missing_values=["?"])
    assert data.classes == ("no", "yes")
    assert len(data.train) + len(data.test) == ROWS - 1
