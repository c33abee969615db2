"""BatchEnsemble networks."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from model_store.errors import InvalidInput
from training.bayes.layers import matmul
from training.bayes.members import MemberLinear
from training.bayes.network import Network
from training.networks.fixed_layers import PiecewiseLinear
from training.networks.networks import ELEMENTWISE, noise_rows
from training.networks.probes import DROPOUTS


class BatchEnsemble(Network):
    """An ensemble of MLPs that share most weights. Theta is the member index.

    The last member is a linear model (`training.fitting.linear`), which has no draws until it is
    fitted.
    """

    linear_weight: Tensor
    linear_bias: Tensor

    def __init__(
        self,
        module: nn.Module,
        members: int,
        shape: Sequence[int],
        examples: Num[Tensor, "R ..."] | None = None,
    ) -> None:
        examples = noise_rows(shape) if examples is None else examples
        super().__init__(shape, takes_ids=not examples.is_floating_point())
        layers = list(module) if isinstance(module, nn.Sequential) else [module]
        linear = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
        for layer in layers:
            if not isinstance(layer, (nn.Linear, PiecewiseLinear, *ELEMENTWISE, *DROPOUTS)):
                expected = "a sequence of Linear layers and nonlinearities"
                raise InvalidInput("network", expected, type(layer).__name__)
        if not linear:
            raise InvalidInput("network", "a Linear layer", "none")
        for i, layer in enumerate(layers):
            if isinstance(layer, nn.Linear):
                layers[i] = MemberLinear(layer, members, i == linear[0], i == linear[-1])
        self.module = nn.Sequential(*layers)
        (outputs,) = layers[linear[-1]].get_parameter("bias").shape[2:]
        self.register_buffer("linear_weight", torch.zeros(math.prod(shape), outputs))
        self.register_buffer("linear_bias", torch.zeros(outputs))
        self.theta_dimension = 1
        self.is_paired = False

    def run(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], None]:
        standard = self.scale(x).flatten(1)
        outputs, _ = self._run(standard)
        linear = matmul(standard, self.linear_weight) + self.linear_bias
        members = torch.cat([outputs, linear[None]])
        return members.index_select(0, theta[:, 0, 0].long()), None

    def _run(self, h: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        last_input = h
        for layer in self.module:
            if isinstance(layer, MemberLinear):
                last_input, h = h, layer(h, members)
            else:
                h = layer(h)
        return h, last_input

    def embed(self, x: Float[Tensor, "N I"], _: Float[Tensor, "1 1 D"]) -> Float[Tensor, "N H"]:
        """Compute the last layer's input for the first member."""
        last_input = self._run(self.scale(x).flatten(1), slice(1))[1]
        return last_input if last_input.ndim == 2 else last_input[0]

    def weight_decay(self, prior_std: float) -> Float[Tensor, ""]:
        """Compute sum |W|^2 / (2 prior_std^2) over weight matrices, averaged over members."""
        layers = [layer for layer in self.module if isinstance(layer, MemberLinear)]
        squares = [layer.weight.square().sum() / layer.copies for layer in layers]
        return torch.stack(squares).sum() / (2.0 * prior_std**2)
