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


def get_example() -> str:
    """Extract the example from the docstring of `fit`."""
    text = inspect.getdoc(fit).split("\nArgs:")[0]
    return "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))


def test_docstring_example_fits_and_publishes(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    write_recipe(tmp_path / "recipes", name="digits")
    monkeypatch.chdir(tmp_path)
    names = {}
    with working_in(tmp_path):
        exec(get_example(), names)
    model, store = names["fitted"], ModelStore(tmp_path / "models")
    assert model.outputs(digits().test.x[:2]).shape == (5, 2, 10)
    assert np.isfinite(model.log_likelihood(model.data.test)).all()
    assert store.versions("digits") == ["1"]
    assert not (model.folder / CHECKPOINT).exists()


def test_warm_start_with_extra_rows_creates_another_fit(tmp_path):
    recipe, store = recipe_with(), ModelStore(tmp_path / "models")
    data, runs = digits(), tmp_path / "runs"
    model = fit(recipe, data, device="cpu", runs=runs, quiet=True)
    publish(model, store)
    start = open_parent(store, "small", "start")
    extra = Rows(data.test.x[:3], data.test.y[:3])
    extended = fit(
        start.recipe,
        load_for(start.recipe, tmp_path, start),
        start=start,
        extra=extra,
        device="cpu",
        runs=runs,
        quiet=True,
    )
    assert extended.folder != model.folder
    assert extended.provenance.rows["train"] == model.provenance.rows["train"] + 3
    second = publish(extended, store, name="other", alias="candidate")
    assert second.training["warm_start"] == {"name": "small", "version": "1"}
    assert store.aliases("other")["candidate"] == "1"


def test_fit_preserves_torch_state_and_is_reproducible(tmp_path):
    recipe, data = recipe_with(method="bbb-gaussian", posterior={}), digits()
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first = fit(recipe, data, device="cpu", runs=tmp_path, quiet=True)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    repeated = fit(recipe, data, device="cpu", runs=tmp_path, quiet=True)
    losses = [model.provenance.convergence["negative_elbo"] for model in (first, repeated)]
    assert losses[0] == losses[1]


def test_transform_with_larger_error_than_constant_is_not_chosen(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 1)).astype(np.float32)
    # Half of the targets are near 0, so their logarithms have a wide spread and a distant mean.
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


def test_later_transform_must_be_significantly_better():
    first = np.random.default_rng(0).normal(size=100)
    assert best_transform({"none": first, "log": first + 1e-3 * np.sign(first)}) == "none"
    assert best_transform({"none": first, "log": first + 0.1}) == "log"


def test_refit_uses_best_epoch_count_and_includes_validation_rows(tmp_path):
    stopping = {"epochs": None, "early_stopping": True, "patience": 2, "max_epochs": 8}
    options = {"method": "batch-ensemble", "posterior": {"members": 2}}
    recipe = recipe_with(**options, training={**stopping, "early_stopping": "refit"})
    data = digits()
    history = []
    refit = fit(recipe, data, device="cpu", runs=tmp_path, quiet=True, callback=history.append)
    plain_recipe = recipe_with(**options, training=stopping)
    first = fit(plain_recipe, data, device="cpu", runs=tmp_path, quiet=True)
    best = first.provenance.best_epoch
    assert refit.provenance.best_epoch == best
    assert [metrics["epoch"] for metrics in history] == [*range(1, len(history) + 1)]
    assert ["refit" in metrics for metrics in history][-best - 1 :] == [False] + [True] * best
    assert refit.provenance.stopped == (
        f"{first.provenance.stopped}; fitted again for {best} epochs, including these rows"
    )
    assert refit.provenance.temperature == first.provenance.temperature
    training = {"epochs": best, "choose": "last", "final_learning_rate": 1e-3}
    refit_recipe = recipe_with(
        **options, training=training, data={"validation": 1}, serving={"temperature": False}
    )
    rows = first.splits
    updated = replace(data, train=join(rows.train, rows.validation))
    parts = Splits(updated.train, *(getattr(rows, name) for name in list(vars(rows))[1:]))
    folder = tmp_path / "again"
    folder.mkdir()
    run = Run(refit_recipe, parts, data.shape, len(data.classes), folder, torch.device("cpu"))
    expected = run.fit(quiet=True).state_dict()
    for name, tensor in refit.model.state_dict().items():
        if name != "likelihood.temperature":
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    assert not torch.equal(
        refit.model.network.module[0].weight, first.model.network.module[0].weight
    )


@pytest.mark.parametrize(
    ("method", "training", "message"),
    [
        ("mle", {"early_stopping": True, "epochs": 3}, "no value with epochs"),
        ("mle", {"early_stopping": "refit", "epochs": None, "choose": "last"}, "with choose"),
        ("bbb-gaussian", {"early_stopping": True, "epochs": None}, "false for method bbb-gaussian"),
    ],
)
def test_early_stopping_is_rejected_with_conflicting_options(method, training, message):
    with pytest.raises(
        InvalidInput, match=rf"^test: training\.early_stopping: expected .*{message}"
    ):
        validate(content_with(method=method, training=training), "test")
