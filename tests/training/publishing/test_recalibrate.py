import shutil

import numpy as np
import pytest
from scipy import stats

from model_store.artifacts.manifest import FILES
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from tests.support.environment import working_in
from tests.support.recipes import get_recipe
from tests.support.refusals import refused
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


def flags(folder, version):
    """Which rows of the new data that no version was fitted or calibrated on are flagged at .05."""
    store = ModelStore(folder / "models")
    model = Model.load(store.open("digits", version, NEEDED))
    data = npz(folder / "bright.npz")
    rows = split_rows(data, REFERENCE, RANKING, 0).test
    draws = model.manifest.noise.default_draws
    prediction, _ = served_prediction(model, rows, draws, seed=12, share=1)
    return prediction.judged_p_values.p_value <= 0.05


def npz(path):
    return load(get_recipe(f"npz:{path.name}"), path.parent)


def test_recalibration_restores_the_flag_s_rate(folder):
    """Before, the flag fires far more often than .05; after, its count on fresh rows is
    beta-binomial."""
    before, after = flags(folder, "1"), flags(folder, "2")
    assert len(after) == TEST
    k = int(0.05 * (RANKING + 1))
    law = stats.betabinom(TEST, k, RANKING + 1 - k)
    assert before.sum() > law.ppf(1 - 5e-7)
    assert law.ppf(5e-7) <= after.sum() <= law.ppf(1 - 5e-7)


def test_graphs_and_weights_are_the_parent_s_byte_for_byte(folder):
    store = ModelStore(folder / "models")
    parent, child = (store.open("digits", version) for version in ("1", "2"))
    for file in FILES:
        assert (child.files[file] == parent.files[file]) == (file != "calibration.safetensors"), (
            file
        )


def test_the_manifest_says_where_the_calibration_is_from(folder):
    store = ModelStore(folder / "models")
    parent, child = (store.manifest("digits", version) for version in ("1", "2"))
    facts = dict(child.training["recalibrated"])
    assert facts.pop("data_digest") == npz(folder / "bright.npz").digest()
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


def test_by_default_at_most_a_third_of_the_rows_is_in_each_split(folder):
    options = ["--data", "npz:bright.npz", "--as", "brighter", "--seed", "3", "--quiet"]
    with working_in(folder):
        assert main(["calibrate", "digits:1", *options]) == 0
    detectors = ModelStore(folder / "models").manifest("brighter", "1").detectors
    assert (detectors.reference_rows, detectors.ranking_rows) == (119, 119)  # of 140 and 220 before


def test_the_deal_uses_every_row_once_and_its_seed_says_which():
    y = np.arange(50, dtype=np.int64)
    x = y[:, None].astype(np.float32)
    data = Dataset(Rows(x[:40], y[:40]), Rows(x[40:], y[40:]), (1,), ("a", "b"), 0.0, 50.0)
    first, again, other = (split_rows(data, 10, 15, seed) for seed in (0, 0, 1))
    parts = (first.reference, first.ranking, first.test)
    assert [len(part) for part in parts] == [10, 15, 25]
    assert sorted(np.concatenate([part.y for part in parts])) == list(range(50))
    assert all((part.x[:, 0] == part.y).all() for part in parts)
    assert (first.test.y == again.test.y).all()
    assert (first.test.y != other.test.y).any()


def test_rows_take_the_model_s_class_numbers_whichever_classes_they_have():
    x, y = np.zeros((4, 1), dtype=np.float32), np.array([0, 1, 1, 0], dtype=np.int64)
    data = Dataset(Rows(x, y), Rows(x[:1], y[1:2]), (1,), ("b", "c"), 0.0, 1.0)
    reference = renumber(data, ("a", "c", "b"))
    assert reference.classes == ("a", "c", "b")
    assert (reference.train.y.tolist(), reference.test.y.tolist()) == ([2, 1, 1, 2], [1])
    refused(lambda: renumber(data, ("a", "b")), "rows of the classes ['a', 'b'], got rows of ['c']")


def test_a_warm_start_goes_on_from_it_and_pruning_is_refused(folder, tmp_path):
    store = ModelStore(folder / "models")
    parent = open_parent(store, "digits:2", "--warm-start")
    assert parent.weights == store.open("digits", "1").files["weights.safetensors"]
    refused(
        lambda: prune_version(store, parent, digits(), 0.5, "digits"),
        "model: expected a version that was not recalibrated, got digits version 2, recalibrated "
        "from digits version 1",
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent", "--data", "npz:bright.npz"], "model: expected one of"),
        (["digits:9", "--data", "npz:bright.npz"], "version: expected one of"),
        (["digits:1", "--data", "npz:absent.npz"], "data.source: expected a readable npz file"),
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
def test_what_cannot_be_calibrated_on_is_refused_in_one_line(folder, capsys, arguments, says):
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
    assert says in error
    assert ModelStore(folder / "models").versions("digits") == before
