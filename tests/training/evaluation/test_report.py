import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest

from model_store.artifacts.report import evaluation_report
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from model_store.scores.classification import SCORE_NAMES
from tests.support.models import publish_unfitted
from tests.support.recipes import recipe_with, write_recipe
from training.__main__ import main
from training.commands import print_messages
from training.data.arrays import digits
from training.evaluation.evaluate import EvaluationOptions, load_data, write_report
from training.evaluation.evaluate import test_rows as measured_rows
from training.evaluation.quality import ServedPredictor, measure_set
from training.publishing.baselines import LOG_LIKELIHOOD
from training.scoring import draw_seed
from training.versions import WEIGHTS, load_parent, open_version


@pytest.fixture
def report(evaluated_store):
    return evaluation_report(ModelStore(evaluated_store), "digits", "1")


@pytest.fixture(scope="module")
def model(digits_store):
    return Model.load(ModelStore(digits_store).open("digits", "1", files=NEEDED))


def test_report_has_every_outlier_set_and_score(report):
    content = report.report
    assert set(content["outliers"]) == {"uniform", "gaussian", "odd", "mixed", "rotated"}
    scores = {*content["detectors"]["all"], "flag"}
    assert scores > {*SCORE_NAMES}
    for entry in content["outliers"].values():
        assert set(entry["scores"]) == scores
        assert entry["base_rate"] == entry["rows"] / (entry["rows"] + 32)
        for measured in entry["scores"].values():
            figures = {"auroc", "average_precision"}
            assert set(measured) == {*figures, "confidence_intervals"}
            assert set(measured["confidence_intervals"]) == figures
            for name in figures:
                low, high = measured["confidence_intervals"][name]
                assert 0 <= low <= measured[name] <= high <= 1
    assert set(content["test"]["aurc"]) == scores


def leaves(content, path=""):
    """Yield the path of each figure in a nested table."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}.")
        elif isinstance(value, float):
            yield f"{path}{name}"


def test_every_figure_has_confidence_interval(report):
    content = report.report
    assert (content["confidence_level"], content["resamples"]) == (0.95, 1000)
    assert set(content["summary_intervals"]) == set(content["summary"])
    records = [
        content["test"],
        *content["outliers"].values(),
    ]
    by_design = {"base_rate"}  # not an estimate
    for record in records:
        inner = ("confidence_intervals", "scores", "error_detection")
        figures = {
            *leaves({name: value for name, value in record.items() if name not in inner})
        } - by_design
        assert set(record["confidence_intervals"]) == figures
        for low, high in record["confidence_intervals"].values():
            assert low <= high
    for entry in content["test"]["reliability"]:
        low, high = entry["confidence_intervals"]["accuracy"]
        assert low <= entry["accuracy"] <= high
    assert np.sum(content["test"]["confusion"]) == content["test"]["rows"]


def test_report_measures_each_class_and_label_separately(report):
    content = report.report
    confusion = np.array(content["test"]["confusion"])
    for grouping, counts in (("class", confusion.sum(1)), ("label", confusion.sum(0))):
        parts = {part["name"]: part for part in content["parts"] if part["by"] == grouping}
        assert sum(part["rows"] for part in parts.values()) == content["test"]["rows"]
        for name, hits, count in zip(
            content["test"]["classes"], confusion.diagonal(), counts, strict=True
        ):
            if count:
                assert parts[name]["accuracy"] == pytest.approx(hits / count)
                ends = parts[name]["confidence_intervals"]
                assert {"accuracy", "covered", "flagged"} == set(ends)
        flagged = sum(part["rows"] * part["flagged"] for part in parts.values())
        assert flagged == pytest.approx(
            content["test"]["flagged"]["0.05"] * content["test"]["rows"]
        )
    assert {part["by"] for part in content["parts"]} == {"class", "label"}


def test_flag_detects_rows_far_from_data(report):
    for name in ("uniform", "gaussian", "odd"):
        assert report.report["outliers"][name]["scores"]["flag"]["auroc"] > 0.99
        assert report.report["outliers"][name]["flagged"]["0.05"] > 0.95


@pytest.mark.slow
def test_report_depends_only_on_seed(evaluated_store, digits_store, tmp_path, monkeypatch, capsys):
    shutil.copytree(digits_store, tmp_path / "models")
    monkeypatch.setenv("DUBITO_STORE", str(tmp_path / "models"))
    monkeypatch.setenv("DUBITO_DATA", str(evaluated_store.parent))
    options = ["evaluate", "digits", "--rows", "32", "--outliers", "odd=npz:odd.npz", "--quiet"]
    assert main(options) == 0
    assert "report of digits version 1" in capsys.readouterr().out
    first = evaluation_report(ModelStore(evaluated_store), "digits", "1").report
    second = evaluation_report(ModelStore(tmp_path / "models"), "digits", "1").report
    assert (second["test"], second["outliers"]) == (first["test"], first["outliers"])
    assert main([*options, "--seed", "1"]) == 0
    assert (
        evaluation_report(ModelStore(tmp_path / "models"), "digits", "1").report["test"]
        != first["test"]
    )


def test_predictor_gives_same_results_as_service(model, digits_rows):
    x = digits_rows[:20]
    predicted = ServedPredictor(model, 30, 0)("test", x)

    for i, part in enumerate((x[:16], x[16:])):
        theta = model.runtime.draw(
            draw_seed(ServedPredictor(model, 30, 0).request_seed("test"), i), 0, 30
        )
        expected = model.predict(part, theta)
        rows = slice(16 * i, 16 * i + len(part))
        assert np.array_equal(
            predicted.prediction.p_values.p_value[rows], expected.p_values.p_value
        )
        assert np.array_equal(predicted.scores["entropy"][rows], expected.detected["entropy"])


def test_rows_with_non_finite_results_count_as_detected(model, digits_rows, caplog):
    reference = digits_rows[:8]
    odd = reference.copy()
    odd[:3] = np.inf
    with np.errstate(all="ignore"):
        predicted = ServedPredictor(model, draws=10, seed=0)("far", odd)
    assert "far: 3 of 8 rows have results that are not finite" in caplog.text
    full = ServedPredictor(model, draws=10, seed=0)("far", reference)
    measured = measure_set(full, predicted)
    for name, score in predicted.scores.items():
        assert (score[:3] > score[3:].max()).all(), name
        np.testing.assert_array_equal(score[3:], full.scores[name][3:])
        assert measured["scores"][name]["auroc"] >= 0.5
    for fpr, share in predicted.flagged.items():
        assert share >= 3 / 8, fpr


def test_flag_statistic_orders_rows_like_p_values(model, digits_rows):
    noise = np.random.default_rng(0).uniform(0, 16, (30, 64)).astype(np.float32)
    predicted = ServedPredictor(model, 100, 0)("test", np.concatenate([digits_rows[:60], noise]))
    order = np.argsort(predicted.scores["flag"])
    assert (np.diff(predicted.prediction.p_values.p_value[order]) <= 0).all()


@pytest.mark.usefixtures("fits")
def test_regression_report_has_intervals_and_no_classes(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 3))
    np.savez(tmp_path / "line.npz", x=x, y=x.sum(axis=1) + 0.1 * generator.normal(size=400))
    data = {"source": "npz:line.npz", "validation": 30}
    schedule = {"epochs": 20, "batch_rows": 40, "learning_rate": 1e-2}
    content = {
        "data": data,
        "network": {"hidden": [8]},
        "training": schedule,
        "serving": {"draws": 10},
    }
    recipe = write_recipe(
        tmp_path, name="line", task="regression", method="bbb-gaussian", **content
    )
    for name, folder in (("STORE", "models"), ("RUNS", "runs"), ("DATA", "")):
        monkeypatch.setenv(f"DUBITO_{name}", str(tmp_path / folder))
    monkeypatch.setattr("training.evaluation.evaluate.write_report", write_report)
    assert main(["fit", str(recipe), "--quiet", "--device", "cpu"]) == 0
    store = ModelStore(tmp_path / "models")
    fit_report = evaluation_report(store, "line", "1")
    assert fit_report.report["test"]["rows"] == 80
    assert fit_report.report["outliers"] == {}
    assert main(["evaluate", "line", "--rows", "80", "--quiet"]) == 0
    report = evaluation_report(store, "line", "1").report
    assert set(report["outliers"]) == {"uniform", "gaussian"}
    assert [entry["nominal"] for entry in report["test"]["intervals"]] == [0.5, 0.8, 0.9, 0.95]
    covered = [entry["covered"] for entry in report["test"]["intervals"]]
    assert covered == sorted(covered)
    test = report["test"]
    assert {"rmse", "log_likelihood", "crps"} <= set(test)
    assert sum(entry["rows"] for entry in test["by_spread"]) == 80
    coverage = sum(entry["rows"] * entry["covered"] for entry in test["by_spread"]) / 80
    assert coverage == pytest.approx(test["interval_coverage_at_95"])
    inner = ("confidence_intervals", "pit")
    assert set(test["confidence_intervals"]) == {
        *leaves({k: v for k, v in test.items() if k not in inner})
    }
    low, high = test["confidence_intervals"]["crps"]
    assert 0 < low < test["crps"] < high < test["rmse"]


@pytest.mark.parametrize(("split", "rows"), [("time", "later rows"), ("group", "new groups")])
def test_report_measures_shift_of_later_rows_and_new_groups(
    tmp_path, monkeypatch, capsys, split, rows
):
    random, days = np.random.default_rng(0), np.arange(300)
    shift = np.where((split == "time") & (days >= 240), 9, 0)
    table = pd.DataFrame({"x": random.normal(size=300) + shift, "y": days % 2, "key": days // 4})
    table.to_csv(tmp_path / "a.csv", index=False)
    sizes = {"test_fraction": 0.2, "validation": 30, "reference": 30, "ranking": 40}
    data = {"source": "csv:a.csv", "target": "y", split: "key", **sizes}
    store = ModelStore(tmp_path / "models")
    publish_unfitted(store, recipe_with(name="visits", data=data), tmp_path)
    for name, folder in (("STORE", "models"), ("DATA", "")):
        monkeypatch.setenv(f"DUBITO_{name}", str(tmp_path / folder))
    assert main(["evaluate", "visits", "--quiet"]) == 0
    assert f"  {rows} by key: coverage " in capsys.readouterr().out
    actual = evaluation_report(store, "visits", "1")
    shift = actual.report["shift"]
    assert shift["rows"] == actual.report["test"]["rows"] and shift["by"] == split
    assert (shift["scores"]["flag"]["auroc"] > 0.9) == (split == "time")
    low, high = shift["confidence_intervals"]["covered"]
    assert low <= shift["covered"] <= high
    assert "<h2>Shift</h2>" in actual.read("report.html").decode()


def create_people(rows, seed=0):
    random = np.random.default_rng(seed)
    lines = ["a,bit,city,y"]
    for a in random.normal(size=rows):
        city = random.choice(["<b>Rome|</b>", "Oslo"])
        label = "$yes$" if a > 0 else "no"
        lines.append(f"{a:.3f},{random.integers(0, 2)},{city},{label}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def people_folder(tmp_path_factory, fits):
    folder = tmp_path_factory.mktemp("people")
    (folder / "people.csv").write_text(create_people(400))
    rows = {"validation": 30, "reference": 30, "ranking": 30}
    data = {"source": "csv:people.csv", "target": "y", "test_fraction": 0.4, **rows}
    publish_unfitted(ModelStore(folder / "models"), recipe_with(name="people", data=data), folder)
    return folder


def test_table_report_has_baselines_and_even_rows_instead_of_noise(
    people_folder, monkeypatch, capsys
):
    for name, folder in (("STORE", "models"), ("DATA", "")):
        monkeypatch.setenv(f"DUBITO_{name}", str(people_folder / folder))
    assert main(["evaluate", "people"]) == 0
    out, message = capsys.readouterr()
    assert "even_flag_auroc" in out
    assert "measured on the test rows of csv:people.csv (160)" in message
    actual = evaluation_report(ModelStore(people_folder / "models"), "people", "1")
    assert set(actual.report["outliers"]) == {"even", "crossed"}
    page = actual.read("report.html").decode()
    manifest = ModelStore(people_folder / "models").manifest("people", "1")
    plain = {"this model": manifest.quality, **manifest.baselines}
    assert list(plain) == ["this model", "constant", "linear", "boosting"]
    assert f"<td>boosting</td><td>{plain['boosting']['test_accuracy']:.4g}</td>" in page
    assert f"worse than boosting: log-likelihood {plain['this model'][LOG_LIKELIHOOD]:.4g}" in page
    assert "<b>" not in page
    assert "<code>even</code>" in page


def test_evaluation_uses_test_rows_of_fitted_file_and_all_rows_of_others(
    people_folder, tmp_path, capsys
):
    version = load_parent(
        open_version(ModelStore(people_folder / "models"), "people", (WEIGHTS,)), "model"
    )
    shutil.copy(people_folder / "people.csv", tmp_path / "copy.csv")
    (tmp_path / "new.csv").write_text(create_people(50, seed=1) + "1.0,1,Oslo,maybe\n" * 7)
    (tmp_path / "people.csv").write_text(create_people(60, seed=2))
    results = []
    for source in ("csv:copy.csv", "csv:new.csv", "csv:people.csv"):
        with print_messages():
            data, is_fitted = load_data(version, tmp_path, source)
            test = measured_rows(data, is_fitted, EvaluationOptions(rows=55), source)
        results.append((len(test), is_fitted, capsys.readouterr().err))
        if source == "csv:new.csv":
            assert len(data.left_out) == 7
    assert [(rows, is_fitted) for rows, is_fitted, _ in results] == [
        (55, True),
        (50, False),
        (55, False),
    ]
    assert "measured on 55 (--rows) of the test rows of csv:copy.csv (160)" in results[0][2]
    assert "measured on all rows of csv:new.csv (50)" in results[1][2]
    assert "fitted on" not in results[1][2]
    assert "csv:people.csv has changed since people version 1 was fitted on it" in results[2][2]
    assert "measured on 55 (--rows) of all rows of csv:people.csv (60)" in results[2][2]
    (people_folder / "part.csv").write_text("\n".join(create_people(400).split("\n")[:101]))
    for source, is_fitted in (("csv:people.csv", True), ("csv:part.csv", False)):
        with print_messages():
            assert load_data(version, people_folder, source)[1] == is_fitted
        warning = re.search(
            r"[5-9]\d of 100 rows of csv:part.csv are training rows of people version 1",
            message := capsys.readouterr().err,
        )
        assert bool(warning) != is_fitted
        assert "changed" not in message


@pytest.mark.usefixtures("fits")
def test_rows_of_unknown_classes_form_separate_outlier_set(tmp_path, monkeypatch, capsys):
    store = tmp_path / "models"
    for variable, folder in (
        ("DUBITO_STORE", store),
        ("DUBITO_RUNS", tmp_path / "runs"),
        ("DUBITO_DATA", tmp_path),
    ):
        monkeypatch.setenv(variable, str(folder))
    data = {"validation": 100, "reference": 120, "ranking": 120}
    schedule = {"epochs": 10, "batch_rows": 64, "learning_rate": 1e-2}
    recipe = write_recipe(
        tmp_path, method="mle", data=data, network={"hidden": [16]}, training=schedule
    )
    assert main(["fit", str(recipe), "--leave-out", "0", "--leave-out", "6", "--quiet"]) == 0
    assert main(["evaluate", "small", "--rows", "500", "--quiet"]) == 0
    fit_report = evaluation_report(ModelStore(store), "small", "1").report
    test = digits().test
    is_left_out = np.isin(test.y, [0, 6])
    assert fit_report["test"]["rows"] == np.sum(~is_left_out)
    assert fit_report["outliers"]["left-out"]["rows"] == np.sum(is_left_out)
    # The file contains the same rows, so the report must have the same sets.
    x = test.x.reshape(-1, 8, 8)
    np.savez(tmp_path / "other.npz", x_train=x, y_train=test.y, x_test=x, y_test=test.y)
    capsys.readouterr()
    evaluate = [
        "evaluate",
        "small",
        "--data",
        "npz:other.npz",
        "--rows",
        "500",
        "--quiet",
        "--json",
    ]
    assert main(evaluate) == 0
    file_report = evaluation_report(ModelStore(store), "small", "1").report
    assert json.loads(capsys.readouterr().out) == file_report
    assert file_report["test"] == fit_report["test"]
    assert file_report["outliers"]["left-out"] == fit_report["outliers"]["left-out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "model"),
        (["digits:7"], "version"),
        (["digits", "--outliers", "a"], "--outliers"),
        (["digits", "--outliers", "uniform=npz:odd.npz"], "uniform"),
        (
            ["digits", "--outliers", "a=npz:odd.npz", "--outliers", "a=npz:odd.npz"],
            "names other than",
        ),
        (["digits", "--outliers", "a=npz:none.npz"], "none.npz"),
        (["digits", "--rows", "1"], "--rows"),
        (["digits", "--draws", "0"], "--draws"),
        (["digits", "--draws", "1001"], "--draws"),
        (["digits", "--seed", "-1"], "--seed"),
        (["digits", "--data", "npz:odd.npz"], "x and y"),
    ],
)
def test_invalid_arguments_print_one_line_and_keep_report(
    evaluated_store, monkeypatch, capsys, options, message
):
    monkeypatch.setenv("DUBITO_STORE", str(evaluated_store))
    monkeypatch.setenv("DUBITO_DATA", str(evaluated_store.parent))
    before = json.dumps(evaluation_report(ModelStore(evaluated_store), "digits", "1").report)
    assert main(["evaluate", *options, "--quiet"]) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert (
        json.dumps(evaluation_report(ModelStore(evaluated_store), "digits", "1").report) == before
    )
