"""A published Bayesian hypernetwork in plain torch.

It depends only on torch and safetensors, so that it runs in every peer's environment. The weights
are from a version of `recipes/mnist.toml`: a multilayer perceptron whose weight-norm scales are
drawn by a RealNVP.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

DRAWS = 100
LOG_SCALE_BOUND = 2.0  # as in `training.bayes.flows`


class Coupling(nn.Module):
    """A RealNVP coupling of weight-normed `torch.nn.Linear` layers."""

    def __init__(self, weights: dict[str, Tensor], flipped: bool) -> None:
        super().__init__()
        self.flipped = flipped
        self.hidden = weight_normed(weights, "conditioner.hidden")
        self.output = weight_normed(weights, "conditioner.output")

    def forward(self, z: Tensor) -> Tensor:
        middle = z.shape[-1] // 2
        first, second = z[..., :middle], z[..., middle:]
        retained, updated = (second, first) if self.flipped else (first, second)
        shift, log_scale = self.output(torch.relu(self.hidden(retained))).chunk(2, dim=-1)
        updated = (
            updated * torch.exp(LOG_SCALE_BOUND * torch.tanh(log_scale / LOG_SCALE_BOUND)) + shift
        )
        return torch.cat([updated, retained] if self.flipped else [retained, updated], dim=-1)


class Affine(nn.Module):
    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.shift = weights["posterior.flow.affine.shift"]
        self.log_scale = weights["posterior.flow.affine.log_scale"]

    def forward(self, z: Tensor) -> Tensor:
        return self.shift + torch.exp(self.log_scale) * z


class Posterior:
    """The network and its posterior. Each prediction uses `DRAWS` draws."""

    def __init__(self, content: bytes) -> None:
        weights = load(content)
        self.sampler = sampler_of(weights)
        self.layers = [
            (layer["direction"], layer["bias"])
            for layer in _by_number(weights, "network.module.").values()
        ]
        self.mean, self.std = weights["network.mean"], weights["network.std"]
        self.temperature = weights["likelihood.temperature"]
        self.sizes = [len(bias) for _, bias in self.layers]
        # Precompute the weights of the sampler and the normalised directions.
        self.plain_sampler = sampler_of(weights)
        for layer in self.plain_sampler.modules():
            if isinstance(layer, nn.Linear):
                parametrize.remove_parametrizations(layer, "weight")
        self.unit_layers = [
            (direction / torch.linalg.vector_norm(direction, dim=1, keepdim=True), bias)
            for direction, bias in self.layers
        ]

    @torch.inference_mode()
    def textbook(self, x: Tensor, eps: Tensor | None = None) -> Tensor:
        """Compute mean probabilities (N, C) by a loop over draws.

        The noise (`DRAWS`, D) is random by default.
        """
        total = torch.zeros(len(x), self.sizes[-1])
        for k in range(DRAWS):
            theta = self.sampler(
                torch.randn(1, sum(self.sizes)) if eps is None else eps[k : k + 1]
            )[0]
            h = (x - self.mean) / self.std
            for i, ((direction, bias), scale) in enumerate(
                zip(self.layers, theta.split(self.sizes), strict=True)
            ):
                weight = (
                    scale[:, None]
                    * direction
                    / torch.linalg.vector_norm(direction, dim=1, keepdim=True)
                )
                h = functional.linear(h, weight, bias)
                h = h if i == len(self.layers) - 1 else torch.relu(h)
            total += torch.softmax(h / self.temperature, dim=-1)
        return total / DRAWS

    @torch.inference_mode()
    def batched(self, x: Tensor) -> Tensor:
        """Compute mean probabilities (N, C) of all draws in one call."""
        return self.probabilities(x, torch.randn(DRAWS, sum(self.sizes))).mean(0)

    @torch.inference_mode()
    def probabilities(self, x: Tensor, eps: Tensor) -> Tensor:
        theta = self.plain_sampler(eps)
        h = (x - self.mean) / self.std
        for i, ((direction, bias), scale) in enumerate(
            zip(self.unit_layers, theta.split(self.sizes, 1), strict=True)
        ):
            h = functional.linear(h, direction) * scale[:, None] + bias
            h = h if i == len(self.layers) - 1 else torch.relu(h)
        return torch.softmax(h / self.temperature, dim=-1)


def sampler_of(weights: dict[str, Tensor]) -> nn.Module:
    steps = _by_number(weights, "posterior.flow.steps.")
    couplings = (Coupling(step, flipped=i % 2 == 1) for i, step in steps.items())
    return nn.Sequential(*couplings, Affine(weights)).eval()


def weight_normed(weights: dict[str, Tensor], name: str) -> nn.Module:
    direction = weights[f"{name}.direction"]
    layer = weight_norm(nn.Linear(direction.shape[1], direction.shape[0]))
    with torch.no_grad():
        layer.parametrizations.weight.original0.copy_(weights[f"{name}.scale"][:, None])
        layer.parametrizations.weight.original1.copy_(direction)
        layer.bias.copy_(weights[f"{name}.bias"])
    return layer


def _by_number(weights: dict[str, Tensor], prefix: str) -> dict[int, dict[str, Tensor]]:
    """Group tensors named PREFIX NUMBER.NAME by number and name."""
    groups: dict[int, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            groups.setdefault(int(number), {})[rest] = tensor
    return dict(sorted(groups.items()))


def load_predictor() -> Callable[[list[list[float]]], list[list[float]]]:
    """Create the predict function of a server and warm it up.

    Environment variables: `PEER_WEIGHTS` is the path of the weights, `PEER_WAY` is `textbook` or
    `batched`, and `PEER_THREADS` is the number of torch threads.
    """
    torch.set_num_threads(int(os.environ["PEER_THREADS"]))
    posterior = Posterior(Path(os.environ["PEER_WEIGHTS"]).read_bytes())
    way = {"textbook": posterior.textbook, "batched": posterior.batched}[os.environ["PEER_WAY"]]

    def predict(rows: list[list[float]]) -> list[list[float]]:
        return way(torch.tensor(rows, dtype=torch.float32)).tolist()

    for _ in range(3):
        predict([[0.0] * posterior.layers[0][0].shape[1]])
    return predict
