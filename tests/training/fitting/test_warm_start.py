import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save

from model_store.artifacts.store import ModelStore
from tests.support.recipes import QUICK, get_recipe, recipe_with, write_recipe
from tests.support.refusals import assert_invalid
from training.__main__ import main
from training.bayes.posterior import noise
from training.data import load
from training.data.rows import Dataset, Rows, Splits
from training.fitting.run import Run
from training.fitting.warm_start import check_compatible, copy_weights
from training.methods import METHODS, DrawnMethod, RealNVP
from training.model import build, initialise
from training.versions import Parent, open_parent

SHAPE, CLASSES = (6,), 3
SMALL = {
    "bhn-realnvp": {"couplings": 2, "hidden": 8, "initial_log_std": -2.0},
    "bhn-iaf": {"couplings": 2, "hidden": 8, "initial_log_std": -2.0},
    "bhn-weights": {"couplings": 2, "hidden": 8, "initial_log_std": -2.0},
    "variational-hypernet": {"hidden": 6},
    "ensemble": {"members": 3},
}


def recipe(method, **posterior):
    schedule = {"epochs": 3, "batch_rows": 16}
    merged = {**SMALL.get(method, {}), **posterior}
    return recipe_with(
        method=method, network={"hidden": [9, 7]}, posterior=merged, training=schedule
    )


def build_perturbed(settings, classes=CLASSES):
    generator = torch.Generator().manual_seed(0)
    model = build(settings, SHAPE, classes).eval()
    x = 3 + 2 * torch.randn(30, *SHAPE, generator=generator)
    initialise(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, x


@pytest.mark.parametrize("method", METHODS)
def test_warm_start_copies_all_weights_except_temperature(method):
    old, _ = build_perturbed(recipe(method))
    new = build(recipe(method).model_copy(update={"seed": 1}), SHAPE, CLASSES)
    old.likelihood.temperature.fill_(3.0)
    copy_weights(new, old)
    state = old.state_dict()
    assert new.likelihood.temperature == 1.0
    state["likelihood.temperature"] = torch.tensor(1.0)
    assert new.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in new.state_dict().items())


# Runs


def get_data(rows, seed=0, classes=("a", "b", "c")):
    """Create data with one cluster per class, and its splits."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, len(classes), rows)
    x = (4 * np.eye(*(len(classes), *SHAPE))[y] + rng.normal(size=(rows, *SHAPE))).astype(
        np.float32
    )
    test = Rows(x[:40], y[:40])
    data = Dataset(
        Rows(x[40:], y[40:]), test, SHAPE, tuple(classes), float(x.min()), float(x.max())
    )
    return data, Splits(Rows(x[120:], y[120:]), Rows(x[40:80], y[40:80]), test, test, test)


def create_run(folder, settings, splits, classes, parent=None):
    folder.mkdir(exist_ok=True)
    return Run(settings, splits, SHAPE, classes, folder, torch.device("cpu"), parent)


@pytest.fixture(scope="module")
def parent(digits_store, tmp_path_factory, fits):
    settings = recipe("bbb-gaussian")
    settings = settings.model_copy(
        update={"training": settings.training.model_copy(update={"epochs": 30})}
    )
    data, splits = get_data(300)
    run = create_run(tmp_path_factory.mktemp("parent"), settings, splits, 3)
    model = run.fit(quiet=True)
    manifest = ModelStore(digits_store).manifest("digits", "1")
    manifest = manifest.model_copy(
        update={
            "input": data.input,
            "output": manifest.output.model_copy(update={"classes": data.classes}),
        }
    )
    return Parent(
        manifest, settings, save({name: t.contiguous() for name, t in model.state_dict().items()})
    )


def test_warm_start_begins_at_parent_and_beats_cold_start(parent, tmp_path):
    _, splits = get_data(600, seed=1)
    warm = create_run(tmp_path / "warm", recipe("bbb-gaussian"), splits, 3, parent)
    state = parent.model().state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in warm.model.state_dict().items())
    cold = create_run(tmp_path / "cold", recipe("bbb-gaussian"), splits, 3)
    before = get_accuracy(warm)
    warm.fit(quiet=True), cold.fit(quiet=True)
    first_warm, first_cold = (run.progress.history[0] for run in (warm, cold))
    assert first_warm["validation_log_likelihood"] > first_cold["validation_log_likelihood"]
    assert first_warm["loss"] < first_cold["loss"]
    assert get_accuracy(warm) > before - 0.05


def get_accuracy(run):
    """Compute the accuracy on validation rows."""
    log_probs = run.model.predict(run.validation[0], noise(run.model.posterior, 20, 9))
    probs = log_probs.exp().mean(0)
    return (probs.argmax(1) == run.validation[1]).float().mean().item()


# Data


def test_columns_are_encoded_as_in_the_parent(tmp_path):
    def write_table(name, text):
        (tmp_path / name).write_text(text)

    write_table("old.csv", "size,kind,y\n" + "1,red,a\n3,blue,b\n" * 20)
    write_table("more.csv", "kind,size,y\n" + "7,9,a\nblue,,b\n" * 20)
    old = load(get_recipe("csv:old.csv", target="y"), tmp_path)
    extra = load(get_recipe("csv:more.csv", target="y"), tmp_path, old.columns)
    assert extra.columns == old.columns
    size, kind = old.columns
    assert kind.categories == ("blue", "red")
    # One row has an unknown category, the other a missing number.
    rows = {tuple(row) for row in extra.train.x.tolist()}
    unseen, usual = (float(np.float32((v - size.mean) / size.std)) for v in (9, size.usual))
    assert rows == {(unseen, 0, 0, 1), (usual, 1, 0, 0)}
    write_table("other.csv", "kind,size,more,y\n" + "red,9,1,a\nblue,2,2,b\n" * 20)
    assert_invalid(
        lambda: load(get_recipe("csv:other.csv", target="y"), tmp_path, old.columns),
        "a difference in ['more']",
    )
    write_table("fewer.csv", "kind,y\n" + "red,a\nblue,b\n" * 20)
    assert_invalid(
        lambda: load(get_recipe("csv:fewer.csv", target="y"), tmp_path, old.columns), "'size'"
    )
    assert_invalid(
        lambda: load(get_recipe("digits"), tmp_path, old.columns),
        "a table with the columns ['size', 'kind']",
    )


def test_incompatible_recipe_or_data_is_rejected_with_the_difference(parent):
    data, _ = get_data(300)

    def check(settings, dataset=data):
        return lambda: check_compatible(settings, dataset, parent)

    check(recipe("bbb-gaussian"))()
    check(recipe("bbb-gaussian", prior_std=3.0, initial_log_std=-3.0))()
    assert_invalid(
        check(recipe("bbb-mixture")),
        "method: expected bbb-gaussian, as in digits version 1, got bbb-mixture",
    )
    base = recipe("bbb-gaussian")
    network = base.network.model_copy(update={"hidden": [9, 8]})
    assert_invalid(
        check(base.model_copy(update={"network": network})),
        "network: expected {'hidden': [9, 7]}",
        "[9, 8]",
    )
    assert_invalid(
        check(base, dataclasses.replace(data, shape=(2, 3))),
        "rows of shape: expected (6,), as in",
        "got (2, 3)",
    )


def test_omitted_posterior_keys_come_from_the_parent(parent):
    old = recipe("bhn-realnvp", hidden=200)
    new = recipe_with(method="bhn-realnvp")
    new = new.model_copy(update={"posterior": RealNVP(couplings=3)})
    completed = dataclasses.replace(parent, recipe=old).complete(new).posterior
    assert (completed.hidden, completed.couplings) == (200, 3)
    assert parent.complete(new) == new  # another method


# Other methods with an mle parent


@pytest.fixture(scope="module")
def mle_parent(parent):
    settings = recipe("mle")
    model, _ = build_perturbed(settings)
    weights = save({name: tensor.contiguous() for name, tensor in model.state_dict().items()})
    return dataclasses.replace(parent, recipe=settings, weights=weights)


@pytest.mark.parametrize(
    "method",
    [m for m in METHODS if issubclass(METHODS[m], DrawnMethod) and m != "gp-layer"],
)
def test_other_methods_start_with_the_outputs_of_an_mle_parent(mle_parent, tmp_path, method):
    _, splits = get_data(300)
    settings = recipe(method)
    if method == "laplace":
        settings = settings.model_copy(
            update={"training": settings.training.model_copy(update={"epochs": None})}
        )
    run = create_run(tmp_path / "run", settings, splits, 3, mle_parent)
    assert (run.steps == 0) == (method == "laplace")
    x, old = run.train[0], mle_parent.model().eval()
    centre = run.model.posterior.centre()[None, None]
    outputs = run.model.eval().network(x, centre)
    expected = old.network(x, torch.zeros(1, 1, 1))
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


def test_mle_parent_supports_mvn_but_not_ensemble(mle_parent):
    data, _ = get_data(300)
    check_compatible(recipe("mvn"), data, mle_parent)
    network = recipe("mvn").network.model_copy(update={"bayesian": ["2"], "trained": []})
    check_compatible(recipe("mvn").model_copy(update={"network": network}), data, mle_parent)
    assert_invalid(
        lambda: check_compatible(recipe("ensemble"), data, mle_parent),
        "method: expected mle, as in",
    )


# The command


@pytest.mark.usefixtures("fits")
def test_published_network_gets_a_posterior_without_training(tmp_path, monkeypatch, capsys):
    for name in ("STORE", "RUNS", "DATA"):
        monkeypatch.setenv(f"DUBITO_{name}", str(tmp_path / name.lower()))
    assert main(["fit", str(write_recipe(tmp_path, method="mle", name="net")), "--quiet"]) == 0
    laplace = write_recipe(tmp_path, method="laplace", name="posterior", training={"epochs": 0})
    assert main(["fit", str(laplace), "--quiet"]) == 2
    assert "training.epochs: expected 1 or more, or a trained network" in capsys.readouterr().err
    assert main(["fit", str(laplace), "--quiet", "--warm-start", "net"]) == 0
    message = capsys.readouterr().err
    assert "stopped before the first epoch: the network was already trained" in message
    assert "laplace, 130 weights: " in message
    store = ModelStore(tmp_path / "store")
    net, posterior = (store.manifest(name, "1") for name in ("net", "posterior"))
    assert posterior.training["warm_start"] == {"name": "net", "version": "1"}
    assert posterior.training["laplace"]["weights"] == 130
    assert posterior.noise.dimension == 10  # one number per output
    assert posterior.noise.default_draws == 5
    assert posterior.quality["test_accuracy"] == pytest.approx(
        net.quality["test_accuracy"], abs=0.05
    )


def test_command_continues_from_a_published_version(digits_store, tmp_path, monkeypatch, capsys):
    models = shutil.copytree(digits_store, tmp_path / "models")
    for name, folder in (("STORE", "models"), ("RUNS", "runs"), ("DATA", "data")):
        monkeypatch.setenv(f"DUBITO_{name}", str(tmp_path / folder))
    # The data is the parent's, so small steps suffice.
    schedule = {"epochs": 2, "batch_rows": 64, "learning_rate": 1e-4, "final_learning_rate": 1e-5}
    changes = {**QUICK, "training": schedule, "serving": {"draws": 20}}
    recipe_path = write_recipe(tmp_path, **changes)
    command = ["fit", str(recipe_path), "--quiet", "--device", "cpu", "--warm-start"]
    assert main([*command, "digits"]) == 0
    assert "warm start from digits version 1" in capsys.readouterr().err
    store = ModelStore(models)
    first, second = (store.manifest("digits", version) for version in "12")
    assert second.training["warm_start"] == {"name": "digits", "version": "1"}
    assert second.quality["test_accuracy"] > first.quality["test_accuracy"] - 0.03
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    history = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert history[0]["validation_accuracy"] > 0.9
    # Rejected fits add no version to the store.
    errors = {
        "absent": "error: model: expected one of digits, got 'absent'",
        "digits:9": "error: version: expected one of 1, 2, latest of model digits, got '9'",
    }
    for name, message in errors.items():
        assert main([*command, name]) == 2
        assert capsys.readouterr().err.startswith(message)
    write_recipe(tmp_path, **{**changes, "posterior": {**QUICK["posterior"], "couplings": 4}})
    assert main([*command, "digits:1"]) == 2
    error = capsys.readouterr().err
    assert error == "error: posterior.couplings: expected 2, as in digits version 1, got 4\n"
    assert store.versions("digits") == ["1", "2"]
    assert open_parent(store, "digits:1", "--warm-start").label == "digits version 1"
