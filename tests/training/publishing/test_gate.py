"""The gate: what is worse than `champion` is not published, by the command that users run."""

import re

import numpy as np
import pytest

from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from tests.support.recipes import write_recipe
from tests.support.refusals import refused
from training.__main__ import main
from training.data import Rows, digits
from training.evaluation.comparison import worse_by
from training.publishing.quality import Measurable, MeasuredRows
from training.recipe import load

POSTERIOR = {"couplings": 2, "hidden": 8}


@pytest.fixture
def fit(tmp_path, monkeypatch, capsys, fits):
    """Fit a recipe; returns exit code, output and errors."""
    monkeypatch.setenv("DUBITO_STORE", str(tmp_path / "models"))
    monkeypatch.setenv("DUBITO_RUNS", str(tmp_path / "runs"))

    def run(epochs, rate, allowed):
        training = {"epochs": epochs, "batch_rows": 32, "learning_rate": rate, "final_learning_rate": rate}
        gate = {"metrics": {"test_accuracy": allowed, "uniform_noise_flagged_at_05": 1.0}}
        path = write_recipe(tmp_path, name="gated", posterior=POSTERIOR, training=training, gate=gate)
        code = main(["fit", str(path), "--quiet", "--device", "cpu"])
        return code, *capsys.readouterr()

    return run


def test_a_worse_version_is_refused_and_may_be_published_by_a_laxer_gate(fit, tmp_path):
    store = ModelStore(tmp_path / "models")
    code, out, _ = fit(4, 1e-2, 0.0)
    assert code == 0
    assert "no alias champion yet" in out
    store.set_alias("gated", "champion", "1")
    code, out, errors = fit(1, 1e-9, 0.05)
    assert code == 1
    best = store.manifest("gated", "1").quality["test_accuracy"]
    lines = errors.splitlines()
    assert len(lines) == 2, errors
    assert "champion (version 1)" in lines[0]
    assert "test_accuracy" in lines[1]
    assert f"against {best:.6g} of champion (version 1) on the same 359 rows" in lines[1]  # scored anew as it was
    assert re.search(r"worse by 0\.\d+ \(95 % interval 0\.\d+ to 0\.\d+\), p = \S+ \(Tango\), allowed 0.05", lines[1])
    assert store.versions("gated") == ["1"]
    assert len(list(tmp_path.glob("runs/*/checkpoint.safetensors"))) == 1
    code, out, _ = fit(1, 1e-9, 1.0)
    assert code == 0
    assert "going on from step" in out
    assert "gate: test_accuracy: " in out
    assert "no worse than champion (version 1) in test_accuracy, uniform_noise_flagged_at_05" in out
    assert store.versions("gated") == ["1", "2"]


def test_metrics_know_their_direction():
    assert worse_by("test_accuracy", 0.9, 0.95) == pytest.approx(0.05)
    assert worse_by("test_accuracy", 0.97, 0.95) == pytest.approx(-0.02)
    assert worse_by("test_brier", 0.2, 0.1) == pytest.approx(0.1)
    assert worse_by("flag_rate_at_05", 0.02, 0.06) == pytest.approx(0.02)
    assert worse_by("test_interval_coverage_at_95", 0.96, 0.93) == pytest.approx(-0.01)


def test_a_version_of_other_classes_is_measured_by_the_names_of_the_rows(own_store, digits_rows):
    model = Model.load(own_store.open("digits", "1", wanted=NEEDED))
    rows = digits().test.take(np.arange(40))
    own = Measurable.of(model)
    classes = model.manifest.classes
    expected = own.figures(MeasuredRows(rows, (0.0, 16.0), classes, 3))
    order = np.random.default_rng(0).permutation(10)
    renamed = MeasuredRows(
        Rows(rows.x, np.argsort(order)[rows.y]), (0.0, 16.0), (*(classes[c] for c in order), "ten"), 3
    )
    found = own.figures(renamed)
    for name, figure in expected.items():
        if "calibration_error" not in name:  # of which one is a mean over classes
            assert found[name].value == pytest.approx(figure.value), name


@pytest.mark.parametrize(
    "gate",
    [
        {},
        {"level": 0.0, "metrics": {"test_accuracy": 0.0}},
        {"level": 0.6, "metrics": {"test_accuracy": 0.0}},
        {"metrics": {}},
        {"metrics": {"accuracy": 0.0}},
        {"metrics": {"test_accuracy": -0.1}},
        {"against": "a b", "metrics": {"test_accuracy": 0.0}},
        {"worse": 1, "metrics": {"test_accuracy": 0.0}},
    ],
)
def test_a_wrong_gate_is_refused_by_name(tmp_path, gate):
    path = write_recipe(tmp_path, gate=gate)
    refused(lambda: load(path), "gate")
