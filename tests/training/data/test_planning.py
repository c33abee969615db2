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
from tests.support.refusals import assert_invalid
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


@pytest.fixture(autouse=True)
def skip_split_warnings(monkeypatch):
    """Skip the comparison of splits, which takes most of the time (see `test_reading`)."""
    monkeypatch.setattr("training.data.findings.split_warnings", lambda *_: [])


def write(folder, **changes):
    columns = {name: cells for name, cells in (COLUMNS | changes).items() if cells is not None}
    with (folder / "things.csv").open("w", newline="") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])


def inspect(folder, target="kind", task=None, source="csv:things.csv", **data):
    return inspect_source(DataSection(source=source, target=target, **data), folder, task)


def get_plan(folder, target="kind", **data):
    section = DataSection(source="csv:things.csv", target=target, **data)
    return make_plan(inspect_source(section, folder), section, None, None)


def test_inspect_reports_kind_and_reason_of_every_column(tmp_path):
    write(tmp_path)
    kinds = {column.name: (column.kind, column.reason) for column in inspect(tmp_path).columns}
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
    text = "\n".join(inspect(tmp_path).report())
    assert re.search(r"  size +numeric +numbers, \S+ to \S+; 10 % missing", text)
    assert (
        "! column code may leak the target: it alone predicts the class of 100.0 % of the rows"
        in text
    )
    assert "column price may" not in text
    assert "! a heavy tail: its furthest value is" in text
    assert "some categories differ only in their spelling" in text
    assert re.search(r"  id +ignored +it numbers the rows", text)
    assert "  and 7 more" in "\n".join(inspect(tmp_path).report(max_columns=2))


@pytest.mark.parametrize(
    ("cells", "has_note"),
    [
        ([f"{'$€'[i % 2]}{i + 1:,}.50" for i in range(800, 800 + ROWS)], True),
        ([[f"{i}.9%", f"{100 + i}"][i % 2] for i in range(ROWS)], True),
        ([f"{i % 9}.2.{i % 7}" for i in range(ROWS)], False),  # versions
        ([f"K{i % 9}" for i in range(ROWS)], False),
    ],
    ids=["money", "percentages", "versions", "codes"],
)
def test_inconsistent_number_signs_cause_a_note(tmp_path, cells, has_note):
    write(tmp_path, price=cells)
    text = "\n".join(inspect(tmp_path).report())
    assert ("Write all of them with the same sign" in text) == has_note


@pytest.mark.parametrize("name", ["name", "price"])
@pytest.mark.parametrize(
    ("cells", "has_note"),
    [
        ([f"USD {i + 1:,}.50" for i in range(ROWS)], True),
        ([f"{i % 40}.5 kg" for i in range(ROWS)], True),
        ([f"{i}{'kM'[i % 2]}" for i in range(ROWS)], True),
        ([f"{i}{'ABCD'[i % 4]}" for i in range(ROWS)], False),  # seats
        ([f"{i}.2.0" for i in range(ROWS)], False),  # versions
        ([f"P{i}" for i in range(ROWS)], False),
    ],
)
def test_numbers_with_units_cause_a_note_in_inputs_and_targets(tmp_path, name, cells, has_note):
    write(tmp_path, **{name: cells})
    text = "\n".join(inspect(tmp_path, "price").report())
    assert (f"numbers with units ('{cells[0]}')? Write them without units" in text) == has_note


def test_nonnumeric_cells_of_numeric_columns_are_shown_with_their_rows(tmp_path):
    write(tmp_path, price=["?" if i in (5, 9) else cell for i, cell in enumerate(COLUMNS["price"])])
    (column,) = (c for c in inspect(tmp_path).columns if c.name == "price")
    assert column.kind == "refused"
    assert column.reason.startswith(
        'expected numbers, like 298 of its 300 values (set data.missing_values = ["?"]'
    )
    assert column.reason.endswith("got '?' in row 5, '?' in row 9")
    (column,) = (c for c in inspect(tmp_path, missing_values=["?"]).columns if c.name == "price")
    assert (column.kind, column.missing) == ("numeric", pytest.approx(2 / ROWS))


def test_target_transforms_are_tried_for_heavy_tails_and_counts(tmp_path):
    write(tmp_path)
    assert get_plan(tmp_path, "size").recipe.data.target_transform == "none"
    plan = get_plan(tmp_path, "wealth")
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


def test_leak_in_regression_causes_a_warning(tmp_path):
    write(tmp_path, size=[float(s) for s in SIZE], born=["2024-01-01"] * ROWS)
    warnings = inspect(tmp_path, "price").warnings
    assert any(
        text.startswith("column size may leak the target: it alone explains") for text in warnings
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
def test_task_is_inferred_from_target(values, task):
    assert infer_task(values if isinstance(values[0], str) else np.array(values), "y")[0] == task


@pytest.mark.parametrize("scale", [1e300, 1.7e308])
def test_number_beyond_float32_causes_a_short_note(tmp_path, scale):
    write(tmp_path, price=[scale, *(i + 0.5 for i in range(299))])
    column = next(column for column in inspect(tmp_path).columns if column.name == "price")
    assert "e+" in column.notes[0]
    assert len(column.notes[0]) < 100


def test_ignored_columns_with_ambiguous_numbers_cause_a_warning(tmp_path):
    names = [f"{1 + i},{100 + i}" for i in range(300)]
    table = pa.table({"name": names, "size": np.arange(300.0), "kind": ["a", "b"] * 150})
    parquet.write_table(table, tmp_path / "things.parquet")
    warnings = inspect(tmp_path, source="parquet:things.parquet").warnings
    (message,) = (text for text in warnings if text.startswith("column name is ignored"))
    assert "Their format is ambiguous" in message
    table = table.set_column(0, "name", pa.array([f"${i},000.50" for i in range(1, 301)]))
    parquet.write_table(table, tmp_path / "things.parquet")
    warnings = inspect(tmp_path, source="parquet:things.parquet").warnings
    assert any("Set `numeric` in data.columns" in text for text in warnings)
    columns = {"name": "numeric"}
    (column, *_) = inspect(tmp_path, source="parquet:things.parquet", columns=columns).columns
    assert column.kind == "numeric"


def test_target_with_mostly_rare_classes_is_refused(tmp_path):
    write(tmp_path, kind=[f"n{i}" if i > 10 else "ab"[i % 2] for i in range(ROWS)])
    assert_invalid(
        lambda: get_plan(tmp_path, columns={"kind": "categorical"}),
        "column kind: expected classes with at least 3 rows each, got 291 classes in 300 rows",
    )


@pytest.mark.parametrize(
    ("template", "date_format"),
    [("{:%d/%m/%y}", "%d/%m/%y"), ("{:%d-%b-%Y}", "%d-%b-%Y"), ("{:%B %d, %Y}", "%B %d, %Y")],
)
def test_unrecognised_dates_cause_a_note_about_date_format(tmp_path, template, date_format):
    days = [datetime(2020, 1, 1) + timedelta(days=i) for i in range(300)]
    write(tmp_path, born=[template.format(day) for day in days])
    (column,) = (c for c in inspect(tmp_path).columns if c.name == "born")
    year = "%y" if date_format == "%d/%m/%y" else "%Y"
    assert any(f"--date-format, such as %d/%m/{year}" in note for note in column.notes)
    (column,) = (c for c in inspect(tmp_path, date_format=date_format).columns if c.name == "born")
    assert (column.kind, column.notes) == ("time", [])


def test_target_with_numbers_and_words_causes_a_warning(tmp_path):
    price = ["?" if i % 3 == 0 else i + 0.5 for i in range(300)]
    write(tmp_path, price=price)
    (message,) = (text for text in inspect(tmp_path, "price").warnings if "numbers" in text)
    assert message.startswith("column price: 200 different numbers, and '?' (set --missing-value")


def test_recipe_can_contain_any_column_name(tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    write(tmp_path, **{"😀 id": [f"a{i}" for i in range(300)]})
    recipe = write_recipe(get_plan(tmp_path), tmp_path / "things.toml")
    assert recipe.data.columns["😀 id"] == "ignored"


def test_written_plan_loads_as_the_same_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    write(tmp_path)
    plan = get_plan(tmp_path)
    assert plan.recipe.data.columns == {"id": "ignored", "name": "ignored", "unit": "ignored"}
    assert plan.recipe.data.id == "id"
    assert (plan.recipe.task, plan.recipe.training.epochs) == ("classification", None)
    assert (
        write_recipe(plan, tmp_path / "things.toml")
        == plan.recipe
        == load(tmp_path / "things.toml")
    )
    assert write_recipe(plan, tmp_path / "things.toml") == plan.recipe  # idempotent
    price_plan = get_plan(tmp_path, "price")
    assert price_plan.recipe.likelihood.noise == "heteroscedastic"
    path = tmp_path / "things.toml"
    assert write_recipe(price_plan, path) == price_plan.recipe  # replaces an unedited recipe
    edited_text = path.read_text().replace("seed = 0", "seed = 1")
    path.write_text(edited_text)
    assert_invalid(
        lambda: write_recipe(plan, path),
        "--recipe-out: expected a path without a recipe that you wrote",
    )
    assert path.read_text() == edited_text
    for text in ("# kind is not numeric", "# 19 of 240 rows", "id: it numbers the rows"):
        assert text in recipe_text(plan)


def test_plan_for_tables_bins_inputs_stops_early_and_refits_small_tables(tmp_path):
    write(tmp_path)
    recipe, reasons = get_plan(tmp_path).recipe, get_plan(tmp_path).reasons
    assert (recipe.method, recipe.network.bins) == ("batch-ensemble", BINS)
    assert recipe.training.early_stopping == "refit"
    assert "training.early_stopping" in reasons
    section = DataSection(source="csv:things.csv", target="kind")
    findings = inspect(tmp_path)
    large_recipe = make_plan(replace(findings, rows=20_000), section, None, None).recipe
    assert large_recipe.training.early_stopping is True
    assert len(findings.used) == 6
    for repeats, bins, max_inputs in ((10, BINS, None), (20, 8, None), (100, BINS, MAX_INPUTS)):
        wide_findings = replace(findings, columns=findings.columns * repeats)
        network = make_plan(wide_findings, section, None, None).recipe.network
        assert (network.bins, network.max_inputs) == (bins, max_inputs)


def test_recipe_preserves_special_characters_in_names_and_cells(tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    name = 'a "b"\\c\tü\x7f=[x]#'
    write(tmp_path, id=None, **{name: COLUMNS["unit"]})
    plan = get_plan(tmp_path, missing_values=['"', "\\"])
    assert name in plan.recipe.data.columns
    assert write_recipe(plan, tmp_path / "odd.toml") == plan.recipe


def test_excluding_columns_does_not_change_the_id(tmp_path):
    write(tmp_path, id=None, name=None)
    assert get_plan(tmp_path, columns={"price": "ignored"}).recipe.data.id is None
    write(tmp_path)
    assert get_plan(tmp_path, columns={"id": "ignored"}).recipe.data.id == "id"


def test_too_few_ranking_rows_cause_a_warning(tmp_path):
    write(tmp_path, **{name: cells[:80] for name, cells in COLUMNS.items()})
    (message,) = get_plan(tmp_path).warnings
    assert message.startswith(
        "with 15 ranking rows the smallest fpr is 0.0625: requests without fpr are rejected"
    )
    write(tmp_path)
    assert get_plan(tmp_path).warnings == []


@pytest.mark.parametrize(
    ("source", "name"), [("csv:a b.csv", "a-b"), ("images:x/Cats/", "Cats"), ("npz:ü.npz", "model")]
)
def test_model_is_named_after_its_file(source, name):
    assert model_name_for(source) == name


def test_rounded_shares_reproduce_row_counts():
    for rows in (8, 77, 1000, 123_457):
        for size in {1, rows // 7, rows // 3}:
            assert round(round_share(size, rows) * rows) == size


def test_plans_support_arrays_and_images(tmp_path):
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


def test_inspect_prints_text_or_json_and_reports_target_errors(tmp_path, capsys):
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


def test_inspect_reports_column_format_once(tmp_path, capsys):
    rows = "".join(f"{n % 60}%,{'yes' if n % 60 > 30 else 'no'}\n" for n in range(300))
    (tmp_path / "shares.csv").write_text("share,left\n" + rows)
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:shares.csv", "--target", "left"]) == 0
    assert "".join(capsys.readouterr()).count("column share: reading '0%' as 0") == 1


def test_fit_without_recipe_explains_plan_and_writes_reproducible_recipe(
    tmp_path, capsys, monkeypatch, fits
):
    from model_store.artifacts.store import ModelStore

    monkeypatch.setattr("training.data.plan.MAX_STEPS", 60)
    write(tmp_path, code=None)
    recipe = tmp_path / "things.toml"
    command = [
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
        assert main([*command, "--quiet"]) == 0
        message = capsys.readouterr().err
        refit = ["fit", str(recipe), "--quiet", "--device", "cpu", "--json"]
        assert main(refit) == 0
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


def test_plan_keeps_configured_test_fraction(tmp_path):
    write(tmp_path)
    section = DataSection(source="csv:things.csv", target="kind", test_fraction=0.1)
    plan = make_plan(inspect_source(section, tmp_path), section, None, None)
    assert plan.recipe.data.test_fraction == 0.1
    data = load_data(plan.recipe, tmp_path)
    assert len(data.test) == ROWS / 10
    assert len(split(data, split_sizes(plan.recipe)).ranking) == round(0.12 * 0.9 * ROWS)


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_fit_rejects_invalid_plan_options(tmp_path, capsys, options, message):
    write(tmp_path)
    with working_in(tmp_path):
        assert main(["fit", *options]) == 2
    assert message in capsys.readouterr().err


def test_nearly_unique_text_is_ignored_and_other_columns_are_loaded(tmp_path):
    titles = [f"Title {i if i % 100 else 0}" for i in range(3 * ROWS)]  # one occurs 9 times
    table = {name: cells * 3 for name, cells in COLUMNS.items()} | {"name": titles}
    write(tmp_path, **table)
    columns = {column.name: column for column in inspect(tmp_path).columns}
    assert columns["name"].kind == "ignored"
    section = DataSection(source="csv:things.csv", target="kind")
    data = load_data(
        make_plan(inspect_source(section, tmp_path), section, None, None).recipe, tmp_path
    )
    assert "name" not in {column.name for column in data.columns}


def test_inspect_reports_errors_that_would_stop_a_fit(tmp_path, capsys):
    write(tmp_path, price=["?" if i == 5 else cell for i, cell in enumerate(COLUMNS["price"])])
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:things.csv", "--target", "kind"]) == 0
    assert "! a fit would fail: column price: expected numbers" in capsys.readouterr().out


def test_fit_that_fails_before_training_writes_no_recipe(tmp_path, capsys):
    price = ["?" if i == 5 else cell for i, cell in enumerate(COLUMNS["price"])]
    write(tmp_path, price=price)
    fit, recipe = ["fit", "--data", "csv:things.csv", "--target", "kind"], tmp_path / "a.toml"
    with working_in(tmp_path):
        assert main([*fit, "--recipe-out", str(recipe)]) == 2
    assert "column price: expected numbers" in capsys.readouterr().err
    assert not recipe.exists()


def test_classes_with_fewer_than_three_rows_are_left_out_with_a_warning(tmp_path):
    kinds = ["twice", "twice", *(f"once{i}" for i in range(6)), *COLUMNS["kind"][8:]]
    write(tmp_path, kind=kinds)
    plan = get_plan(tmp_path)
    assert plan.recipe.data.leave_out == ["twice", *(f"once{i}" for i in range(6))]
    message = "leaving out classes with fewer than 3 rows: 'twice' (2), 'once0' (1), 'once1' (1)"
    assert plan.warnings[0].startswith(message)
    data = load_data(plan.recipe, tmp_path)
    assert data.classes == ("a", "b", "c")
    split(data, split_sizes(plan.recipe))
    section = plan.recipe.data.model_copy(update={"leave_out": []})
    recipe = plan.recipe.model_copy(update={"data": section})
    fragments = ("training rows of every class (leave a class out", "once", "which have [", "merge")
    assert_invalid(lambda: split(load_data(recipe, tmp_path), split_sizes(recipe)), *fragments)


def test_mostly_numeric_target_requires_missing_values_or_a_task(tmp_path, capsys):
    price = ["unknown" if i % 50 == 0 else i % 20 for i in range(ROWS)]
    write(tmp_path, price=price)
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
    findings = inspect(tmp_path, "price", missing_values=["unknown"])
    assert (findings.task, findings.rows) == ("regression", ROWS - 6)
    assert inspect(tmp_path, "price", "classification").task == "classification"


def test_classes_that_differ_only_in_case_cause_a_warning(tmp_path, capsys):
    write(tmp_path, kind=[["Yes", "no", "YES", "yes", "No"][i % 5] for i in range(ROWS)])
    warning = "! classes that differ only in their spelling: 'No', 'no'; 'YES', 'Yes', 'yes'"
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:things.csv", "--target", "kind"]) == 0
        assert warning in capsys.readouterr().out
        fit = ["fit", "--data", "csv:things.csv", "--target", "kind"]
        assert main([*fit, "--recipe-out", "nowhere/a.toml"]) == 2
        assert warning in capsys.readouterr().err


def test_ambiguous_dates_require_a_date_format(tmp_path, capsys):
    write(tmp_path, born=[f"0{1 + i % 9}/0{1 + i % 7}/2020" for i in range(ROWS)])
    columns = {column.name: column for column in inspect(tmp_path).columns}
    assert columns["born"].kind == "refused"
    assert '--date-format to "%d/%m/%Y"' in columns["born"].reason
    assert columns["size"].kind == "numeric"
    with working_in(tmp_path):
        assert main(["fit", "--data", "csv:things.csv", "--target", "kind"]) == 2
    assert "column born: expected unambiguous dates" in capsys.readouterr().err
    with working_in(tmp_path):
        assert main(["inspect", "--data", "csv:things.csv", "--date-format", "%d/%m/%Y"]) == 0
    assert re.search("born +time", capsys.readouterr().out)


def test_column_kinds_are_inferred_from_rows_with_a_target(tmp_path):
    price = ["sold" if i < 100 else cell for i, cell in enumerate(COLUMNS["price"])]
    kind = [None if i < 100 or i == 200 else cell for i, cell in enumerate(COLUMNS["kind"])]
    write(tmp_path, price=price, kind=kind)
    columns = {column.name: column for column in inspect(tmp_path).columns}
    assert columns["price"].kind == "numeric"
    assert columns["price"].missing == 0.0
    assert columns["size"].missing == 19 / 199
    assert (columns["id"].reason, columns["id"].is_id) == ("it numbers the rows", True)
    data = load_data(get_plan(tmp_path).recipe, tmp_path)
    assert {column.name: column.kind for column in data.columns}["price"] == "numeric"
    price[150] = "sold"
    write(tmp_path, price=price, kind=kind)
    columns = {column.name: column for column in inspect(tmp_path).columns}
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
