import csv
import json
import re
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tests.support.environment import working_in
from tests.support.refusals import refused
from training.__main__ import main
from training.data import load as load_data
from training.data.findings import ColumnFinding, Findings, infer_task, inspect_source
from training.data.plan import (
    BINS,
    MAX_INPUTS,
    make_plan,
    model_name_for,
    recipe_text,
    round_share,
    write_recipe,
)
from training.data.rows import split, split_sizes
from training.recipe import load
from training.sections import DataSection

ROWS = 300
RNG = np.random.default_rng(0)
KIND = RNG.integers(0, 3, ROWS)
SIZE = KIND + RNG.normal(size=ROWS) * 0.5
COLUMNS = {
    "id": list(range(100, 100 + ROWS)),
    "name": [f"n{i}" for i in range(ROWS)],
    "born": [str(np.datetime64("1990-01-01") + 9 * i) for i in range(ROWS)],
    "size": [None if i % 10 == 0 else round(float(s), 3) for i, s in enumerate(SIZE)],
    "wealth": [round(float(w), 2) for w in np.exp(3 * RNG.normal(size=ROWS))],
    "unit": ["cm"] * ROWS,
    "city": [["Rome", "Oslo", "rome "][i % 3] for i in range(ROWS)],
    "code": [f"K{k}" for k in KIND],
    "kind": [["a", "b", "c"][k] for k in KIND],
    "price": [round(float(10 * s), 3) for s in SIZE],
}


def write(folder, **changed):
    columns = {name: cells for name, cells in (COLUMNS | changed).items() if cells is not None}
    with (folder / "things.csv").open("w", newline="") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])


def found(folder, target="kind", task=None, source="csv:things.csv", **data):
    return inspect_source(DataSection(source=source, target=target, **data), folder, task)


def planned(folder, target="kind", **data):
    section = DataSection(source="csv:things.csv", target=target, **data)
    return make_plan(inspect_source(section, folder), section, None, None)


def test_every_column_is_taken_for_something_for_a_reason(tmp_path):
    write(tmp_path)
    kinds = {column.name: (column.kind, column.reason) for column in found(tmp_path).columns}
    assert kinds == {
        "id": ("ignored", "it numbers the rows"),
        "name": ("ignored", "an id or free text: 300 different values in 300 rows"),
        "born": ("time", "dates or times, 1990-01-01 to 1997-05-15"),
        "size": ("numeric", kinds["size"][1]),
        "wealth": ("numeric", kinds["wealth"][1]),
        "unit": ("ignored", "the same in every row ('cm')"),
        "city": ("categorical", "3 categories"),
        "code": ("categorical", "3 categories"),
        "price": ("numeric", kinds["price"][1]),
    }
    text = "\n".join(found(tmp_path).report())
    assert re.search(r"  size +numeric +numbers, \S+ to \S+; 10 % missing", text)
    assert (
        "! column code may leak the target: it alone predicts the class of 100.0 % of the rows"
        in text
    )
    assert "column price may" not in text
    assert "! a heavy tail: its furthest value is" in text
    assert "some categories differ only in their spelling" in text
    assert re.search(r"  id +ignored +it numbers the rows", text)
    assert "  and 7 more" in "\n".join(found(tmp_path).report(max_columns=2))


@pytest.mark.parametrize(
    ("cells", "is_said"),
    [
        ([f"{'$€'[i % 2]}{i + 1:,}.50" for i in range(800, 800 + ROWS)], True),
        ([[f"{i}.9%", f"{100 + i}"][i % 2] for i in range(ROWS)], True),
        ([f"{i % 9}.2.{i % 7}" for i in range(ROWS)], False),  # versions
        ([f"K{i % 9}" for i in range(ROWS)], False),
    ],
    ids=["money", "percentages", "versions", "codes"],
)
def test_numbers_with_signs_are_told_from_text(tmp_path, cells, is_said):
    write(tmp_path, price=cells)
    text = "\n".join(found(tmp_path).report())
    assert ("Write all of them with the same sign" in text) == is_said


@pytest.mark.parametrize("name", ["name", "price"])
@pytest.mark.parametrize(
    ("cells", "is_said"),
    [
        ([f"USD {i + 1:,}.50" for i in range(ROWS)], True),
        ([f"{i % 40}.5 kg" for i in range(ROWS)], True),
        ([f"{i}{'kM'[i % 2]}" for i in range(ROWS)], True),
        ([f"{i}{'ABCD'[i % 4]}" for i in range(ROWS)], False),  # seats
        ([f"{i}.2.0" for i in range(ROWS)], False),  # versions
        ([f"P{i}" for i in range(ROWS)], False),
    ],
)
def test_numbers_with_units_cause_a_note_also_as_the_target(tmp_path, name, cells, is_said):
    write(tmp_path, **{name: cells})
    text = "\n".join(found(tmp_path, "price").report())
    assert (f"numbers with units ('{cells[0]}')? Write them without units" in text) == is_said


def test_values_that_stop_a_column_from_being_numeric_are_shown_with_their_rows(tmp_path):
    write(tmp_path, price=["?" if i in (5, 9) else cell for i, cell in enumerate(COLUMNS["price"])])
    (column,) = (c for c in found(tmp_path).columns if c.name == "price")
    assert column.kind == "refused"
    assert column.reason.startswith(
        'expected numbers, like 298 of its 300 values (set data.missing_values = ["?"]'
    )
    assert column.reason.endswith("got '?' in row 5, '?' in row 9")
    (column,) = (c for c in found(tmp_path, missing_values=["?"]).columns if c.name == "price")
    assert (column.kind, column.missing) == ("numeric", pytest.approx(2 / ROWS))


def test_transforms_of_a_target_are_tried_where_its_tail_is_heavy_or_it_counts(tmp_path):
    write(tmp_path)
    assert planned(tmp_path, "size").recipe.data.target_transform == "none"
    plan = planned(tmp_path, "wealth")
    assert plan.recipe.data.target_transform == "auto"
    assert "a heavy tail" in plan.reasons["data.target_transform"]
    write(
        tmp_path,
        visits=RNG.poisson(3.0, ROWS).tolist(),
        year=RNG.integers(1950, 2000, ROWS).tolist(),
    )
    for target, transform in (("visits", "auto"), ("year", "none")):
        section = DataSection(source="csv:things.csv", target=target)
        plan = make_plan(inspect_source(section, tmp_path, "regression"), section, None, None)
        assert plan.recipe.data.target_transform == transform


def test_a_regression_s_leak_and_repeated_rows_are_told(tmp_path):
    write(tmp_path, size=[float(s) for s in SIZE], born=["2024-01-01"] * ROWS)
    message = found(tmp_path, "price").warnings
    assert any(
        text.startswith("column size may leak the target: it alone explains") for text in message
    )


@pytest.mark.parametrize(
    ("values", "task"),
    [
        ([0.0, 1.0, 1.0, 2.0], "classification"),
        ([float(i) for i in range(11)], "regression"),
        ([0.5, 1.0, 0.5], "regression"),
        (["a", None, "b"], "classification"),
    ],
)
def test_the_task_follows_from_the_target(values, task):
    assert infer_task(values if isinstance(values[0], str) else np.array(values), "y")[0] == task


@pytest.mark.parametrize("scale", [1e300, 1.7e308])
def test_a_number_beyond_float32_is_looked_at_as_others(tmp_path, scale):
    write(tmp_path, price=[scale, *(i + 0.5 for i in range(299))])
    column = next(column for column in found(tmp_path).columns if column.name == "price")
    assert "e+" in column.notes[0]
    assert len(column.notes[0]) < 100


def test_columns_that_may_be_numbers_are_warned_of_where_they_are_left_out(tmp_path):
    names = [f"{1 + i},{100 + i}" for i in range(300)]
    table = pa.table({"name": names, "size": np.arange(300.0), "kind": ["a", "b"] * 150})
    parquet.write_table(table, tmp_path / "things.parquet")
    warnings = found(tmp_path, source="parquet:things.parquet").warnings
    (message,) = (text for text in warnings if text.startswith("column name is ignored"))
    assert "Their format is ambiguous" in message


@pytest.mark.parametrize(
    ("written", "form"),
    [("{:%d/%m/%y}", "%d/%m/%y"), ("{:%d-%b-%Y}", "%d-%b-%Y"), ("{:%B %d, %Y}", "%B %d, %Y")],
)
def test_dates_that_no_rule_reads_are_asked_about(tmp_path, written, form):
    days = [datetime(2020, 1, 1) + timedelta(days=i) for i in range(300)]
    write(tmp_path, born=[written.format(day) for day in days])
    (column,) = (c for c in found(tmp_path).columns if c.name == "born")
    assert any("or --date-format" in note for note in column.notes)
    (column,) = (c for c in found(tmp_path, date_format=form).columns if c.name == "born")
    assert (column.kind, column.notes) == ("time", [])


def test_a_target_of_numbers_and_words_is_asked_about(tmp_path):
    price = ["?" if i % 3 == 0 else i + 0.5 for i in range(300)]
    write(tmp_path, price=price)
    (message,) = (text for text in found(tmp_path, "price").warnings if "numbers" in text)
    assert message.startswith("column price: 200 different numbers, and '?' (set --missing-value")


def test_a_recipe_says_any_name_of_a_column(tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    write(tmp_path, **{"😀 id": [f"a{i}" for i in range(300)]})
    recipe = write_recipe(planned(tmp_path), tmp_path / "things.toml")
    assert recipe.data.columns["😀 id"] == "ignored"


def test_a_plan_is_a_recipe_that_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    write(tmp_path)
    plan = planned(tmp_path)
    assert plan.recipe.data.columns == {"id": "ignored", "name": "ignored", "unit": "ignored"}
    assert plan.recipe.data.id == "id"
    assert (plan.recipe.task, plan.recipe.training.epochs) == ("classification", None)
    assert (
        write_recipe(plan, tmp_path / "things.toml")
        == plan.recipe
        == load(tmp_path / "things.toml")
    )
    assert write_recipe(plan, tmp_path / "things.toml") == plan.recipe  # the same again
    other = planned(tmp_path, "price")
    assert other.recipe.likelihood.noise == "heteroscedastic"
    path = tmp_path / "things.toml"
    assert write_recipe(other, path) == other.recipe  # replaces an unedited recipe
    edited = path.read_text().replace("seed = 0", "seed = 1")
    path.write_text(edited)
    refused(lambda: write_recipe(plan, path), "--recipe-out: expected a path without your own")
    assert path.read_text() == edited
    for text in ("# kind is not numeric", "# 19 of 240 rows", "id: it numbers the rows"):
        assert text in recipe_text(plan)


def test_a_table_is_encoded_stopped_early_and_of_few_rows_fitted_again(tmp_path):
    write(tmp_path)
    recipe, reasons = planned(tmp_path).recipe, planned(tmp_path).reasons
    assert (recipe.method, recipe.network.bins) == ("batch-ensemble", BINS)
    assert recipe.training.early_stopping == "refit"
    assert "training.early_stopping" in reasons
    section = DataSection(source="csv:things.csv", target="kind")
    rows = found(tmp_path)
    large = make_plan(replace(rows, rows=20_000), section, None, None).recipe
    assert large.training.early_stopping is True
    assert len(rows.used) == 6
    for times, bins, max_inputs in ((10, BINS, None), (20, 8, None), (100, BINS, MAX_INPUTS)):
        wide = replace(rows, columns=rows.columns * times)
        network = make_plan(wide, section, None, None).recipe.network
        assert (network.bins, network.max_inputs) == (bins, max_inputs)


def test_odd_names_and_cells_are_kept_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    odd = 'a "b"\\c\tü\x7f=[x]#'
    write(tmp_path, id=None, **{odd: COLUMNS["unit"]})
    plan = planned(tmp_path, missing_values=['"', "\\"])
    assert odd in plan.recipe.data.columns
    assert write_recipe(plan, tmp_path / "odd.toml") == plan.recipe


def test_a_column_that_a_person_leaves_out_is_no_id(tmp_path):
    write(tmp_path, id=None, name=None)
    assert planned(tmp_path, columns={"price": "ignored"}).recipe.data.id is None
    write(tmp_path)
    assert planned(tmp_path, columns={"id": "ignored"}).recipe.data.id == "id"


def test_too_few_rows_for_a_rate_are_told_in_words(tmp_path):
    write(tmp_path, **{name: cells[:80] for name, cells in COLUMNS.items()})
    (message,) = planned(tmp_path).warnings
    assert message.startswith(
        "with 15 ranking rows the smallest fpr is 0.0625: requests without fpr are rejected"
    )
    write(tmp_path)
    assert planned(tmp_path).warnings == []


@pytest.mark.parametrize(
    ("source", "name"), [("csv:a b.csv", "a-b"), ("images:x/Cats/", "Cats"), ("npz:ü.npz", "model")]
)
def test_a_model_has_the_name_of_its_file(source, name):
    assert model_name_for(source) == name


def test_shares_come_to_the_rows_they_stand_for():
    for rows in (8, 77, 1000, 123_457):
        for size in {1, rows // 7, rows // 3}:
            assert round(round_share(size, rows) * rows) == size


def test_arrays_and_images_are_planned_for(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.normal(size=(60, 3)), y=rng.normal(size=60))
    section = DataSection(source="npz:a.npz")
    plan = make_plan(inspect_source(section, tmp_path), section, None, None)
    assert (plan.recipe.task, plan.recipe.network.bins) == ("regression", None)
    for i in range(40):
        folder = tmp_path / "pets" / ["cat", "dog"][i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20 + i % 3, 30, 3), np.uint8)).save(
            folder / f"{i}.webp"
        )
    section = DataSection(source="images:pets")
    plan = make_plan(inspect_source(section, tmp_path), section, None, None)
    assert (plan.recipe.network.kind, plan.recipe.data.image_size) == ("gal-cnn", [21, 30])
    assert plan.recipe.name == "pets"


def test_inspect_prints_what_columns_are(tmp_path, capsys):
    write(tmp_path)
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:things.csv", "--target", "kind"]) == 0
        assert "3 classes: " in capsys.readouterr().out
        assert main(["inspect", "--data", "csv:things.csv", "--target", "kind", "--json"]) == 0
        output = json.loads(capsys.readouterr().out)
        assert (output["task"], output["rows"], len(output["classes"])) == (
            "classification",
            300,
            3,
        )
        assert output["columns"][0].keys() == {"name", "kind", "reason", "missing", "notes"}
        assert main(["inspect", "--data", "csv:things.csv"]) == 0
        assert "no target (set --target COLUMN)" in capsys.readouterr().out
        assert main(["inspect", "--data", "csv:things.csv", "--target", "kin"]) == 2
        assert capsys.readouterr().err.startswith(
            "error: --target: expected one of the columns ['id', 'name'"
        )


def test_inspect_says_once_how_a_column_is_read(tmp_path, capsys):
    rows = "".join(f"{n % 60}%,{'yes' if n % 60 > 30 else 'no'}\n" for n in range(300))
    (tmp_path / "shares.csv").write_text("share,left\n" + rows)
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:shares.csv", "--target", "left"]) == 0
    assert "".join(capsys.readouterr()).count("column share: reading '0%' as 0") == 1


def test_a_fit_without_a_recipe_says_what_it_does_and_its_recipe_fits_again(
    tmp_path, capsys, monkeypatch, fits
):
    from model_store.artifacts.store import ModelStore

    monkeypatch.setattr("training.data.plan.MAX_STEPS", 60)
    write(tmp_path, code=None)
    recipe = tmp_path / "things.toml"
    first = [
        "fit",
        "--data",
        "csv:things.csv",
        "--target",
        "kind",
        "--recipe-out",
        str(recipe),
        "--device",
        "cpu",
    ]
    with working_in(tmp_path):
        assert main([*first, "--quiet"]) == 0
        message = capsys.readouterr().err
        again = ["fit", str(recipe), "--quiet", "--device", "cpu", "--json"]
        assert main(again) == 0
        output = json.loads(capsys.readouterr().out)
        assert (output["name"], output["version"]) == ("things", "2")
        assert "test_accuracy" in output["quality"]
    for text in (
        "csv:things.csv: 300 rows; classification",
        "it numbers the rows",
        "# tested on a panel",
        "# 19 of 240 rows",
        "stopped after",
    ):
        assert text in message
    store = ModelStore(tmp_path / "models")
    first, second = (store.manifest("things", version) for version in ("1", "2"))
    weights = "weights.safetensors"
    assert first.files[weights] == second.files[weights]
    assert first.training["stopped"] == second.training["stopped"]
    assert first.quality["test_accuracy"] > 0.5


def test_a_plan_keeps_a_test_fraction(tmp_path):
    write(tmp_path)
    section = DataSection(source="csv:things.csv", target="kind", test_fraction=0.1)
    plan = make_plan(inspect_source(section, tmp_path), section, None, None)
    assert plan.recipe.data.test_fraction == 0.1
    data = load_data(plan.recipe, tmp_path)
    assert len(data.test) == ROWS / 10
    assert len(split(data, split_sizes(plan.recipe)).ranking) == round(0.12 * 0.9 * ROWS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "recipe: expected a recipe, or --data SRC to make one, got neither"),
        (["--data", "digits"], "--data: expected csv:FILE, parquet:FILE, npz:FILE"),
        (["--data", "things.xlsx"], "--data: expected a CSV or Parquet file (save the sheet"),
        (["--data", "csv:things.csv"], "--target: expected the name of a column, got none"),
        (["--data", "csv:things.csv", "--group", "a", "--time", "b"], "--time: expected no value"),
        (["--data", "csv:things.csv", "--date-format", "%d"], "--date-format: expected a strptime"),
        (["--data", "csv:things.csv", "--test-fraction", "1"], "--test-fraction: expected less"),
        (["things.toml", "--task", "regression"], "--task: expected no value, because the recipe"),
    ],
)
def test_a_fit_that_cannot_be_planned_is_refused(tmp_path, capsys, options, says):
    write(tmp_path)
    with working_in(tmp_path):
        assert main(["fit", *options]) == 2
    assert says in capsys.readouterr().err


def test_text_that_is_nearly_always_different_is_left_out_and_the_rest_is_fitted(tmp_path):
    titles = [f"Title {i if i % 100 else 0}" for i in range(3 * ROWS)]  # one of them nine times
    large = {name: cells * 3 for name, cells in COLUMNS.items()} | {"name": titles}
    write(tmp_path, **large)
    columns = {column.name: column for column in found(tmp_path).columns}
    assert columns["name"].kind == "ignored"
    section = DataSection(source="csv:things.csv", target="kind")
    data = load_data(
        make_plan(inspect_source(section, tmp_path), section, None, None).recipe, tmp_path
    )
    assert "name" not in {column.name for column in data.columns}


def test_inspect_says_what_would_stop_a_fit(tmp_path, capsys):
    write(tmp_path, price=["?" if i == 5 else cell for i, cell in enumerate(COLUMNS["price"])])
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:things.csv", "--target", "kind"]) == 0
    assert "! a fit would fail: column price: expected numbers" in capsys.readouterr().out


def test_a_fit_that_fails_before_training_keeps_no_recipe(tmp_path, capsys):
    price = ["?" if i == 5 else cell for i, cell in enumerate(COLUMNS["price"])]
    write(tmp_path, price=price)
    fit, recipe = ["fit", "--data", "csv:things.csv", "--target", "kind"], tmp_path / "a.toml"
    with working_in(tmp_path):
        assert main([*fit, "--recipe-out", str(recipe)]) == 2
    assert "column price: expected numbers" in capsys.readouterr().err
    assert not recipe.exists()


def test_classes_of_one_or_two_rows_are_left_out_and_said(tmp_path):
    kinds = ["twice", "twice", *(f"once{i}" for i in range(6)), *COLUMNS["kind"][8:]]
    write(tmp_path, kind=kinds)
    plan = planned(tmp_path)
    assert plan.recipe.data.leave_out == ["twice", *(f"once{i}" for i in range(6))]
    message = "leaving out classes with fewer than 3 rows: 'twice' (2), 'once0' (1), 'once1' (1)"
    assert plan.warnings[0].startswith(message)
    data = load_data(plan.recipe, tmp_path)
    assert data.classes == ("a", "b", "c")
    split(data, split_sizes(plan.recipe))
    full = plan.recipe.data.model_copy(update={"leave_out": []})
    recipe = plan.recipe.model_copy(update={"data": full})
    says = ("training rows of every class (leave a class out", "once", "which have [", "merge")
    refused(lambda: split(load_data(recipe, tmp_path), split_sizes(recipe)), *says)


def test_a_target_of_numbers_but_for_a_few_words_waits_for_a_person(tmp_path, capsys):
    words = ["unknown" if i % 50 == 0 else i % 20 for i in range(ROWS)]
    write(tmp_path, price=words)
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:things.csv", "--target", "price"]) == 0
        message = capsys.readouterr().out
        assert main(["fit", "--data", "csv:things.csv", "--target", "price"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    for text in (message, error):
        assert "'unknown' in row 0" in text
        assert (
            'data.missing_values = ["unknown"] or --missing-value to read these cells as missing'
            in text
        )
    assert "size" in message
    output = found(tmp_path, "price", missing_values=["unknown"])
    assert (output.task, output.rows) == ("regression", ROWS - 6)
    assert found(tmp_path, "price", "classification").task == "classification"


def test_classes_that_differ_in_spaces_or_capitals_alone_are_told(tmp_path, capsys):
    write(tmp_path, kind=[["Yes", "no", "YES", "yes", "No"][i % 5] for i in range(ROWS)])
    says = "! classes that differ only in their spelling: 'No', 'no'; 'YES', 'Yes', 'yes'"
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:things.csv", "--target", "kind"]) == 0
        assert says in capsys.readouterr().out
        fit = ["fit", "--data", "csv:things.csv", "--target", "kind"]
        assert main([*fit, "--recipe-out", "nowhere/a.toml"]) == 2
        assert says in capsys.readouterr().err


def test_dates_that_can_be_read_in_two_ways_stop_their_column_alone(tmp_path, capsys):
    write(tmp_path, born=[f"0{1 + i % 9}/0{1 + i % 7}/2020" for i in range(ROWS)])
    columns = {column.name: column for column in found(tmp_path).columns}
    assert columns["born"].kind == "refused"
    assert '--date-format to "%d/%m/%Y"' in columns["born"].reason
    assert columns["size"].kind == "numeric"
    with working_in(tmp_path):
        assert main(["fit", "--data", "csv:things.csv", "--target", "kind"]) == 2
    assert "column born: expected unambiguous dates" in capsys.readouterr().err
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:things.csv", "--date-format", "%d/%m/%Y"]) == 0
    assert re.search("born +time", capsys.readouterr().out)


def test_kinds_are_those_of_the_rows_with_a_target(tmp_path):
    price = ["sold" if i < 100 else cell for i, cell in enumerate(COLUMNS["price"])]
    kind = [None if i < 100 or i == 200 else cell for i, cell in enumerate(COLUMNS["kind"])]
    write(tmp_path, price=price, kind=kind)
    columns = {column.name: column for column in found(tmp_path).columns}
    assert columns["price"].kind == "numeric"
    assert columns["price"].missing == 0.0
    assert columns["size"].missing == 19 / 199
    assert (columns["id"].reason, columns["id"].is_id) == ("it numbers the rows", True)
    data = load_data(planned(tmp_path).recipe, tmp_path)
    assert {column.name: column.kind for column in data.columns}["price"] == "numeric"
    price[150] = "sold"
    write(tmp_path, price=price, kind=kind)
    columns = {column.name: column for column in found(tmp_path).columns}
    assert "'sold' in row 150" in columns["price"].reason


def test_larger_tables_get_fewer_epochs():
    column = ColumnFinding("x", "numeric", "", np.zeros(1))
    classes = {"a": 1_000, "b": 1_000}

    def epochs(rows):
        findings = Findings(
            "csv:t.csv", rows, "classification", "", [column] * 20, "y", classes=classes
        )
        return make_plan(
            findings, DataSection(source="csv:t.csv", target="y"), None, None
        ).recipe.training.max_epochs

    assert [epochs(rows) for rows in (100_000, 300_000, 500_000, 1_000_000, 10_000_000)] == [
        4,
        3,
        2,
        1,
        1,
    ]
