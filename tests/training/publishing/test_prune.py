from types import SimpleNamespace

import httpx
import numpy as np
import onnx
import pytest
import torch
from torch import nn

from model_store.artifacts.store import FILES, ModelStore
from model_store.inference.graphs import GraphError
from model_store.inference.runtime import Runtime
from tests.support.environment import working_in
from tests.support.recipes import LONGER_FIT, recipe_with, write_recipe
from tests.support.refusals import assert_invalid
from tests.support.serving import serving
from training.__main__ import main
from training.bayes.posterior import noise
from training.data.rows import Rows
from training.export.graphs import CHECKED_DETECTORS, export, load_runtime, parity
from training.export.served import served_network
from training.model import build, initialise
from training.networks.local import localise
from training.publishing.derive import (
    is_weight,
    prune,
    prune_version,
    select_strongest,
    signal_to_noise,
)
from training.versions import open_parent

SHAPE, CLASSES, ROWS = (5, 6), 4, 12


class Pictures(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.inner = nn.Conv2d(4, 4, (3, 1), padding=(1, 0), bias=False)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        h = torch.relu(self.stem(x))
        return self.head(torch.relu(h + self.inner(h)).mean((2, 3)))


def create_model(method="bbb-gaussian", network=None):
    recipe = recipe_with(method=method, network=network or {"hidden": [9, 7]})
    generator = torch.Generator().manual_seed(0)
    model = build(recipe, SHAPE, CLASSES).eval()
    x = 3 + 2 * torch.randn(ROWS, 30, generator=generator)
    initialise(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model, x


@pytest.fixture(
    params=[{"hidden": [9, 7]}, {"factory": f"{__name__}:Pictures"}], ids=["mlp", "pictures"]
)
def network(request):
    return request.param


# Selection of weights


@pytest.mark.parametrize("method", ["bbb-gaussian", "bbb-mixture"])
@pytest.mark.parametrize("fraction", [0.0, 0.4, 0.8])
def test_pruning_removes_weights_with_lowest_ratio_and_keeps_biases(method, fraction, network):
    model, _ = create_model(method, network)
    weights, retained = is_weight(model), select_strongest(model, fraction)
    layers = [layer for layer in model.network.slots if layer.size]
    biases = sum(slot.shape[1] for slot in layers if "inner" not in slot.name)
    assert int((~weights).sum()) == biases
    assert retained[~weights].all()
    assert int((~retained).sum()) == round(fraction * int(weights.sum()))
    ratio = signal_to_noise(model)
    torch.testing.assert_close(ratio, (model.posterior.mu / model.posterior.sigma).abs().detach())
    if fraction > 0:
        assert ratio[~retained].max() <= ratio[retained & weights].min()


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.8])
@torch.no_grad()
def test_pruned_model_equals_dense_model_with_zeroed_weights(fraction, network):
    model, x = create_model(network=network)
    retained = select_strongest(model, fraction)
    smaller = prune(model, retained)
    eps = noise(smaller.posterior, 5, 1)
    dense_eps = noise(model.posterior, 5, 2)
    indices = smaller.network.kept.long()
    assert retained[indices].all()
    dense_eps[:, indices] = eps
    theta = torch.where(retained, model.posterior(dense_eps), 0.0)
    expected = model.network(x, theta[:, None])
    actual = smaller.network(x, smaller.posterior(eps)[:, None])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    if fraction == 0:
        assert len(indices) == model.posterior.theta_dimension


@pytest.mark.slow
@pytest.mark.usefixtures("fits")
def test_exported_pruned_network_matches_torch():
    model, x = create_model(network={"factory": f"{__name__}:Pictures"})
    smaller = prune(model, select_strongest(model, 0.6))
    localised = localise(smaller, x)
    result = served_network(localised, x, 0, names=CHECKED_DETECTORS)
    files = export(localised, result, joint=smaller)
    graph = onnx.load_model_from_string(files["network.onnx"])
    metadata = {entry.key: int(entry.value) for entry in graph.metadata_props}
    assert metadata["weights_per_draw"] > smaller.posterior.theta_dimension
    runtime = load_runtime(localised, files)
    rows = Rows(x.numpy(), np.zeros(ROWS, dtype=np.int64))
    assert max(parity(localised, result, runtime, rows, joint=smaller).values()) < 1e-4


def test_invalid_fractions_and_unsupported_methods_are_rejected():
    model, _ = create_model()
    for fraction in (-0.1, 1.0, float("nan")):
        assert_invalid(
            lambda fraction=fraction: select_strongest(model, fraction),
            "--fraction: expected at least 0 and less than 1",
        )
    with torch.no_grad():
        model.posterior.mu[-(7 + 1) * CLASSES :] = 0
    assert_invalid(lambda: select_strongest(model, 0.9), "weights in every layer", "none in 4")
    for method in ("mvn", "batch-ensemble"):
        unsupported, _ = create_model(method)
        manifest = SimpleNamespace(encoder=None, training={})
        parent = SimpleNamespace(
            manifest=manifest, model=lambda unsupported=unsupported: unsupported
        )
        assert_invalid(
            lambda parent=parent: prune_version(None, parent, None, 0.5, "name"),
            "method: expected bbb-gaussian or bbb-mixture",
        )


# Command


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fits):
    folder = tmp_path_factory.mktemp("pruned")
    changes = {**LONGER_FIT, "network": {"hidden": [64]}, "posterior": {"prior_std": 0.3}}
    recipe = write_recipe(folder, name="bayes", method="bbb-gaussian", **changes)
    with working_in(folder):
        assert main(["fit", str(recipe), "--quiet", "--device", "cpu"]) == 0
        assert main(["prune", "bayes", "--fraction", "0.75", "--as", "small"]) == 0
    return folder


def test_pruning_three_quarters_keeps_accuracy_and_is_in_manifest(folder):
    store = ModelStore(folder / "models")
    full, small = store.manifest("bayes", "1"), store.manifest("small", "1")
    assert small.quality["test_accuracy"] > full.quality["test_accuracy"] - 0.08
    facts = small.training["pruned"]
    assert (facts["name"], facts["version"], facts["fraction"]) == ("bayes", "1", 0.75)
    assert facts["weights"] == 64 * 64 + 64 * 10
    assert facts["kept_weights"] <= 0.25 * facts["weights"]
    assert small.noise.dimension == small.noise.theta_dimension <= 64 + 10
    assert facts["bytes"] == sum(
        small.files[f].size for f in FILES if f != "calibration.safetensors"
    )
    file = "weights.safetensors"
    assert small.files[file].size < 0.6 * full.files[file].size
    assert small.training["recipe"] == full.training["recipe"]
    assert small.training["data_digest"] == full.training["data_digest"]


def test_version_damaged_by_pruning_gets_warning(folder):
    with working_in(folder):
        assert main(["prune", "bayes", "--fraction", "0.97", "--as", "less"]) == 0
    store = ModelStore(folder / "models")
    small, large = (store.manifest(name, "1").warnings for name in ("small", "less"))
    assert not any("before pruning" in message for message in small)
    assert sum("before pruning" in message for message in large) == 1


def test_published_weights_equal_parent_weights(folder):
    from safetensors.numpy import load_file

    full, pruned = (
        load_file(folder / "models" / n / "1" / "weights.safetensors") for n in ("bayes", "small")
    )
    for name in ("mu", "rho"):
        np.testing.assert_array_equal(
            pruned[f"posterior.{name}"], full[f"posterior.{name}"][pruned["network.kept"]]
        )


def test_served_pruned_version_is_accurate_and_independent_of_batch(folder, digits_rows):
    from training.data.arrays import digits

    labels = digits().test.y[:100]
    with serving(folder / "models") as (url, _):
        request = {"model": "small", "inputs": digits_rows[:100].tolist(), "seed": 3}
        batch = httpx.post(f"{url}/predict", json=request, timeout=60).json()["predictions"]
        assert np.mean([p["label"] == str(y) for p, y in zip(batch, labels, strict=True)]) > 0.8
        for n in (0, 50, 99):
            single_row = {**request, "inputs": digits_rows[n : n + 1].tolist()}
            assert httpx.post(f"{url}/predict", json=single_row, timeout=60).json()[
                "predictions"
            ] == [batch[n]]


def test_pruned_version_can_be_recalibrated(folder):
    from training.data.arrays import digits

    np.savez(folder / "test.npz", x=digits().test.x.reshape(-1, 8, 8), y=digits().test.y)
    with working_in(folder):
        assert (
            main(["calibrate", "small:1", "--data", "npz:test.npz", "--as", "again", "--quiet"])
            == 0
        )
    store = ModelStore(folder / "models")
    small, again = store.manifest("small", "1"), store.manifest("again", "1")
    assert again.training["pruned"] == small.training["pruned"]
    assert again.training["recalibrated"]["name"] == "small"
    assert again.files["weights.safetensors"] == small.files["weights.safetensors"]


def test_network_with_invalid_weight_count_is_rejected(folder):
    artifact = ModelStore(folder / "models").open("small", "1")
    graph = onnx.load_model_from_string(artifact.files["network.onnx"])
    (weight_count,) = (entry for entry in graph.metadata_props if entry.key == "weights_per_draw")
    weight_count.value = "many"
    with pytest.raises(GraphError, match=r"network.onnx: expected a number as weights_per_draw"):
        Runtime(
            artifact.files["sampler.onnx"],
            graph.SerializeToString(),
            artifact.manifest.noise.dimension,
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent", "--fraction", "0.5"], "model: expected one of "),
        (["bayes:7", "--fraction", "0.5"], "version: expected one of 1, latest of model"),
        (["bayes:1", "--fraction", "1"], "--fraction: expected at least 0 and less than"),
        (["small", "--fraction", "0.9"], "model: expected a version that was not"),
        (["bayes:1", "--fraction", "0.5", "--data", "idx:absent"], "data.source: expected"),
        (["bayes:1", "--fraction", "0.5", "--data", "npz:others.npz"], "data.source: expected"),
    ],
)
def test_invalid_arguments_print_one_line_and_exit_with_2(folder, capsys, arguments, message):
    x, y = (
        np.random.default_rng(0).uniform(0, 16, (500, 8, 8)).astype(np.float32),
        np.arange(500) % 10,
    )
    np.savez(folder / "others.npz", x=x, y=y)
    with working_in(folder):
        assert main(["prune", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {message}")
    assert line.count("\n") == 1


def test_rebuilt_pruned_model_loads_published_weights(folder):
    from safetensors.torch import load

    store = ModelStore(folder / "models")
    dense = open_parent(store, "bayes:1", "model").model()
    tensors = load(store.open("small", "1").files["weights.safetensors"])
    retained = torch.zeros(dense.posterior.theta_dimension, dtype=torch.bool)
    retained[tensors["network.kept"].long()] = True
    smaller = prune(dense, retained)
    smaller.load_state_dict(tensors)
    torch.testing.assert_close(smaller.posterior.mu, tensors["posterior.mu"])
