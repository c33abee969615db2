"""`training.fit` as a notebook calls it."""

import inspect

import numpy as np
import pytest

from model_store.artifacts.store import ModelStore
from tests.support.environment import working_in
from tests.support.recipes import recipe_with, write_recipe
from training.data import Rows, digits
from training.fit import best_of, fit, publish
from training.fitting.run import CHECKPOINT
from training.versions import find_fitted, load_for, open_parent

pytestmark = pytest.mark.usefixtures("fits")


def example() -> str:
    """The code of the docstring of `fit`."""
    text = inspect.getdoc(fit).split("\nArgs:")[0]
    return "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))


def test_the_docstrings_example_fits_and_publishes(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    write_recipe(tmp_path / "recipes", name="digits")
    monkeypatch.chdir(tmp_path)
    names = {}
    with working_in(tmp_path):
        exec(example(), names)
    fitted, store = names["fitted"], ModelStore(tmp_path / "models")
    assert fitted.outputs(digits().test.x[:2]).shape == (5, 2, 10)
    assert np.isfinite(fitted.log_likelihood(fitted.data.test)).all()
    manifest = store.manifest("digits", "1")
    assert manifest.training["run"] == fitted.provenance.run
    assert not (fitted.folder / CHECKPOINT).exists()


def test_a_run_is_published_once_and_a_fit_with_further_rows_is_another(tmp_path):
    recipe, store = recipe_with(), ModelStore(tmp_path / "models")
    data, runs = digits(), tmp_path / "runs"
    fitted = fit(recipe, data, device="cpu", runs=runs, quiet=True)
    first = publish(fitted, store)
    assert publish(fitted, store).digest == first.digest
    assert store.versions("small") == ["1"]
    there = find_fitted(store, recipe, data, None)
    assert there is not None
    assert there.digest == first.digest
    start = open_parent(store, "small", "start")
    extra = Rows(data.test.x[:3], data.test.y[:3])
    on = fit(
        start.recipe,
        load_for(start.recipe, tmp_path, start),
        start=start,
        extra=extra,
        device="cpu",
        runs=runs,
        quiet=True,
    )
    assert on.folder != fitted.folder
    assert on.provenance.rows["train"] == fitted.provenance.rows["train"] + 3
    second = publish(on, store, name="other", alias="candidate")
    assert second.training["warm_start"] == {"name": "small", "version": "1"}
    assert store.aliases("other")["candidate"] == "1"


def test_a_later_transform_must_be_better_beyond_chance():
    first = np.random.default_rng(0).normal(size=100)
    assert best_of({"none": first, "log": first + 1e-3 * np.sign(first)}) == "none"
    assert best_of({"none": first, "log": first + 0.1}) == "log"
