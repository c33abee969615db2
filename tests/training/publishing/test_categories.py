import json

import numpy as np
import pytest

from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from tests.support.environment import working_in
from tests.support.recipes import write_recipe
from training.__main__ import main

SITES = ("north", "south", "tiny")
ROWS = 400


def write_table(path, seed):
    rng = np.random.default_rng(seed)
    site = rng.choice(3, ROWS, p=[0.5, 0.45, 0.05])
    x = rng.normal(size=ROWS)
    y = x + rng.normal(size=ROWS) * np.array([0.1, 1.0, 0.1])[site]
    lines = [f"{a},{b},{SITES[s]}" for a, b, s in zip(x, y, site.tolist(), strict=True)]
    path.write_text("\n".join(["x,y,site", *lines]) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fits):
    folder = tmp_path_factory.mktemp("sites")
    write_table(folder / "rows.csv", 0)
    write_table(folder / "others.csv", 1)
    recipe = write_recipe(
        folder,
        name="sites",
        method="mle",
        task="regression",
        data={
            "source": "csv:rows.csv",
            "target": "y",
            "calibration_group": "site",
            "columns": {"site": "ignored"},
            "test_fraction": 0.3,
            "validation": 10,
            "reference": 30,
            "ranking": 100,
        },
        posterior={},
        training={"epochs": 100, "learning_rate": 1e-2},
        serving={"calibration": "group"},
    )
    with working_in(folder):
        assert main(["fit", str(recipe), "--quiet", "--device", "cpu"]) == 0
        assert main(["evaluate", "sites", "--quiet"]) == 0
        assert main(["calibrate", "sites:1", "--data", "csv:others.csv"]) == 0
    return folder


def load_model(folder, name, version="1"):
    return Model.load(ModelStore(folder / "models").open(name, version, NEEDED))


def get_parts(folder):
    (file,) = (folder / "models").rglob("report.json")
    assert "<h2>Parts</h2>" in file.with_name("report.html").read_text()
    return {part["name"]: part for part in json.loads(file.read_text())["parts"]}


def test_manifest_names_calibration_groups_and_groups_with_too_few_rows(folder):
    manifest = load_model(folder, "sites").manifest
    categories = manifest.categories
    assert (categories.kind, categories.column, categories.names) == ("group", "site", SITES)
    assert sum(categories.judged_rows) == manifest.detectors.ranking_rows == 100
    assert categories.judged_rows == categories.true_rows
    assert (
        f"calibrated by group, and of tiny {categories.true_rows[2]} there are fewer than 19"
        in manifest.too_few_rows
    )
    assert manifest.detectors.smallest_fpr == 1 / (max(categories.judged_rows) + 1)
    assert [column.name for column in manifest.input.columns] == ["x"]


def test_interval_width_depends_on_group(folder):
    tables = load_model(folder, "sites").calibration.rank_tables[1]
    ends = tables.intervals(np.zeros(3), np.ones(3), 0.9, categories=np.array([0, 1, -1]))
    assert ends[1, 1] > 2 * ends[0, 1]
    assert ends[2, 1] == ends[1, 1]


def test_report_measures_every_group_with_intervals(folder):
    parts = get_parts(folder)
    assert set(parts) == set(SITES)
    assert sum(part["rows"] for part in parts.values()) == 120
    for part in parts.values():
        assert part["by"] == "group"
        assert set(part["confidence_intervals"]) == {"rmse", "covered", "flagged"}
        low, high = part["confidence_intervals"]["covered"]
        assert low <= part["covered"] <= high
    assert parts["south"]["rmse"] > 2 * parts["north"]["rmse"]


def test_group_with_few_rows_is_always_covered(folder):
    tiny = get_parts(folder)["tiny"]
    assert (tiny["covered"], tiny["flagged"]) == (1.0, 0.0)


def test_recalibration_keeps_kind_of_categories(folder):
    manifest = load_model(folder, "sites", "2").manifest
    assert (manifest.categories.kind, manifest.categories.column) == ("group", "site")
    assert sum(manifest.categories.judged_rows) == manifest.detectors.ranking_rows
    assert (
        manifest.categories.judged_rows
        != load_model(folder, "sites").manifest.categories.judged_rows
    )
