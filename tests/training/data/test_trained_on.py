import numpy as np
import pytest

from tests.support.recipes import get_recipe
from tests.support.refusals import assert_invalid
from training.data import load
from training.data.rows import row_digest, split, split_sizes
from training.publishing.derive import split_rows

ROWS, OVERLAP = 200, 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 99, (ROWS, 3)), np.arange(ROWS) % 2
    colours = rng.choice(["red", "green"], ROWS)
    np.savez(folder / "all.npz", x=x.astype(np.uint8), y=y)
    np.savez(folder / "seen.npz", x=x[:OVERLAP].astype(np.float64), y=y[:OVERLAP])
    np.savez(folder / "wide.npz", x=np.zeros((9, 4)), y=y[:9])
    lines = [
        f"{a},{b},{c},{colour},{k}" for (a, b, c), colour, k in zip(x, colours, y, strict=True)
    ]
    for name, count in (("all", ROWS), ("seen", OVERLAP)):
        (folder / f"{name}.csv").write_text("\n".join(["a,b,c,colour,y", *lines[:count]]))
    return folder


def recipe(kind, trained_on="seen", **options):
    target = {} if kind == "npz" else {"target": "y"}
    shares = {"validation": 0.15, "reference": 0.15, "ranking": 0.15}
    source = None if trained_on is None else f"{kind}:{trained_on}.{kind}"
    return get_recipe(f"{kind}:all.{kind}", **target, **shares, trained_on=source, **options)


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_trained_rows_are_used_only_for_training_and_counted(folder, caplog, kind):
    settings, full_recipe = recipe(kind), recipe(kind, None)
    with caplog.at_level("INFO", "dubito.training"):
        data = load(settings, folder)
    full_splits, splits = (
        split(dataset, split_sizes(settings)) for dataset in (load(full_recipe, folder), data)
    )
    assert (
        f"{OVERLAP} of {ROWS} rows are also in {kind}:seen.{kind} and are used only for training"
        in caplog.messages
    )
    assert np.array_equal(splits.train.x, full_splits.train.x)  # same encoding of columns
    trained_settings = recipe(kind, None)
    section = trained_settings.data.model_copy(update={"source": settings.data.trained_on})
    trained_data = load(trained_settings.model_copy(update={"data": section}), folder, data.columns)
    digests = {row_digest(row) for row in trained_data.rows.x}
    for name in ("validation", "reference", "ranking", "test"):
        new_rows = [row for row in getattr(full_splits, name).x if row_digest(row) not in digests]
        assert 0 < len(new_rows) < len(getattr(full_splits, name))
        assert np.array_equal(getattr(splits, name).x, new_rows)
    # Calibration of an existing version leaves these rows out, too.
    assert len(data.rows) == ROWS - OVERLAP
    assert not digests & {row_digest(row) for row in data.rows.x}
    assert len(split_rows(data, 20, 20, 0).test) == ROWS - OVERLAP - 40


@pytest.mark.parametrize(
    ("trained_on", "message"),
    [
        ("absent", "data.trained_on: expected"),
        ("wide", "data.trained_on: expected rows of shape (3,) as in data.source, got (4,)"),
        ("all", "data.trained_on: expected test rows that the network was not trained on"),
    ],
)
def test_invalid_trained_on_file_is_rejected(folder, trained_on, message):
    assert_invalid(lambda: load(recipe("npz", trained_on), folder), message)


def test_dataset_digest_depends_on_trained_on(folder):
    assert load(recipe("npz"), folder).digest() != load(recipe("npz", None), folder).digest()
