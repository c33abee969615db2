import shutil
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from model_store.artifacts.store import ModelStore
from model_store.state.database import Database
from model_store.state.labels import (
    AcquiredRow,
    Acquisition,
    Label,
    accept,
    candidates,
    row_format,
    save_acquired,
)
from tests.support.environment import working_in
from tests.support.recipes import write_recipe
from training.__main__ import main
from training.versions import Provenance

pytestmark = pytest.mark.usefixtures("fits")
HELD_OUT = 3  # labelled rows that are test rows


@pytest.fixture(scope="module")
def fit_result(tmp_path_factory):
    from training.data.arrays import digits

    folder = tmp_path_factory.mktemp("few")
    data = digits()
    x, y = data.train.x, data.train.y
    np.savez(
        folder / "few.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:500], y_test=y[200:500]
    )
    recipe = write_recipe(
        folder,
        name="digits",
        data={
            "source": "npz:few.npz",
            "validation": 30,
            "reference": 30,
            "ranking": 30,
        },
        network={"hidden": [32]},
        training={"epochs": 30, "batch_rows": 32, "learning_rate": 1e-2},
        serving={"draws": 20},
    )
    with working_in(folder):
        assert main(["fit", str(recipe), "--quiet", "--device", "cpu"]) == 0
    return SimpleNamespace(
        folder=folder, pool=x[500:700], truth=y[500:700], test=x[200:500], test_labels=y[200:500]
    )


@pytest.fixture
def work(fit_result, tmp_path):
    shutil.copytree(fit_result.folder, tmp_path / "work")
    folder = tmp_path / "work"
    store = ModelStore(folder / "models")
    acquisition = Acquisition(
        "digits", "1", row_format(store.manifest("digits", "1")), "bald", 1, 20
    )
    prediction = {"probabilities": {}, "set": []}
    rows = [
        AcquiredRow(
            str(i),
            i + 1,
            None if i < 60 else 0.5,
            row,
            control=i < 60,
            prediction=prediction if i < 60 else None,
        )
        for i, row in enumerate(fit_result.pool)
    ]
    with closing(Database(folder / "state")) as database, working_in(folder):
        save_acquired(database, acquisition, rows)
        yield SimpleNamespace(
            **vars(fit_result) | {"folder": folder},
            store=store,
            database=database,
            format=acquisition.format,
        )


def send_labels(work, values, key):
    labels = [Label(str(i), str(value)) for i, value in enumerate(values)]
    test_rows = zip(work.test[:HELD_OUT], work.test_labels[:HELD_OUT], strict=True)
    labels += [Label(f"test {i}", str(value), row) for i, (row, value) in enumerate(test_rows)]
    accept(work.database, "digits", work.format, labels, replace=True, key=key)


def run_candidate(work, *options):
    return main(
        ["candidate", "digits", "--state", str(work.folder / "state"), "--device", "cpu", *options]
    )


def test_labels_create_candidate_and_promotion_requires_option_and_key(work, capsys):
    from training.candidate import count_tried_labels

    assert run_candidate(work) == 0
    assert "0 of 1 required new labels" in capsys.readouterr().err
    send_labels(work, work.truth, key=None)
    assert run_candidate(work, "--min-labels", "141") == 0
    assert work.store.versions("digits") == ["1"]
    assert run_candidate(work) == 0
    assert "run `dubito store alias digits latest 2`" in capsys.readouterr().err
    assert candidates(work.database, "digits")[0]["reason"] == "no worse"
    assert count_tried_labels(work.store, work.database, "digits") == 140
    assert count_tried_labels(work.store, work.database, "digits", promote=True) == 0
    assert run_candidate(work, "--promote") == 0
    assert "some labels were sent without a key" in capsys.readouterr().err
    assert work.store.aliases("digits") == {"latest": "1", "candidate": "2"}
    facts = Provenance.of(work.store.manifest("digits", "2"))
    assert facts.labels.rows == 140 and facts.rows["train"] == 110 + 140
    assert facts.labels.left_out == {"copies of held-out rows": HELD_OUT}
    assert (facts.warm_start.version, facts.data_digest) == (
        "1",
        Provenance.of(work.store.manifest("digits", "1")).data_digest,
    )
    send_labels(work, work.truth, key="team")
    assert run_candidate(work, "--promote") == 0
    assert work.store.aliases("digits") == {"latest": "2", "candidate": "2"}
    assert work.store.versions("digits") == ["1", "2"]
    (record,) = candidates(work.database, "digits")
    assert (record["version"], record["against"], record["promoted"]) == ("2", "1", True)
    assert (record["labels"], record["control_labels"], record["reason"]) == (
        140,
        60,
        "no worse",
    )
    for kind, rows in (("test", 300), ("control", 60)):
        accuracy = record[kind]["figures"]["accuracy"]
        assert record[kind]["rows"] == rows
        difference = accuracy["second"] - accuracy["first"]
        assert accuracy["interval"][0] <= difference <= accuracy["interval"][1]
    work.store.set_alias("digits", "latest", "1")  # manual rollback
    assert run_candidate(work, "--promote") == 0
    assert "rolled back before" in capsys.readouterr().err
    assert work.store.aliases("digits")["latest"] == "1"


def test_candidate_fitted_on_wrong_labels_is_not_promoted(work):
    from training.candidate import count_tried_labels

    send_labels(work, (work.truth + 1) % 10, key="team")
    assert run_candidate(work, "--promote") == 0
    assert work.store.aliases("digits") == {"latest": "1", "candidate": "2"}
    (record,) = candidates(work.database, "digits")
    assert not record["promoted"]
    assert count_tried_labels(work.store, work.database, "digits", promote=True) == 140
    assert "digits is worse than latest (version 1) in" in record["reason"]
    assert "test_accuracy" in record["reason"]


def test_missing_state_is_accepted_and_invalid_options_are_named(work, capsys):
    assert main(["candidate", "digits", "--state", str(work.folder / "none")]) == 0
    assert not (work.folder / "none").exists()
    assert main(["candidate", "nobody", "--state", str(work.folder / "state")]) == 2
    assert run_candidate(work, "--min-labels", "0") == 2
    assert "--min-labels: expected 1 or more, got 0" in capsys.readouterr().err


def test_join_keeps_uint8_pixels_if_labelled_rows_are_integers():
    from training.data.rows import Rows
    from training.fit import join

    pixels = Rows(np.zeros((2, 3), dtype=np.uint8), np.zeros(2, dtype=np.int64), np.arange(2))
    extra = Rows(np.full((1, 3), 7, dtype=np.float32), np.ones(1, dtype=np.int64), np.array(["a"]))
    pair = join(pixels, extra)
    assert pair.x.dtype == np.uint8 and pair.x[2].tolist() == [7, 7, 7]
    assert pair.ids.tolist() == ["0", "1", "a"] and pair.y.tolist() == [0, 0, 1]
    fractions = Rows(np.full((1, 3), 0.5, dtype=np.float32), extra.y, extra.ids)
    assert join(pixels, fractions).x[2].tolist() == [0.5, 0.5, 0.5]


def test_joined_rows_without_weights_get_mean_weight():
    from training.data.rows import Rows
    from training.fit import join

    x, y = np.zeros((2, 3), dtype=np.float32), np.zeros(2, dtype=np.int64)
    rows = Rows(x, y, weights=np.array([100.0, 300.0]))
    assert join(rows, Rows(x, y)).weights.tolist() == [100.0, 300.0, 200.0, 200.0]
