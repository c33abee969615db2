"""Pruning of weights by their signal-to-noise ratio |mu| / sigma.

Blundell et al. 2015, "Weight uncertainty in neural networks", sections 3.2 and 5.1.

A removed weight is 0 in every draw. Noise and theta then contain only the remaining weights, which
the network inserts into matrices of zeros, because ONNX has no sparse product. In a chain of Linear
layers, units without outgoing weights are removed together with their incoming weights, because no
output depends on them. Units without incoming weights remain, because their biases matter.
"""

import copy

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from model_store.errors import InvalidInput
from training.bayes.gaussian import GaussianPosterior
from training.bayes.layers import WeightLayer
from training.bayes.network import BayesianModel
from training.networks.networks import DrawnNetwork


class InputUnits(nn.Module):
    """A layer that selects the inputs with outgoing weights."""

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self.index = nn.Buffer(index, persistent=False)

    def forward(self, x: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch J"]:
        return x.index_select(-1, self.index)


def signal_to_noise(model: BayesianModel) -> Float[Tensor, "D"]:
    """Compute |mu| / sigma for every weight and bias, in the order of theta."""
    posterior = model.posterior
    if not isinstance(posterior, GaussianPosterior):
        expected = "bbb-gaussian or bbb-mixture, whose weights have a mu and a sigma"
        raise InvalidInput("method", expected, "another method")
    return (posterior.mu.abs() / posterior.sigma).detach()


def is_weight(model: BayesianModel) -> Bool[Tensor, "D"]:
    parts = []
    for layer in _layers(model):
        part = torch.ones(layer.context.slot.shape, dtype=torch.bool)
        part[layer.shape[0] :] = False
        parts.append(part.flatten())
    return torch.cat(parts)


def select_strongest(model: BayesianModel, fraction: float) -> Bool[Tensor, "D"]:
    """Mark the weights that remain after the weakest fraction is removed.

    All biases remain.
    """
    if not 0 <= fraction < 1:
        raise InvalidInput("--fraction", "at least 0 and less than 1", f"{fraction}")
    ratio, weights = signal_to_noise(model), is_weight(model)
    removed = round(fraction * int(weights.sum()))
    order = ratio.masked_fill(~weights, torch.inf).argsort(stable=True)
    mask = torch.ones_like(weights)
    mask[order[:removed]] = False
    for layer, part in zip(_layers(model), _matrices(model, mask), strict=True):
        if not part.any():
            expected = "a fraction that leaves weights in every layer"
            received = f"{fraction}, which leaves none in {layer.context.slot.name}"
            raise InvalidInput("--fraction", expected, received)
    return mask


def prune(model: BayesianModel, mask: Bool[Tensor, "D"]) -> BayesianModel:
    """Remove parameters that are not in `mask` or do not affect any output.

    The buffer `network.kept` contains the indices of the remaining parameters in the old theta.
    """
    pruned = copy.deepcopy(model)
    network, posterior = pruned.network, model.posterior
    assert isinstance(network, DrawnNetwork)
    assert isinstance(posterior, GaussianPosterior)
    layers, matrices = _layers(pruned), _matrices(model, mask)
    inputs = [torch.ones(len(matrix), dtype=torch.bool) for matrix in matrices]
    outputs = [torch.ones(matrix.shape[1], dtype=torch.bool) for matrix in matrices]
    if not network.folded:  # a chain
        for i in reversed(range(len(layers))):
            inputs[i] = (matrices[i] & outputs[i]).any(1)
            if i > 0:
                outputs[i - 1] = inputs[i]
    places = []
    for layer, matrix, used, live in zip(layers, matrices, inputs, outputs, strict=True):
        biases = torch.ones(layer.context.slot.shape[0] - len(matrix), len(live), dtype=torch.bool)
        places.append((torch.cat([matrix, biases]) & live).flatten())
        layer.keep(matrix[used][:, live])
    if not inputs[0].all():
        first = InputUnits(inputs[0].nonzero()[:, 0])
        network.module = nn.Sequential(first, *network.module.children())
    index = torch.cat(places).nonzero()[:, 0]
    network.slots = [layer.context.slot for layer in layers]
    network.theta_dimension = len(index)
    network.initial = {}
    network.register_buffer("kept", index.int())
    pruned.posterior = GaussianPosterior(len(index), 0.0, posterior.prior)
    pruned.posterior.load_state_dict({"mu": posterior.mu[index], "rho": posterior.rho[index]})
    assert sum(slot.size for slot in network.slots) == len(index)
    return pruned


def _layers(model: BayesianModel) -> list[WeightLayer]:
    assert isinstance(model.network, DrawnNetwork)
    return model.network.get_layers(WeightLayer)


def _matrices(model: BayesianModel, mask: Bool[Tensor, "D"]) -> list[Tensor]:
    """Split a mask over theta into one weight mask (inputs, outputs) per layer."""
    parts = mask.split([layer.context.slot.size for layer in _layers(model)])
    return [
        part.unflatten(0, layer.context.slot.shape)[: layer.shape[0]]
        for part, layer in zip(parts, _layers(model), strict=True)
    ]
