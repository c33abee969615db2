"""Variational hypernetworks: each layer infers its weight posterior from its input."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from model_store.inference.noise import NOISE_ALGORITHM
from training.bayes.layers import LayerContext, RandomLayer, Stochastic, matmul, randn_in_pairs
from training.bayes.posterior import Posterior


class HyperLayer(RandomLayer):
    """A layer h W + c with the inferred posterior q(W | h) = MVN(M, A = diag(a), B = diag(b)).

    See Kristiadi, "Variational hypernetworks", section 2. An inference network computes d, a and b
    from h. M = diag(d) V, where V is a parameter (vector scaling, equation 4). The prior is
    MVN(0, I, I).

    W = M + A^1/2 E B^1/2, where E is the layer's part of theta. W itself is not needed:
    h A^1/2 E B^1/2 = ((h sqrt(a)) E) sqrt(b). Training samples outputs from
    N(h M, (sum_i h_i^2 a_i) b) instead of weights (local reparametrisation).
    """

    def __init__(
        self,
        layer: nn.Linear,
        context: LayerContext,
        stochastic: Stochastic,
        is_trained: bool,
    ) -> None:
        super().__init__()
        inputs, outputs = layer.in_features, layer.out_features
        self.sizes = [inputs, inputs, outputs]
        self.trunk = nn.Linear(inputs, stochastic.hidden)
        self.head = nn.Linear(stochastic.hidden, sum(self.sizes))
        self.base = nn.Parameter(layer.weight.detach().T.clone())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        self.context = context
        with torch.no_grad():
            self.head.weight.mul_(0.1)
            scale, row, column = self.head.bias.split(self.sizes)
            scale.fill_(1.0)
            # The log std of weights is `initial_log_std` if a = b.
            raw = -math.log(math.expm1(-stochastic.initial_log_std))
            row.fill_(raw)
            column.fill_(raw)
            if is_trained:  # the mean weights of every row equal the layer's weights
                self.head.weight[:inputs] = 0.0

    def infer(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Infer d and the logits of a and b for each row.

        Variances stay below the prior's, because they could overflow far from the data.
        """
        scale, row, column = self.head(torch.relu(self.trunk(h))).split(self.sizes, dim=-1)
        return scale, row, column

    def mean(self, h: Tensor, scale: Tensor) -> Tensor:
        """Compute the mean output, h diag(d) V + c."""
        product = matmul(h * scale, self.base)
        return product if self.bias is None else product + self.bias

    def forward(self, h: Tensor) -> Tensor:
        """Compute the output and, in training, add the rows' mean KL to the network's KL."""
        self.context.detect_shared_input(h)
        scale, row, column = self.infer(h)
        a, b = row.sigmoid(), column.sigmoid()
        product = self.mean(h, scale)
        square = scale.square() @ self.base.square().sum(1)
        if self.training:
            inputs, outputs = self.sizes[1:]
            kl = a.sum(-1) * b.sum(-1) + square - inputs * outputs
            kl = kl - outputs * functional.logsigmoid(row).sum(-1)
            kl = kl - inputs * functional.logsigmoid(column).sum(-1)
            kl = 0.5 * self.context.by_draw(kl).mean(-1)
            forward = self.context.forward
            forward.kl = kl if forward.kl is None else forward.kl + kl
            std = ((h.square() * a).sum(-1, keepdim=True) * b + 1e-12).sqrt()
            product = self.context.repeated(product)
            return product + self.context.repeated(std) * randn_in_pairs(product, forward.num_draws)
        noise = matmul(self.context.by_draw(h * a.sqrt()), self.context.weight())
        return self.context.batch(
            self.context.by_draw(product) + noise * self.context.by_draw(b.sqrt())
        )


class NoisePosterior(Posterior):
    """The posterior theta = eps, for layers that compute their weights or outputs from noise.

    Layers of a variational hypernetwork read E of W = M + A^1/2 E B^1/2. They compute the KL
    themselves and sample outputs without E in training.
    """

    trains_without_noise = True

    def __init__(self, dimension: int, algorithm: str = NOISE_ALGORITHM) -> None:
        super().__init__()
        self.noise_dimension = self.theta_dimension = dimension
        self.algorithm = algorithm

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return eps * 1.0  # an ONNX graph needs at least one operator

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        return eps.new_zeros(()).expand(len(eps), self.theta_dimension), eps.new_zeros(len(eps))

    def centre(self) -> Float[Tensor, "D"]:
        return torch.zeros(self.theta_dimension)
