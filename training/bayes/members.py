"""Posteriors for ensembles, in which each draw is one member."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model_store.inference.noise import DRAW_INDEX
from training.bayes.layers import matmul
from training.bayes.posterior import Posterior


class MemberPosterior(Posterior):
    """An ensemble posterior: draw k is member k (Lakshminarayanan et al. 2017)."""

    algorithm = DRAW_INDEX

    def __init__(self, members: int) -> None:
        super().__init__()
        self.noise_dimension = self.theta_dimension = 1
        self.max_draws = members

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return eps * 1.0  # an ONNX graph needs at least one operator

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        return eps, eps.new_zeros(len(eps))

    def centre(self) -> Float[Tensor, "D"]:
        return torch.zeros(1)


class MixturePosterior(MemberPosterior):
    """An ensemble posterior in which a linear model can have several draws.

    The linear model's member number follows the networks'. Its draws are evenly spaced, so it has
    about the same share of the first draws as of all draws.
    """

    order: Tensor  # member number of each draw

    def __init__(self, members: int) -> None:
        super().__init__(members)
        self.members = members
        self.register_buffer("order", torch.arange(members).float(), persistent=False)

    @property
    def linear_draws(self) -> int:
        return len(self.order) - self.members

    @linear_draws.setter
    def linear_draws(self, count: int) -> None:
        self.max_draws = self.members + count
        is_linear = torch.zeros(self.max_draws, dtype=torch.bool)
        is_linear[((torch.arange(count) + 0.5) * self.max_draws / max(1, count)).long()] = True
        order = (~is_linear).cumsum(0) - 1
        order[is_linear] = self.members
        self.order = order.to(self.order)

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return self.order.index_select(0, eps[:, 0].long())[:, None]

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        return self(eps), eps.new_zeros(len(eps))

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.linear_draws)

    def set_extra_state(self, state: Tensor) -> None:
        self.linear_draws = int(state)


class MemberLinear(nn.Module):
    """A BatchEnsemble linear layer: ((x * r_m) W) * s_m + b_m for member m.

    See Wen, Tran and Ba 2020, "BatchEnsemble", equation 5. Members share W, except in the output
    layer. In the first layer r_m starts at random signs; all other r_m and s_m start at 1
    (Gorishniy, Kotelnikov and Babenko 2024, "TabM", section 3.3).
    """

    def __init__(self, layer: nn.Linear, members: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        inputs, outputs = layer.in_features, layer.out_features
        shape = (members, 1, inputs)
        signs = 2.0 * torch.randint(0, 2, shape) - 1.0 if is_first else torch.ones(shape)
        bound = inputs**-0.5
        copies = (members,) if is_last else ()
        self.copies = members if is_last else 1  # of the weight
        self.weight = nn.Parameter(torch.empty(*copies, inputs, outputs).uniform_(-bound, bound))
        self.before = nn.Parameter(signs)
        self.after = nn.Parameter(torch.ones(members, 1, outputs))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(
        self, h: Float[Tensor, "*M N I"], members: slice = slice(None)
    ) -> Float[Tensor, "M N O"]:
        before, after, bias = (part[members] for part in (self.before, self.after, self.bias))
        weight = self.weight if self.weight.ndim == 2 else self.weight[members]
        return matmul(h * before, weight) * after + bias
