"""Random features that approximate a Gaussian process in a network's last layer."""

import math

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.bayes.layers import matmul
from training.networks.probes import output_layer, run_on_rows, watch


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
