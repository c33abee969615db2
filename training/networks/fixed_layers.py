"""Fixed layers: a piecewise linear encoding of inputs, and random features."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.bayes.layers import matmul
from training.networks.probes import output_layer, run_on_rows, watch

MIN_VALUES = 3  # different values per encoded column


class PiecewiseLinear(nn.Module):
    """A layer that appends a piecewise linear encoding of each number in a row.

    A number x with knots b_0 < ... < b_T is encoded as clip((x - b_{t-1}) / (b_t - b_{t-1}), 0, 1),
    t = 1, ..., T (Gorishniy et al. 2022, "On embeddings for numerical features in tabular deep
    learning", section 3.2).
    """

    def __init__(self, knots: Sequence[Sequence[float]]) -> None:
        """Create the layer from a list of knots per number; an empty list disables its encoding."""
        super().__init__()
        bins = [(i, a, b) for i, edges in enumerate(knots) for a, b in pairwise(edges)]
        index, left, right = zip(*bins, strict=True) if bins else ((), (), ())
        self.inputs, self.outputs = len(knots), len(knots) + len(bins)
        # The buffers are not saved because they follow from the recipe.
        self.index = nn.Buffer(torch.tensor(index, dtype=torch.int64), persistent=False)
        edges = torch.tensor([left, right], dtype=torch.float64)
        self.left = nn.Buffer(edges[0].float(), persistent=False)
        self.width = nn.Buffer((edges[1] - edges[0]).float(), persistent=False)

    def forward(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N J"]:
        place = (x.index_select(1, self.index) - self.left) / self.width
        return torch.cat([x, place.clamp(0.0, 1.0)], dim=1)


def quantile_knots(x: Num[np.ndarray, "N I"], bins: int) -> list[list[float]]:
    """Compute each column's distinct quantiles at 0, 1/bins, ..., 1.

    A column with fewer than `MIN_VALUES` distinct values gets no knots.
    """
    levels = np.linspace(0.0, 1.0, bins + 1)
    knots_by_column = []
    for column in x.astype(np.float32).T:
        has_few_values = len(np.unique(column)) < MIN_VALUES
        # The network's float32 can merge knots that are distinct in float64.
        knots = np.unique(np.quantile(column, levels).astype(np.float32))
        knots_by_column.append([] if has_few_values else [float(knot) for knot in knots])
    return knots_by_column


class RandomFeatures(nn.Module):
    """Random Fourier features for a squared exponential kernel.

        phi(h) = sqrt(2 / D) cos(h W / l + b)        W ~ N(0, 1), b ~ U(0, 2 pi)

    If w ~ N(0, s^2 I), phi(h) . w approximates a Gaussian process with the kernel
    s^2 exp(-|h - h'|^2 / (2 l^2)) (Rahimi and Recht 2007, "Random features for large-scale kernel
    machines"). The length scale l is the median distance between the examples.
    """

    def __init__(self, examples: Float[Tensor, "R I"], features: int) -> None:
        super().__init__()
        length_scale = torch.pdist(examples.detach().float()).median().item() or 1.0
        self.weight = nn.Buffer(torch.randn(examples.shape[1], features) / length_scale)
        self.phase = nn.Buffer(2.0 * math.pi * torch.rand(features))

    def forward(self, h: Float[Tensor, "*N I"]) -> Float[Tensor, "*N D"]:
        cosines = torch.cos(matmul(h, self.weight) + self.phase)
        return math.sqrt(2.0 / len(self.phase)) * cosines


def with_random_features(
    module: nn.Module, examples: Num[Tensor, "R ..."], features: int
) -> nn.Module:
    """Replace a module's final Linear layer with random features and a new Linear layer."""
    module = nn.Sequential(module) if isinstance(module, nn.Linear) else module
    name = output_layer(module, examples)
    layer = module.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    inputs: list[Tensor] = []
    with watch({name: layer}, lambda _, h: inputs.append(h)):
        run_on_rows(module, examples)
    first = RandomFeatures(inputs[0].flatten(0, -2), features)
    last = nn.Linear(features, layer.out_features)
    children = list(module.children())
    if isinstance(module, nn.Sequential) and layer is children[-1]:
        return nn.Sequential(*children[:-1], first, last)
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, nn.Sequential(first, last))
    return module
