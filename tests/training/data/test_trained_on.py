import numpy as np
import pytest

from tests.support.recipes import get_recipe
from tests.support.refusals import refused
from training.data import load
from training.data.rows import row_digest, split, split_sizes
from training.publishing.derive import split_rows

ROWS, SEEN = 200, 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 99, (ROWS, 3)), np.arange(ROWS) % 2
    colours = rng.choice(["red", "green"], ROWS)
    np.savez(folder / "all.npz", x=x.astype(np.uint8), y=y)
    np.savez(folder / "seen.npz", x=x[:SEEN].astype(np.float64), y=y[:SEEN])
    np.savez(folder / "wide.npz", x=np.zeros((9, 4)), y=y[:9])
    lines = [
        f"{a},{b},{c},{colour},{k}" for (a, b, c), colour, k in zip(x, colours, y, strict=True)
    ]
    for name, count in (("all", ROWS), ("seen", SEEN)):
        (folder / f"{name}.csv").write_text("\n".join(["a,b,c,colour,y", *lines[:count]]))
    return folder


def recipe(kind, trained_on="seen", **more):
    target = {} if kind == "npz" else {"target": "y"}
    shares = {"validation": 0.15, "reference": 0.15, "ranking": 0.15}
    observed = None if trained_on is None else f"{kind}:{trained_on}.{kind}"
    return get_recipe(f"{kind}:all.{kind}", **target, **shares, trained_on=observed, **more)


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_they_are_left_out_of_all_that_judges_and_counted(folder, caplog, kind):
    expected, full = recipe(kind), recipe(kind, None)
    with caplog.at_level("INFO", "dubito.training"):
        data = load(expected, folder)
    before, splits = (split(parent, split_sizes(expected)) for parent in (load(full, folder), data))
    assert (
        f"{SEEN} of {ROWS} rows are also in {kind}:seen.{kind} and are used only for training"
        in caplog.messages
    )
    assert np.array_equal(splits.train.x, before.train.x)  # columns are encoded as ever
    of_seen = recipe(kind, None)
    section = of_seen.data.model_copy(update={"source": expected.data.trained_on})
    reference = load(of_seen.model_copy(update={"data": section}), folder, data.columns)
    observed = {row_digest(row) for row in reference.rows.x}
    for name in ("validation", "reference", "ranking", "test"):
        retained = [row for row in getattr(before, name).x if row_digest(row) not in observed]
        assert 0 < len(retained) < len(getattr(before, name))
        assert np.array_equal(getattr(splits, name).x, retained)
    # those of a file that a version is calibrated on are the same
    assert len(data.rows) == ROWS - SEEN
    assert not observed & {row_digest(row) for row in data.rows.x}
    assert len(split_rows(data, 20, 20, 0).test) == ROWS - SEEN - 40


@pytest.mark.parametrize(
    ("trained_on", "says"),
    [
        ("absent", "data.trained_on: expected"),
        ("wide", "data.trained_on: expected rows of shape (3,) as in data.source, got (4,)"),
        ("all", "data.trained_on: expected test rows that the network was not trained on"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_its_key(folder, trained_on, says):
    refused(lambda: load(recipe("npz", trained_on), folder), says)


def test_a_fit_s_run_depends_on_which_rows_they_are(folder):
    assert load(recipe("npz"), folder).digest() != load(recipe("npz", None), folder).digest()
