"""Conversion of models with Gaussian weights to local reparametrisation, for serving."""

import copy
from itertools import accumulate, pairwise

import torch
from jaxtyping import Num
from torch import Tensor

from model_store.inference.noise import ROW_NOISE
from training.bayes.layers import WeightLayer
from training.bayes.local import LocalLayer, output_moments
from training.bayes.network import BayesianModel
from training.bayes.variational_hypernet import HyperLayer, NoisePosterior
from training.networks.networks import DrawnNetwork
from training.networks.probes import watch

TRIAL_ROWS, TRIAL_DRAWS = 3, 2


@torch.no_grad()
def localise(model: BayesianModel, x: Num[Tensor, "N I"]) -> BayesianModel:
    """Convert a model to sample outputs instead of weights, with the same distribution per row.

    The result shares the model's parameters. The model itself is returned if a layer's weights are
    not Gaussian, or if a layer processes several vectors per row, such as a convolution. `x` has
    valid input rows.
    """
    network = model.network
    if not isinstance(network, DrawnNetwork):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    local = copy.deepcopy(network, shared)
    layers = [
        (name, layer)
        for name, layer in local.named_modules()
        if isinstance(layer, WeightLayer | HyperLayer)
    ]
    if len(layers) < len(local.slots) or not _serves_vectors(local, dict(layers), x):
        return model
    ends = list(accumulate((slot.size for slot in local.slots), initial=0))
    numbers = [slice(*part) for part in pairwise(ends)]
    order = [slot.name for slot in local.slots]
    for name, layer in layers:
        index = order.index(layer.context.slot.name)
        moments = output_moments(model.posterior, layer, index, numbers[index])
        if moments is None:
            return model
        units = layer.shape[1] if isinstance(layer, WeightLayer) else layer.sizes[2]
        parent, _, last = name.rpartition(".")
        setattr(local.get_submodule(parent), last, LocalLayer(moments, units, layer.context))
    local.slots = [context.slot for context in local.contexts]
    local.theta_dimension = sum(slot.size for slot in local.slots)
    local.is_paired = True
    posterior = NoisePosterior(local.theta_dimension, ROW_NOISE)
    return BayesianModel(local, posterior, model.likelihood).eval()


def _serves_vectors(
    network: DrawnNetwork, layers: dict[str, torch.nn.Module], x: Num[Tensor, "N I"]
) -> bool:
    """Check that each layer runs once, on one vector per row or per row and draw."""
    inputs: dict[str, list[torch.Size]] = {name: [] for name in layers}
    rows = x[:TRIAL_ROWS].float().repeat(TRIAL_ROWS, 1)[:TRIAL_ROWS]
    with watch(layers, lambda name, h: inputs[name].append(h.shape)):
        network(rows, torch.zeros(TRIAL_DRAWS, 1, network.theta_dimension))
    folded = (TRIAL_DRAWS * TRIAL_ROWS,)
    batches = [(TRIAL_ROWS,), folded if network.folded else (TRIAL_DRAWS, TRIAL_ROWS)]
    return all(len(shapes) == 1 and tuple(shapes[0][:-1]) in batches for shapes in inputs.values())
