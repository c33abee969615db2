"""Likelihoods: what a network's outputs say of a target."""

from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional


class Categorical(nn.Module):
    """Classes by softmax: outputs are logits, one a class."""

    def forward(self, outputs: Float[Tensor, "K N C"]) -> Float[Tensor, "K N C"]:
        """Return log class probabilities, in nats."""
        return functional.log_softmax(outputs, dim=-1)

    def log_likelihood(self, log_probs: Float[Tensor, "K N C"], y: Int64[Tensor, "N"]) -> Float[Tensor, "K N"]:
        """Return log p(y | x, theta) of each draw and row, in nats."""
        return log_probs.gather(2, y.expand(len(log_probs), -1)[:, :, None])[:, :, 0]
