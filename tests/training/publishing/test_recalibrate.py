import shutil

import numpy as np
import pytest
from scipy import stats

from model_store.artifacts.manifest import FILES
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from tests.support.environment import working_in
from tests.support.recipes import get_recipe
from tests.support.refusals import assert_invalid
from training.__main__ import main
from training.data import load
from training.data.arrays import digits
from training.data.rows import Dataset, Rows, renumber
from training.publishing.derive import prune_version, split_rows
from training.scoring import served_prediction
from training.versions import open_parent

BRIGHTNESS = 2.0
REFERENCE, RANKING, TEST = 120, 180, 59


@pytest.fixture(scope="module")
def folder(digits_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recalibrated")
    shutil.copytree(digits_store, folder / "models")
    rows = digits().test
    np.savez(folder / "bright.npz", x=(BRIGHTNESS * rows.x).reshape(-1, 8, 8), y=rows.y)
    with working_in(folder):
        sizes = ["--reference-rows", str(REFERENCE), "--ranking-rows", str(RANKING)]
        assert main(["calibrate", "digits:1", "--data", "npz:bright.npz", *sizes, "--quiet"]) == 0
    return folder


def get_flags(folder, version):
    """Return the flags at fpr 0.05 of new rows outside every fit and calibration."""
    store = ModelStore(folder / "models")
    model = Model.load(store.open("digits", version, NEEDED))
    data = load_npz(folder / "bright.npz")
    rows = split_rows(data, REFERENCE, RANKING, 0).test
    draws = model.manifest.noise.default_draws
    prediction, _ = served_prediction(model, rows, draws, seed=12, share=1)
    return prediction.judged_p_values.p_value <= 0.05


def load_npz(path):
    return load(get_recipe(f"npz:{path.name}"), path.parent)


def test_recalibration_restores_flag_rate(folder):
    """Check that only the recalibrated flag has a beta-binomial count on fresh rows."""
    before, after = get_flags(folder, "1"), get_flags(folder, "2")
    assert len(after) == TEST
    k = int(0.05 * (RANKING + 1))
    distribution = stats.betabinom(TEST, k, RANKING + 1 - k)
    assert before.sum() > distribution.ppf(1 - 5e-7)
    assert distribution.ppf(5e-7) <= after.sum() <= distribution.ppf(1 - 5e-7)


def test_recalibration_changes_only_calibration_file(folder):
    store = ModelStore(folder / "models")
    parent, child = (store.open("digits", version) for version in ("1", "2"))
    for file in FILES:
        assert (child.files[file] == parent.files[file]) == (file != "calibration.safetensors"), (
            file
        )


def test_manifest_records_source_of_recalibration(folder):
    store = ModelStore(folder / "models")
    parent, child = (store.manifest("digits", version) for version in ("1", "2"))
    facts = dict(child.training["recalibrated"])
    assert facts.pop("data_digest") == load_npz(folder / "bright.npz").digest()
    assert facts == {
        "name": "digits",
        "version": "1",
        "source": "npz:bright.npz",
        "rows": REFERENCE + RANKING + TEST,
        "test_rows": TEST,
        "seed": 0,
    }
    assert child.training == {**parent.training, "recalibrated": child.training["recalibrated"]}
    assert (child.detectors.reference_rows, child.detectors.ranking_rows) == (REFERENCE, RANKING)
    assert child.detectors.smallest_fpr == 1 / (RANKING + 1)
    assert child.detectors.draw_counts == parent.detectors.draw_counts
    assert child.input == parent.input
    assert child.quality.keys() == parent.quality.keys()
    assert child.quality["flag_rate_at_05"] != parent.quality["flag_rate_at_05"]


def test_default_splits_use_up_to_a_third_of_rows_each(folder):
    options = ["--data", "npz:bright.npz", "--as", "brighter", "--seed", "3", "--quiet"]
    with working_in(folder):
        assert main(["calibrate", "digits:1", *options]) == 0
    detectors = ModelStore(folder / "models").manifest("brighter", "1").detectors
    assert (detectors.reference_rows, detectors.ranking_rows) == (119, 119)  # before: 140, 220


def test_split_uses_every_row_once_and_depends_on_seed():
    y = np.arange(50, dtype=np.int64)
    x = y[:, None].astype(np.float32)
    data = Dataset(Rows(x[:40], y[:40]), Rows(x[40:], y[40:]), (1,), ("a", "b"), 0.0, 50.0)
    first, repeated, reseeded = (split_rows(data, 10, 15, seed) for seed in (0, 0, 1))
    parts = (first.reference, first.ranking, first.test)
    assert [len(part) for part in parts] == [10, 15, 25]
    assert sorted(np.concatenate([part.y for part in parts])) == list(range(50))
    assert all((part.x[:, 0] == part.y).all() for part in parts)
    assert (first.test.y == repeated.test.y).all()
    assert (first.test.y != reseeded.test.y).any()


def test_renumbering_maps_rows_to_class_numbers_of_model():
    x, y = np.zeros((4, 1), dtype=np.float32), np.array([0, 1, 1, 0], dtype=np.int64)
    data = Dataset(Rows(x, y), Rows(x[:1], y[1:2]), (1,), ("b", "c"), 0.0, 1.0)
    reference = renumber(data, ("a", "c", "b"))
    assert reference.classes == ("a", "c", "b")
    assert (reference.train.y.tolist(), reference.test.y.tolist()) == ([2, 1, 1, 2], [1])
    assert_invalid(
        lambda: renumber(data, ("a", "b")), "rows of the classes ['a', 'b'], got rows of ['c']"
    )


def test_recalibrated_version_allows_warm_start_but_not_pruning(folder, tmp_path):
    store = ModelStore(folder / "models")
    parent = open_parent(store, "digits:2", "--warm-start")
    assert parent.weights == store.open("digits", "1").files["weights.safetensors"]
    assert_invalid(
        lambda: prune_version(store, parent, digits(), 0.5, "digits"),
        "model: expected a version that was not recalibrated, got digits version 2, recalibrated "
        "from digits version 1",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent", "--data", "npz:bright.npz"], "model: expected one of"),
        (["digits:9", "--data", "npz:bright.npz"], "version: expected one of"),
        (["digits:1", "--data", "npz:absent.npz"], "data.source: expected an existing path"),
        (
            ["digits:1", "--data", "digits"],
            "rows that digits version 1 was not fitted on, got the data",
        ),
        (
            ["digits:2", "--data", "digits"],
            "rows that digits version 2 was not fitted on, got the data",
        ),
        (
            ["digits:1", "--data", "npz:wide.npz"],
            "rows of shape (8, 8), the input of digits version 1, got (9, 9)",
        ),
        (["digits:1", "--data", "npz:eleven.npz"], "data.source: expected rows of the classes"),
        (["digits:1", "--data", "npz:bright.npz", "--target", "y"], "data.target: expected"),
        (
            ["digits:1", "--data", "npz:bright.npz", "--ranking-rows", "0"],
            "--ranking-rows: expected at least 1, got 0",
        ),
        (
            ["digits:1", "--data", "npz:bright.npz", "--reference-rows", "300"],
            "fewer than the 359 rows of the source",
        ),
        (["digits:1", "--data", "npz:bright.npz", "--seed", "-1"], "--seed: expected 0"),
        (["digits:1", "--data", "npz:few.npz"], "data.test_fraction: expected both training"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_calibration_arguments_print_one_line_and_exit_with_2(
    folder, capsys, arguments, message
):
    rows = digits().test
    np.savez(folder / "wide.npz", x=np.zeros((40, 9, 9)), y=rows.y[:40])
    np.savez(folder / "eleven.npz", x=rows.x.reshape(-1, 8, 8), y=np.where(rows.y == 3, 11, rows.y))
    np.savez(folder / "few.npz", x=rows.x[:2].reshape(-1, 8, 8), y=[0, 1])
    before = ModelStore(folder / "models").versions("digits")
    with working_in(folder):
        assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert ModelStore(folder / "models").versions("digits") == before
