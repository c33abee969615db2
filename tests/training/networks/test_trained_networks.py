from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput
from tests.support.recipes import content_with, recipe_with
from training.bayes.layers import ScaledLayer, Stochastic
from training.bayes.posterior import noise
from training.data.rows import Dataset, Rows
from training.fit import check_pixels
from training.methods import METHODS
from training.model import build, initialise
from training.networks.networks import DrawnNetwork, MemberNetwork
from training.networks.selection import freeze, select_layers
from training.recipe import Recipe

SHAPE, CLASSES = (2, 6, 6), 3
FACTORY = {"factory": f"{__name__}:convnet"}
DENSE = {"factory": f"{__name__}:dense"}


def convnet(shape, classes):
    generator = torch.Generator().manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(shape[0], 6, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1, groups=6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 1, bias=False),
        nn.Flatten(2),
        nn.Conv1d(4, 2, 3, groups=2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(2 * (shape[1] * shape[2] - 2), classes),
    )
    return _fill(module, generator)


def dense(shape, classes):
    generator = torch.Generator().manual_seed(2)
    inputs = int(torch.Size(shape).numel())
    return _fill(
        nn.Sequential(nn.Flatten(), nn.Linear(inputs, 7), nn.ReLU(), nn.Linear(7, classes)),
        generator,
    )


def _fill(module, generator):
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(0.1 + torch.rand(tensor.shape, generator=generator))
    return module.eval()


def rows():
    return 3.0 + 2.0 * torch.randn(20, 72, generator=torch.Generator().manual_seed(0))


RANDOM_START = {"batch-ensemble", "anchored-ensemble", "gp-layer"}


@pytest.mark.parametrize("method", sorted(RANDOM_START))
def test_methods_with_random_start_reject_trained_weights(method):
    recipe = recipe_with(method=method, network={**DENSE, "start": "trained"})
    with pytest.raises(InvalidInput, match="which starts at random"):
        build(recipe, SHAPE, CLASSES, rows())


@pytest.mark.parametrize("method", sorted({*METHODS} - RANDOM_START))
def test_posterior_centre_matches_trained_network(method):
    network = DENSE if method == "variational-hypernet" else FACTORY
    recipe = recipe_with(method=method, network={**network, "start": "trained"})
    model = build(recipe, SHAPE, CLASSES, rows())
    initialise(model, rows(), recipe.is_standardised)
    model.eval()
    outputs = model.network(rows(), model.posterior.centre()[None, None])
    expected = (dense if network is DENSE else convnet)(SHAPE, CLASSES)(rows().unflatten(1, SHAPE))
    torch.testing.assert_close(outputs[0], expected, rtol=1e-5, atol=1e-5)


def test_network_starts_at_weights_from_a_file(tmp_path):
    module = nn.Sequential(nn.Linear(72, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    recipe = recipe_with(
        method="bbb-gaussian", network={"hidden": [5], "weights": str(tmp_path / "w.safetensors")}
    )
    model = build(recipe, SHAPE, CLASSES, rows())
    initialise(model, rows(), recipe.is_standardised)
    outputs = model.eval().network(rows(), model.posterior.centre()[None, None])
    torch.testing.assert_close(outputs[0], module(rows()))
    (tmp_path / "w.safetensors").unlink()
    build(recipe, SHAPE, CLASSES)  # the weights of a version get loaded later


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("2.bias"), 'Missing key(s) in state_dict: "2.bias"'),
        (
            lambda tensors: tensors.update(more=torch.zeros(1)),
            'Unexpected key(s) in state_dict: "more"',
        ),
        (
            lambda tensors: tensors.update({"0.bias": torch.zeros(4)}),
            "size mismatch for 0.bias",
        ),
    ],
)
def test_mismatched_weights_are_rejected_by_name(tmp_path, change, message):
    tensors = nn.Sequential(nn.Linear(72, 5), nn.ReLU(), nn.Linear(5, CLASSES)).state_dict()
    change(tensors)
    path = tmp_path / "w.safetensors"
    save_file(tensors, path)
    with pytest.raises(InvalidInput, match=r"^network\.weights: expected ") as error:
        build(recipe_with(network={"hidden": [5], "weights": str(path)}), SHAPE, CLASSES, rows())
    assert message in str(error.value)


@pytest.mark.parametrize("content", [None, b"no tensors"])
def test_missing_or_invalid_weights_file_is_rejected(tmp_path, content):
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"^network\.weights: expected a safetensors file at "):
        build(recipe_with(network={"hidden": [5], "weights": str(path)}), SHAPE, CLASSES, rows())


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 3))

    def forward(self, x):
        h = self.body(x)[:, None]
        return self.head(self.mix(h, h, h)[0][:, 0])


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (None, ["body.0", "head.0", "head.2"]),
        (["head"], ["head.0", "head.2"]),
        (["head.2", "body.*"], ["body.0", "head.2"]),
        (["*.0"], ["body.0", "head.0"]),
        (["hea?.?"], ["head.0", "head.2"]),
    ],
)
def test_patterns_select_drawn_layers(patterns, names):
    assert list(select_layers(Parts(), patterns)) == names
    for samples in ("scales", "weights"):
        network = DrawnNetwork(Parts(), Stochastic(samples, patterns), (8,))
        assert [slot.name for slot in network.slots] == names


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["tail"], "network.bayesian.0: expected the name of a layer (body.0, head.0, head.2 can"),
        (["head", "body.1"], "network.bayesian.1: expected a layer that can be drawn"),
        (["mix"], "got 'mix', which matches MultiheadAttention"),
        (["body.[12]"], "got 'body.[12]', which matches BatchNorm1d, ReLU"),
    ],
)
def test_patterns_without_drawable_layers_are_rejected(patterns, message):
    with pytest.raises(InvalidInput) as error:
        select_layers(Parts(), patterns)
    assert message in str(error.value)


def test_only_selected_dropout_layers_are_masked():
    network = DrawnNetwork(Parts(), Stochastic("masks", ["head"]), (8,))
    assert [(slot.name, slot.keep) for slot in network.slots if slot.size] == [("head.1", 0.8)]


def test_layers_before_first_drawn_layer_run_once_for_all_draws():
    network = DrawnNetwork(Parts(), Stochastic("scales", ["head"]), (8,)).eval()
    sizes = []
    network.module.body.register_forward_hook(lambda _, __, outputs: sizes.append(len(outputs)))
    network(torch.randn(5, 8), torch.ones(4, 1, network.theta_dimension))
    assert sizes == [5]


@pytest.mark.parametrize(
    ("patterns", "frozen_layers"),
    [
        (None, set()),
        ([], {"body.0", "body.1", "mix", "mix.out_proj"}),
        (["mix"], {"body.0", "body.1"}),
        (["body.?"], {"mix", "mix.out_proj"}),
    ],
)
def test_drawn_and_selected_layers_stay_trainable(patterns, frozen_layers):
    module = Parts()
    freeze(module, patterns, ["head.0", "head.2"])
    actual = {
        name.rpartition(".")[0] for name, p in module.named_parameters() if not p.requires_grad
    }
    assert actual == frozen_layers


@pytest.mark.parametrize("patterns", [["bodies"], [""]])
def test_trained_pattern_without_a_match_is_rejected(patterns):
    with pytest.raises(
        InvalidInput, match=r"^network\.trained\.0: expected the name of a layer \(such as body, "
    ):
        freeze(Parts(), patterns, [])


@pytest.mark.parametrize("method", ["bhn-realnvp", "bbb-gaussian", "dropout", "mle"])
def test_frozen_layers_and_their_statistics_do_not_change(method):
    content = content_with(method=method, network={"factory": f"{__name__}:parts", "trained": []})
    recipe = Recipe.model_validate(content)
    if method != "mle":
        recipe = Recipe.model_validate(
            {**content, "network": {**content["network"], "bayesian": ["head"]}}
        )
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    model = build(recipe, (8,), 3, x)
    initialise(model, x)
    body = next(layer for name, layer in model.network.named_modules() if name.endswith("body"))
    before = {name: tensor.clone() for name, tensor in body.state_dict().items()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    outputs, kl = model.train().sample(
        x, noise(model.posterior, model.posterior.max_draws or 2, 0, 0)
    )
    loss = kl.mean() - outputs[..., 0].mean()
    if parameters:
        loss.backward()
        torch.optim.SGD(parameters, 0.1).step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in body.state_dict().items())


def parts(*_):
    return Parts()


def test_bayesian_layers_are_rejected_for_point_estimates():
    content = content_with(method="mle", network={**DENSE, "bayesian": ["1"]})
    with pytest.raises(
        InvalidInput, match=r"^network\.bayesian: expected no layers for method mle"
    ):
        build(Recipe.model_validate(content), SHAPE, CLASSES, rows())


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"hidden": [3], "start": "trained"}, "no value without weights or factory"),
        ({"hidden": [3], "weights": "w", "start": "random"}, "Input should be 'trained'"),
        ({"hidden": [3], "standardise": {"mean": [0.5]}}, "Field required"),
        ({"hidden": [3], "standardise": {"mean": [0.5], "std": [1.0, 1.0]}}, "as in mean"),
    ],
)
def test_contradictory_network_keys_are_rejected(network, message):
    with pytest.raises(ValueError, match=message):
        recipe_with(network=network)


def test_pixels_are_standardised_per_channel_as_configured():
    network = {
        **FACTORY,
        "start": "trained",
        "standardise": {"mean": [0.5, 0.25], "std": [0.5, 2.0]},
    }
    pixels = torch.randint(0, 256, (20, 72), generator=torch.Generator().manual_seed(0))
    recipe = recipe_with(method="bbb-gaussian", network=network)
    model = build(recipe, SHAPE, CLASSES, pixels)
    initialise(model, pixels.float(), recipe.is_standardised)
    outputs = model.eval().network(pixels.float(), model.posterior.centre()[None, None])
    means, stds = torch.tensor([0.5, 0.25])[:, None, None], torch.tensor([0.5, 2.0])[:, None, None]
    expected = convnet(SHAPE, CLASSES)((pixels.unflatten(1, SHAPE) / 255 - means) / stds)
    torch.testing.assert_close(outputs[0], expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(
        InvalidInput,
        match=r"^network\.standardise\.mean: expected 2 numbers, one per channel, got 1",
    ):
        build(
            recipe_with(network={**FACTORY, "standardise": {"mean": [0.5], "std": [1.0]}}),
            SHAPE,
            CLASSES,
            pixels,
        )


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.steps, self.out = (
            nn.Embedding(10, 4),
            nn.LSTM(4, 5, batch_first=True),
            nn.Linear(5, 3),
        )

    def forward(self, x):
        return self.out(self.steps(self.embedding(x.long()))[0][:, -1])


def embedded(*_):
    return Embedded()


@pytest.mark.parametrize("method", ["bhn-realnvp", "mle"])
def test_ids_reach_the_network_unchanged(method):
    network = {"factory": f"{__name__}:embedded", "standardise": False}
    recipe = recipe_with(method=method, network=network)
    ids = torch.randint(0, 10, (20, 6), generator=torch.Generator().manual_seed(0))
    model = build(recipe, (6,), 3, ids)
    initialise(model, ids.float(), recipe.is_standardised)
    assert model.predict(ids, noise(model.posterior, 1, 0, 0)).isfinite().all()
    build(recipe, (6,), 3)
    with pytest.raises(
        InvalidInput, match=r"a module that runs on a batch of rows, got IndexError"
    ):
        build(recipe_with(method=method, network={"factory": f"{__name__}:embedded"}), (6,), 3, ids)


def test_shared_weights_are_rejected_only_in_drawn_layers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.two.weight = self.one.weight
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.head(self.gain * self.one(torch.relu(self.two(self.one(x)))))

    network = DrawnNetwork(Tied(), Stochastic("scales", ["head"]), (4,))
    assert sum(isinstance(layer, ScaledLayer) for layer in network.modules()) == 1
    with pytest.raises(
        InvalidInput,
        match=r"layer one: Linear: two reads its weights directly; .*network\.bayesian",
    ):
        DrawnNetwork(Tied(), Stochastic("scales"), (4,))
    MemberNetwork([Tied()], (4,))


@pytest.mark.parametrize("noise", ["homoscedastic", "heteroscedastic"])
def test_trained_regression_network_predicts_in_target_units(noise):
    network = {"factory": f"{__name__}:dense", "start": "trained"}
    recipe = recipe_with(
        method="bbb-gaussian", task="regression", network=network, likelihood={"noise": noise}
    )
    model = build(recipe, SHAPE, 0, rows())
    initialise(model, rows(), recipe.is_standardised)
    model.likelihood.start(500.0 + 30.0 * torch.randn(20))
    x = rows() / 100
    outputs = model.eval().network(x, model.posterior.centre()[None, None])
    moments = model.likelihood(outputs)[0]
    expected = dense(SHAPE, 2 if noise == "heteroscedastic" else 1)(x.unflatten(1, SHAPE))
    torch.testing.assert_close(moments[:, 0], expected[:, 0])
    if noise == "heteroscedastic":
        torch.testing.assert_close(moments[:, 1], expected[:, 1])


def test_pixel_statistics_require_images_with_maximum_255():
    recipe = recipe_with(
        network={**DENSE, "start": "trained", "standardise": {"mean": [0.1], "std": [0.3]}}
    )
    train = Rows(np.zeros((4, 9), dtype=np.float32), np.array([0, 1, 0, 1]))
    data = Dataset(train, train, (3, 3), ("0", "1"), 0.0, 255.0, image=ImageSpec(mode="L"))
    check_pixels(recipe, data)
    for invalid_data in (replace(data, image=None), replace(data, maximum=16.0)):
        with pytest.raises(
            InvalidInput,
            match=r"^network\.standardise: expected no pixel statistics, since rows",
        ):
            check_pixels(recipe, invalid_data)
