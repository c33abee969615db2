import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from model_store.sources.columns import encode_objects, fill_missing
from tests.support.recipes import get_recipe
from tests.support.refusals import assert_invalid
from training.commands import print_messages
from training.data import load
from training.data.rows import split, split_sizes
from training.recipe import load as load_recipe
from training.versions import load_unfitted

ROWS = 40
RNG = np.random.default_rng(0)
AGE = RNG.integers(18, 80, ROWS)
CITY = [["Rome", "Oslo", None][i % 3] for i in range(ROWS)]
VIP = [i % 4 == 0 for i in range(ROWS)]
INCOME = [None if i % 5 == 0 else float(i) / 3 for i in range(ROWS)]
LABEL = [["no", "yes"][i % 2] for i in range(ROWS)]
COLUMNS = {"age": AGE.tolist(), "city": CITY, "vip": VIP, "income": INCOME, "label": LABEL}


def write_csv(folder, columns=COLUMNS):
    lines = [",".join(columns)]
    lines += [
        ",".join("" if cell is None else str(cell) for cell in row)
        for row in zip(*columns.values(), strict=True)
    ]
    (folder / "a.csv").write_text("\n".join(lines) + "\n")


def read(folder, task="classification", source="csv:a.csv", **data):
    return load(get_recipe(source, task, **{"target": "label", **data}), folder)


def objects(columns=COLUMNS, target="label"):
    """Return the rows as JSON objects without the target."""
    names = [name for name in columns if name != target]
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*(columns[name] for name in names), strict=True)
    ]


def test_training_and_service_encode_tables_identically(tmp_path):
    write_csv(tmp_path)
    data = read(tmp_path)
    assert [column.kind for column in data.columns] == [
        "numeric",
        "categorical",
        "categorical",
        "numeric",
    ]
    assert [column.name for column in data.columns] == ["age", "city", "vip", "income"]
    assert (data.columns[1].categories, data.columns[2].categories) == (
        ("Oslo", "Rome"),
        ("false", "true"),
    )
    assert (data.columns[0].indicator, data.columns[3].indicator) == (False, True)
    assert [column.missing for column in data.columns] == [
        any(cell is None for cell in COLUMNS[column.name]) for column in data.columns
    ]
    rows = json.loads(json.dumps(objects()))
    x = encode_objects(rows, data.columns, "inputs")
    all_rows = np.concatenate([data.train.x, data.test.x])
    assert sorted(all_rows.tolist()) == sorted(x.tolist())
    assert data.classes == ("no", "yes")


def test_small_tables_can_be_encoded_with_existing_columns(tmp_path):
    write_csv(tmp_path)
    columns = read(tmp_path).columns
    table = {name: cells[:5] for name, cells in COLUMNS.items()} | {
        "vip": [True, False, None, "maybe", " TRUE "]
    }
    write_csv(tmp_path, table)
    data = load(get_recipe("csv:a.csv", target="label", ranking=100), tmp_path, columns)
    expected = encode_objects(
        objects(table | {"vip": [True, False, None, "maybe", True]}), columns, "inputs"
    )
    fill_missing(expected, columns)
    assert sorted(np.concatenate([data.train.x, data.test.x]).tolist()) == sorted(expected.tolist())


def test_parquet_and_csv_of_the_same_table_have_equal_digests(tmp_path):
    write_csv(tmp_path)
    parquet.write_table(pa.table(COLUMNS), tmp_path / "a.parquet")
    dictionary_table = pa.table(
        {**COLUMNS, "city": pa.array(CITY).dictionary_encode(), "age": pa.array(AGE, pa.int16())}
    )
    parquet.write_table(dictionary_table, tmp_path / "b.parquet")
    digests = {
        read(tmp_path, source=source).digest()
        for source in ("csv:a.csv", "parquet:a.parquet", "parquet:b.parquet")
    }
    assert len(digests) == 1


def test_encoding_depends_only_on_the_training_split(tmp_path):
    write_csv(tmp_path)
    recipe = get_recipe("csv:a.csv", target="label")
    data = load(recipe, tmp_path)
    training_ages = set(split(data, split_sizes(recipe)).train.x[:, 0].tolist())
    held_out = [
        i
        for i, row in enumerate(encode_objects(objects(), data.columns, "x"))
        if row[0] not in training_ages
    ]
    assert len(held_out) >= 8
    changed_columns = {name: list(values) for name, values in COLUMNS.items()}
    for i in held_out:
        changed_columns["age"][i], changed_columns["city"][i], changed_columns["income"][i] = (
            10**6 + i,
            f"new {i}",
            -(10.0**6),
        )
    write_csv(tmp_path, changed_columns)
    reloaded = load(recipe, tmp_path)
    assert reloaded.columns == data.columns
    assert reloaded.digest() != data.digest()


def test_training_rows_are_standardised(tmp_path):
    write_csv(tmp_path)
    recipe = get_recipe("csv:a.csv", target="label")
    x = split(load(recipe, tmp_path), split_sizes(recipe)).train.x
    assert x[:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert x[:, 0].std() == pytest.approx(1, abs=1e-6)


def test_recipe_sets_column_kinds(tmp_path):
    zips = [f"0{i % 3}" for i in range(ROWS)]
    write_csv(tmp_path, {**COLUMNS, "zip": zips, "id": [f"k{i}" for i in range(ROWS)]})
    data = read(tmp_path, columns={"zip": "categorical", "id": "ignored", "income": "ignored"})
    assert [column.name for column in data.columns] == ["age", "city", "vip", "zip"]
    assert data.columns[3].categories == ("00", "01", "02")
    assert_invalid(
        lambda: read(tmp_path, columns={"city": "numeric"}),
        "column city: expected numbers, got 'Rome' in row 0",
    )


def test_quoted_cells_can_contain_commas_and_newlines(tmp_path):
    write_csv(
        tmp_path, {**COLUMNS, "city": ['"a, ""b""\nc"' if i % 2 else "d" for i in range(ROWS)]}
    )
    assert read(tmp_path).columns[1].categories == ('a, "b"\nc', "d")


def test_constant_column_is_encoded_as_zero(tmp_path):
    write_csv(tmp_path, {**COLUMNS, "age": [3] * ROWS})
    assert set(read(tmp_path).train.x[:, 0].tolist()) == {0.0}


def test_numeric_labels_are_sorted_and_regression_targets_are_float32(tmp_path):
    write_csv(tmp_path, {**COLUMNS, "label": [[2, 10, 1][i % 3] for i in range(ROWS)]})
    assert read(tmp_path).classes == ("1", "2", "10")
    data = read(tmp_path, "regression")
    assert data.classes == ()
    assert data.train.y.dtype == np.float32
    assert set(data.train.y.tolist()) == {1.0, 2.0, 10.0}


@pytest.mark.parametrize(
    ("columns", "data", "message"),
    [
        ({}, {"target": None}, "data.target: expected the name of a column"),
        ({}, {"target": "price"}, "data.target: expected one of the columns ['age', 'city'"),
        ({}, {"columns": {"price": "numeric"}}, "data.columns: expected one of the columns"),
        ({}, {"columns": {"label": "categorical"}}, "data.columns: expected kinds without"),
        (
            {},
            {"columns": dict.fromkeys(["age", "city", "vip", "income"], "ignored")},
            "a column in addition to the target",
        ),
        ({"label": ["a"] * ROWS}, {}, "data.target: expected labels of 2 to 1000 classes, got 1"),
        ({"label": [None] * (ROWS - 1) + ["yes"]}, {}, "data.target: expected a value of label"),
        ({"age": ["inf", *AGE[1:]]}, {}, "column age: expected finite numbers, got infinity"),
        ({"age": [None] * ROWS}, {}, "column age: expected a value in at least one training row"),
        (
            {"city": [f"c{i}" for i in range(ROWS)] * 1},
            {"columns": {"city": "numeric"}},
            "column city: expected numbers",
        ),
        ({"age": ["1e200"] * 20 + ["-1e200"] * 20}, {}, "column age: expected numbers"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_tables_are_rejected(tmp_path, columns, data, message):
    write_csv(tmp_path, {**COLUMNS, **columns})
    assert_invalid(lambda: read(tmp_path, **data), message)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([*LABEL[:-1], "maybe"], "column label: expected numbers, got 'no' in row 0"),
        ([None] * ROWS, "data.target: expected a value of label in at least two rows, got 0 of 40"),
        (["nan"] * (ROWS - 1) + [1], "data.target: expected a value of label in at least two"),
        (["inf", *range(ROWS - 1)], "column label: expected finite numbers"),
        (["1e39", *range(ROWS - 1)], "data.target: expected numbers in float32's range"),
    ],
    ids=["words", "missing", "NaN", "infinity", "too large"],
)
def test_invalid_regression_targets_are_rejected(tmp_path, target, message):
    write_csv(tmp_path, {**COLUMNS, "label": target})
    assert_invalid(lambda: read(tmp_path, "regression"), message)


def test_error_for_numbers_beyond_float32_names_the_column_and_the_value(tmp_path):
    label, income = ["no", "yes"] * 20, [1e300, *range(ROWS - 1)]
    label[0] = "rare"
    write_csv(tmp_path, {**COLUMNS, "income": income, "label": label})
    assert_invalid(
        lambda: read(tmp_path, leave_out=["rare"]),
        "data.source: expected numbers in float32's range after standardisation in column "
        "'income', got 1e+300",
    )


def test_column_with_too_many_categories_is_rejected(tmp_path):
    columns = {"name": [f"k{i}" for i in range(600)], "label": ["a", "b"] * 300}
    write_csv(tmp_path, columns)
    assert_invalid(
        lambda: read(tmp_path),
        "column name: expected 1 to 256 categories (or `ignored` in data.columns)",
    )


def test_missing_files_and_unsupported_types_are_rejected(tmp_path):
    for source in ("csv:absent.csv", "parquet:absent.parquet"):
        assert_invalid(
            lambda source=source: read(tmp_path, source=source),
            "data.source: expected an existing path",
        )
    assert_invalid(lambda: read(tmp_path, source="csv:."), "data.source: expected a readable")
    table = pa.table({**COLUMNS, "when": pa.array(range(ROWS), pa.duration("s"))})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert_invalid(
        lambda: read(tmp_path, source="parquet:a.parquet"),
        "column when: expected numbers, booleans, strings or",
    )
    assert len(read(tmp_path, source="parquet:a.parquet", columns={"when": "ignored"}).columns) == 4
    assert_invalid(
        lambda: load(get_recipe("digits", target="a"), tmp_path),
        "data.target: expected no value, because `digits`",
    )
    assert_invalid(
        lambda: load(get_recipe("digits", "regression"), tmp_path), "task: expected classification"
    )


def test_row_ids_are_cells_of_the_id_column_or_row_numbers(tmp_path):
    names = [f"00{i}" for i in range(ROWS)]
    write_csv(tmp_path, {**COLUMNS, "id": [None, *names[1:]]})
    by_id, by_number = read(tmp_path, id="id"), read(tmp_path, columns={"id": "ignored"})
    assert [column.name for column in by_id.columns] == ["age", "city", "vip", "income"]
    numbers = by_number.train.ids.tolist()
    assert by_id.train.ids.tolist() == [names[i] if i else "0" for i in numbers]
    ages = by_id.train.x[:, 0] * by_id.columns[0].std + by_id.columns[0].mean
    assert np.round(ages).tolist() == AGE[numbers].tolist()
    train = split(by_id, split_sizes(get_recipe("csv:a.csv", target="label"))).train
    assert len(train.ids) == len(train)
    assert {*train.ids.tolist()} < {*by_id.train.ids.tolist()}
    assert_invalid(lambda: read(tmp_path, id="nothing"), "data.id", "one of the columns")
    assert_invalid(lambda: read(tmp_path, id="label"), "data.id", "a column other than the target")


def test_columns_have_usual_values_that_do_not_change_the_digest(tmp_path):
    write_csv(tmp_path)
    data = read(tmp_path)
    train = split(data, split_sizes(get_recipe("csv:a.csv", target="label"))).train
    age, city, vip, income = data.columns
    assert age.usual == pytest.approx(
        np.median(train.x[:, 0].astype(float) * age.std + age.mean), abs=1e-4
    )
    ages = np.sort(train.x[:, 0].astype(float) * age.std + age.mean)
    low, high = age.mostly
    last_index = len(ages) - 1
    assert ages[int(0.05 * last_index)] - 1e-3 <= low <= ages[int(0.05 * last_index) + 1] + 1e-3
    assert ages[int(0.95 * last_index)] - 1e-3 <= high <= ages[int(0.95 * last_index) + 1] + 1e-3
    incomes = train.x[train.x[:, -1] == 0, -2].astype(float)
    assert income.usual == pytest.approx(np.median(incomes * income.std + income.mean), abs=1e-4)
    city_counts = train.x[:, 1:3].sum(axis=0)
    assert city_counts[city.categories.index(city.usual)] == city_counts.max()
    assert vip.usual == "false"
    plain = [column.model_copy(update={"usual": None, "mostly": None}) for column in data.columns]
    assert load(get_recipe("csv:a.csv", target="label"), tmp_path, plain).digest() == data.digest()


def test_splits_keep_calibration_groups_even_if_the_column_is_ignored(tmp_path):
    sites = [["north", "south", "east"][i % 3] for i in range(ROWS)]
    write_csv(tmp_path, {**COLUMNS, "site": sites, "number": list(range(ROWS))})
    with_site = read(tmp_path, calibration_group="site")
    without_site = read(tmp_path, calibration_group="site", columns={"site": "ignored"})
    assert "site" in [column.name for column in with_site.columns]
    assert "site" not in [column.name for column in without_site.columns]
    number = [column.name for column in without_site.columns].index("number")
    for data in (with_site, without_site):
        assert data.group_names == ("east", "north", "south")
    column, parts = (
        without_site.columns[number],
        split(without_site, split_sizes(get_recipe("csv:a.csv", target="label"))),
    )
    index = without_site.shape[0] - 1
    for rows in (parts.train, parts.reference, parts.ranking, parts.validation, parts.test):
        numbers = np.round(rows.x[:, index] * column.std + column.mean).astype(int)
        assert [without_site.group_names[g] for g in rows.groups] == [sites[i] for i in numbers]


def test_rows_split_by_group_keep_their_group(tmp_path):
    write_csv(tmp_path, {**COLUMNS, "site": [f"s{i // 2:02}" for i in range(ROWS)]})
    data = read(tmp_path, group="site", reference=4, ranking=4, validation=4)
    assert len(data.group_names) == ROWS // 2
    assert data.train.groups.tolist() == data.groups.tolist()
    assert not set(data.train.groups.tolist()) & set(data.test.groups.tolist())


def test_cells_missing_only_in_new_rows_cause_a_message(tmp_path, capsys):
    write_csv(tmp_path)
    columns = read(tmp_path).columns
    write_csv(tmp_path, {**COLUMNS, "age": [None, *COLUMNS["age"][1:]]})
    with print_messages():
        load(get_recipe("csv:a.csv", target="label"), tmp_path, columns)
    message = capsys.readouterr().err
    assert "1 rows lack age, which all training rows have; using its usual value" in message
    assert "income" not in message


def test_new_data_can_have_a_single_group(tmp_path):
    sizes = {"reference": 4, "ranking": 4, "validation": 4}
    write_csv(tmp_path, {**COLUMNS, "site": [f"s{i // 2:02}" for i in range(ROWS)]})
    model = read(tmp_path, group="site", **sizes)
    write_csv(tmp_path, {**COLUMNS, "site": ["new"] * ROWS})
    assert_invalid(
        lambda: read(tmp_path, group="site", **sizes), "data.group: expected more groups"
    )
    recipe = get_recipe("csv:a.csv", target="label", group="site", **sizes)
    data = load_unfitted(recipe, tmp_path, model.columns, None)
    assert (len(data.rows), data.group_names) == (ROWS, ("new",))
    assert {*data.rows.groups.tolist()} == {0}


def test_new_data_can_lack_columns_that_the_model_does_not_use(tmp_path):
    options = {"target": "label", "id": "key", "columns": {"title": "ignored"}}
    table = {**COLUMNS, "key": [f"k{i}" for i in range(ROWS)], "title": ["a"] * ROWS}
    write_csv(tmp_path, table)
    model = read(tmp_path, **options)
    recipe = get_recipe("csv:a.csv", **options)
    assert load_unfitted(recipe, tmp_path, model.columns, None).digest() == model.digest()
    write_csv(tmp_path)
    assert_invalid(lambda: read(tmp_path, **options), "expected one of the columns")
    assert load_unfitted(recipe, tmp_path, model.columns, None).digest() == model.digest()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "data.calibration_group: expected one of the columns"),
        ({"site": [None, *["a"] * (ROWS - 1)]}, "data.calibration_group: expected a value of site"),
    ],
)
def test_missing_calibration_groups_are_rejected(tmp_path, columns, message):
    write_csv(tmp_path, {**COLUMNS, **columns})
    assert_invalid(lambda: read(tmp_path, calibration_group="site"), message)


def test_target_cannot_be_the_calibration_group(tmp_path):
    write_csv(tmp_path)
    assert_invalid(
        lambda: read(tmp_path, calibration_group="label"),
        "data.calibration_group: expected a column other",
    )


def test_files_are_searched_in_data_folder_then_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = get_recipe("csv:a.csv", target="label")
    write_csv(tmp_path)
    Path("a.toml").write_text(
        'name = "a"\nmethod = "mle"\ndata = {source = "csv:a.csv"}\nnetwork = {hidden = [8]}\n'
    )
    assert load(recipe, Path("data")).classes == ("no", "yes")
    assert load_recipe(Path("a.toml"), Path("data")).data.source == "csv:a.csv"
    (tmp_path / "data").mkdir()
    write_csv(tmp_path / "data", {**COLUMNS, "label": [f"{label}!" for label in LABEL]})
    assert load(recipe, Path("data")).classes == ("no!", "yes!")
    assert load_recipe(Path("a.toml"), Path("data")).data.source == f"csv:{tmp_path / 'a.csv'}"
