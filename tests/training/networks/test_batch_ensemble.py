import numpy as np
import pytest
import torch

from model_store.errors import InvalidInput
from tests.support.recipes import recipe_with
from training.bayes.posterior import noise
from training.model import build
from training.networks.architectures import mlp
from training.networks.batch_ensemble import BatchEnsemble, MemberLinear
from training.networks.fixed_layers import PiecewiseLinear, quantile_knots, select_inputs

MEMBERS = 3


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    network = BatchEnsemble(mlp(4, [5, 6], 2, dropout=0.2), MEMBERS, (4,))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return network.eval()


def test_member_matches_network_with_its_effective_weights(network):
    x = torch.randn(7, 4)
    outputs = network(x, torch.arange(MEMBERS).float().reshape(-1, 1, 1))
    layers = [layer for layer in network.module if isinstance(layer, MemberLinear)]
    for m in range(MEMBERS):
        h = x
        for i, layer in enumerate(layers):
            shared = layer.weight[m] if layer.weight.ndim == 3 else layer.weight
            weight = layer.before[m].T * shared * layer.after[m]  # r s^T o W
            h = h @ weight + layer.bias[m]
            h = torch.relu(h) if i < len(layers) - 1 else h
        torch.testing.assert_close(outputs[m], h)


def test_members_start_with_different_signs_and_separate_heads():
    torch.manual_seed(0)
    module = BatchEnsemble(mlp(4, [5], 2), MEMBERS, (4,)).module
    first, last = module[0], module[-1]
    assert set(first.before.unique().tolist()) == {-1.0, 1.0}
    assert (last.before == 1).all() and (first.after == 1).all()
    assert first.weight.shape == (4, 5) and last.weight.shape == (MEMBERS, 5, 2)


def test_weight_decay_is_the_mean_over_members(network):
    first, mid, last = (layer.weight for layer in network.module if isinstance(layer, MemberLinear))
    members = [(first**2).sum() + (mid**2).sum() + (last[m] ** 2).sum() for m in range(MEMBERS)]
    torch.testing.assert_close(network.weight_decay(2.0), torch.stack(members).mean() / 8)


def test_piecewise_encoding_is_the_position_within_each_bin():
    encode = PiecewiseLinear([[0.0, 1.0, 3.0], [], [-1.0, 0.0]])
    x = torch.tensor([[0.5, 7.0, -2.0], [2.0, 8.0, -0.25], [9.0, 9.0, 4.0]])
    expected = [[0.5, 0.0, 0.0], [1.0, 0.5, 0.75], [1.0, 1.0, 1.0]]
    torch.testing.assert_close(encode(x), torch.cat([x, torch.tensor(expected)], dim=1))
    assert encode.outputs == 6


def test_inputs_with_knots_none_are_dropped():
    x = torch.tensor([[0.5, 7.0, -2.0], [2.0, 8.0, -0.25]])
    encode = PiecewiseLinear([[0.0, 1.0, 3.0], None, []])
    expected = torch.tensor([[0.5, -2.0, 0.5, 0.0], [2.0, -0.25, 1.0, 0.5]])
    torch.testing.assert_close(encode(x), expected)
    assert (encode.inputs, encode.outputs) == (3, 4)


@pytest.mark.parametrize("is_regression", [False, True])
def test_important_inputs_are_selected_unless_all_predict_better(is_regression):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 100)).astype(np.float32)
    for inputs in (4, 100):
        y = x[:, :inputs].sum(1) + 0.1 * rng.normal(size=600)
        selected = select_inputs(x, y if is_regression else y > 0, 10, is_regression)
        assert set(range(4)) <= set(selected.tolist())
        assert len(selected) == (10 if inputs == 4 else 100)


def test_linear_layer_on_encoding_interpolates_values_at_knots():
    knots = np.array([-2.0, -0.5, 0.25, 3.0])
    values = np.array([1.0, -4.0, 2.0, 0.5])
    x = np.linspace(-3, 4, 50)
    encoded = PiecewiseLinear([knots.tolist()])(torch.from_numpy(x)[:, None].float())[:, 1:]
    interpolated = values[0] + encoded.numpy() @ np.diff(values)
    np.testing.assert_allclose(interpolated, np.interp(x, knots, values), atol=1e-5)


def test_knots_are_quantiles_and_empty_for_inputs_with_few_values():
    rng = np.random.default_rng(0)
    x = np.stack([rng.exponential(size=1000), rng.integers(0, 2, 1000), np.zeros(1000)], axis=1)
    x[:400, 0] = 0  # several quantiles are equal
    actual = quantile_knots(x, 10)
    expected = np.unique(np.quantile(x[:, 0].astype(np.float32), np.arange(11) / 10))
    np.testing.assert_allclose(actual[0], expected.astype(np.float32))
    assert actual[1:] == [[], []]
    assert len(actual[0]) < 11


def test_dropout_masks_apply_only_in_training(network):
    model = build(
        recipe_with(method="batch-ensemble", network={"hidden": [8], "dropout": 0.5}), (4,), 2
    )
    x, eps = torch.randn(9, 4), noise(model.posterior, 16, 0)
    model.eval()
    torch.testing.assert_close(model.predict(x, eps), model.predict(x, eps), rtol=0, atol=0)
    model.train()
    assert (model.sample(x, eps)[0] != model.sample(x, eps)[0]).any()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"kind": "gal-cnn"}, "network: expected a sequence of Linear layers"),
        ({"hidden": [4], "bayesian": ["0"]}, "network.bayesian: expected no layers"),
    ],
)
def test_unsupported_networks_are_rejected(network, message):
    with pytest.raises(InvalidInput, match=message):
        build(recipe_with(method="batch-ensemble", network=network), (16, 16), 3)
