import pytest
import torch

from tests.support.models import scale_mlp
from training.bayes.layers import ScaledLayer

SIZES = (5, 7, 6, 3)


def build_network(seed=0):
    generator = torch.Generator().manual_seed(seed)
    network = scale_mlp(*SIZES, seed=seed).double()
    with torch.no_grad():
        network.mean.fill_(0.4)
        network.std.fill_(1.7)
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network


def get_layers(network):
    """Return the directions and biases of the layers."""
    return [
        (layer.direction, layer.bias) for layer in network.module if isinstance(layer, ScaledLayer)
    ]


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def forward_by_hand(network, x, theta):
    h, index = (x - network.mean) / network.std, 0
    for layer, (direction, bias) in enumerate(get_layers(network)):
        h = torch.relu(h) if layer else h
        units = []
        for v, b in zip(direction, bias, strict=True):
            units.append(
                theta[index] * sum(h[i] * v[i] for i in range(len(h))) / v.square().sum().sqrt() + b
            )
            index += 1
        h = torch.stack(units)
    assert index == len(theta)
    return h


def test_forward_matches_its_equation_for_every_draw_and_row():
    network, x = build_network(), normal(4, 5)
    for theta in (normal(3, 1, 16, seed=2), normal(3, 4, 16, seed=3)):
        outputs = network(x, theta)
        assert outputs.shape == (3, 4, 3)
        for k in range(3):
            for n in range(4):
                draw = theta[k, n if theta.shape[1] > 1 else 0]
                torch.testing.assert_close(outputs[k, n], forward_by_hand(network, x[n], draw))


def test_initialise_standardises_every_unit_on_the_batch():
    network, x = build_network(), 30 + 10 * normal(200, 5)
    scales = network.initialise(x)
    assert scales.shape == (network.theta_dimension,)
    h = (x - x.mean()) / x.std()
    for (direction, bias), scale in zip(get_layers(network), scales.split(SIZES[1:]), strict=True):
        h = (
            h @ (direction / torch.linalg.vector_norm(direction, dim=1, keepdim=True)).T * scale
            + bias
        )
        torch.testing.assert_close(h.mean(0), torch.zeros_like(bias), atol=1e-9, rtol=0)
        torch.testing.assert_close(h.var(0), torch.ones_like(bias))
        h = torch.relu(h)


def test_initialise_stays_finite_if_the_batch_is_constant():
    network = build_network()
    scales = network.initialise(torch.full((10, 5), 3.0, dtype=torch.float64))
    assert scales.isfinite().all()
    assert (
        network(torch.full((2, 5), 3.0, dtype=torch.float64), scales[None, None]).isfinite().all()
    )


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 2), (4, 8, 8, 8, 10)])
def test_theta_has_one_number_per_unit(sizes):
    network = scale_mlp(*sizes)
    assert network.theta_dimension == sum(sizes[1:])
    outputs = network(torch.zeros(2, sizes[0]), torch.ones(3, 1, network.theta_dimension))
    assert outputs.shape == (3, 2, sizes[-1])
