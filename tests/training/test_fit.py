import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch

from model_store.artifacts.store import ModelStore
from model_store.errors import InvalidInput
from tests.support.environment import working_in
from tests.support.recipes import content_with, recipe_with, write_recipe
from training.data.arrays import digits
from training.data.rows import Dataset, Rows, Splits
from training.fit import best_transform, fit, join, publish
from training.fitting.run import CHECKPOINT, Run
from training.recipe import validate
from training.versions import load_for, open_parent

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
    model, store = names["fitted"], ModelStore(tmp_path / "models")
    assert model.outputs(digits().test.x[:2]).shape == (5, 2, 10)
    assert np.isfinite(model.log_likelihood(model.data.test)).all()
    assert store.versions("digits") == ["1"]
    assert not (model.folder / CHECKPOINT).exists()


def test_a_fit_with_further_rows_is_another(tmp_path):
    recipe, store = recipe_with(), ModelStore(tmp_path / "models")
    data, runs = digits(), tmp_path / "runs"
    model = fit(recipe, data, device="cpu", runs=runs, quiet=True)
    publish(model, store)
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
    assert on.folder != model.folder
    assert on.provenance.rows["train"] == model.provenance.rows["train"] + 3
    second = publish(on, store, name="other", alias="candidate")
    assert second.training["warm_start"] == {"name": "small", "version": "1"}
    assert store.aliases("other")["candidate"] == "1"


def test_a_fit_leaves_torch_as_it_was_and_says_the_same_again(tmp_path):
    recipe, data = recipe_with(method="bbb-gaussian", posterior={}), digits()
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first = fit(recipe, data, device="cpu", runs=tmp_path, quiet=True)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again = fit(recipe, data, device="cpu", runs=tmp_path, quiet=True)
    of_both = [model.provenance.convergence["negative_elbo"] for model in (first, again)]
    assert of_both[0] == of_both[1]


def test_a_transform_whose_means_are_further_off_than_a_constant_is_out(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 1)).astype(np.float32)
    # of half of the rows next to nothing: a logarithm's spread is wide, and its mean far beyond
    y = np.where(rng.random(400) < 0.5, 1e-5, 100 * np.exp(0.1 * rng.normal(size=400)))
    rows = Rows(x, y.astype(np.float32))
    data = Dataset(rows, rows.take(np.arange(50)), (1,), (), float(x.min()), float(x.max()))
    recipe = recipe_with(
        method="mle",
        task="regression",
        likelihood={"noise": "heteroscedastic"},
        data={"target_transform": "auto"},
        training={"epochs": 10, "learning_rate": 1e-2},
    )
    model = fit(recipe, data, device="cpu", runs=tmp_path, quiet=True)
    choice = model.provenance.target_transform
    assert choice.log_likelihood["log"] > choice.log_likelihood["none"]
    assert choice.rmse["log"] > 1.5 * y.std() > choice.rmse["none"]
    assert choice.chosen != "log"


def test_a_later_transform_must_be_better_beyond_chance():
    first = np.random.default_rng(0).normal(size=100)
    assert best_transform({"none": first, "log": first + 1e-3 * np.sign(first)}) == "none"
    assert best_transform({"none": first, "log": first + 0.1}) == "log"


def test_a_refit_is_a_fit_of_as_many_epochs_to_training_and_validation_rows(tmp_path):
    stopped = {"epochs": None, "early_stopping": True, "patience": 2, "max_epochs": 8}
    requested = {"method": "batch-ensemble", "posterior": {"members": 2}}
    recipe = recipe_with(**requested, training={**stopped, "early_stopping": "refit"})
    data = digits()
    observed = []
    trained_model = fit(
        recipe, data, device="cpu", runs=tmp_path, quiet=True, callback=observed.append
    )
    alone = recipe_with(**requested, training=stopped)
    first = fit(alone, data, device="cpu", runs=tmp_path, quiet=True)
    best = first.provenance.best_epoch
    assert trained_model.provenance.best_epoch == best
    assert [metrics["epoch"] for metrics in observed] == [*range(1, len(observed) + 1)]
    assert ["refit" in metrics for metrics in observed][-best - 1 :] == [False] + [True] * best
    assert trained_model.provenance.stopped == (
        f"{first.provenance.stopped}; fitted again for {best} epochs, including these rows"
    )
    assert trained_model.provenance.temperature == first.provenance.temperature
    output = {"epochs": best, "choose": "last", "final_learning_rate": 1e-3}
    again = recipe_with(
        **requested, training=output, data={"validation": 1}, serving={"temperature": False}
    )
    rows = first.splits
    updated = replace(data, train=join(rows.train, rows.validation))
    parts = Splits(updated.train, *(getattr(rows, name) for name in list(vars(rows))[1:]))
    folder = tmp_path / "again"
    folder.mkdir()
    run = Run(again, parts, data.shape, len(data.classes), folder, torch.device("cpu"))
    expected = run.fit(quiet=True).state_dict()
    for name, tensor in trained_model.model.state_dict().items():
        if name != "likelihood.temperature":
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    assert not torch.equal(
        trained_model.model.network.module[0].weight, first.model.network.module[0].weight
    )


@pytest.mark.parametrize(
    ("method", "training", "said"),
    [
        ("mle", {"early_stopping": True, "epochs": 3}, "no value with epochs"),
        ("mle", {"early_stopping": "refit", "epochs": None, "choose": "last"}, "with choose"),
        ("bbb-gaussian", {"early_stopping": True, "epochs": None}, "false for method bbb-gaussian"),
    ],
)
def test_early_stopping_is_refused_where_it_says_nothing(method, training, said):
    with pytest.raises(InvalidInput, match=rf"^test: training\.early_stopping: expected .*{said}"):
        validate(content_with(method=method, training=training), "test")
