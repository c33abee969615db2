"""The base class for networks, and the Bayesian model."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.bayes.likelihoods import Likelihood
from training.bayes.posterior import FactorialGaussian, Posterior

CHUNK_ROWS = 512  # rows * draws of a prediction that are computed together
TINY_GRADIENT = 1e-20


class Network(nn.Module):
    """A network with standardised inputs: outputs[k, n] = f((x[n] - mean) / std, theta[k]).

    The mean and standard deviation are scalars or have one value per channel. If `takes_ids`, rows
    are ids, which are passed unchanged as int64.
    """

    mean: Tensor
    std: Tensor
    theta_dimension: int
    is_paired: bool  # draws can differ by row
    draws_one_by_one = False  # in predictions, so that torch's own convolutions can be used

    def __init__(self, shape: Sequence[int], takes_ids: bool = False) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.takes_ids = takes_ids
        self.frozen: list[nn.Module] = []  # layers whose weights and statistics stay unchanged
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def forward(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> Float[Tensor, "K N C"]:
        return self.run(x, theta)[0]

    def run(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Tensor | None]:
        """Compute outputs, and the KL of layers with input-dependent posteriors, if any."""
        raise NotImplementedError

    @property
    def layer_sizes(self) -> list[int]:
        """The numbers of theta that belong to each layer."""
        raise NotImplementedError

    def sample_locally(
        self,
        x: Float[Tensor, "N I"],
        means: Sequence[Tensor],
        variances: Sequence[Tensor],
        num_draws: int,
    ) -> Float[Tensor, "K N C"]:
        """Compute outputs with independent Gaussian weights, sampled separately for each row.

        Each layer has a vector of means and a vector of variances.
        """
        raise NotImplementedError

    def embed(self, x: Float[Tensor, "N I"], theta: Float[Tensor, "1 1 D"]) -> Float[Tensor, "N H"]:
        """Compute the input to the last layer that has weights, for one draw."""
        raise NotImplementedError

    @torch.no_grad()
    def initialise(
        self, x: Float[Tensor, "N I"], standardise: bool = True
    ) -> Float[Tensor, "D"] | None:
        """Initialise the standardisation from a batch, and return theta's initial value, if any."""
        if standardise:
            self.fit_scale(x)
        return None

    def weight_decay(self, prior_std: float) -> Float[Tensor, ""]:
        """Compute -log N(W; 0, prior_std^2) for the non-random weights, up to a constant."""
        raise NotImplementedError

    def scale(self, x: Float[Tensor, "N I"]) -> Num[Tensor, "N ..."]:
        if self.takes_ids:
            return x.unflatten(1, self.shape).long()
        return (x.unflatten(1, self.shape) - self.mean) / self.std

    @torch.no_grad()
    def fit_scale(self, x: Float[Tensor, "N I"]) -> None:
        """Set the scalar mean and standard deviation to those of a batch."""
        self.mean.copy_(x.mean())
        self.std.copy_(x.std().clamp(min=1e-12))

    def train(self, mode: bool = True) -> "Network":
        """Set the training mode of all layers except frozen ones, which stay in evaluation mode."""
        super().train(mode)
        for layer in self.frozen:
            layer.training = False
        return self


class BayesianModel(nn.Module):
    """A Bayesian neural network, f(x[n], theta(eps[k])), with its likelihood."""

    def __init__(
        self,
        network: Network,
        posterior: Posterior,
        likelihood: Likelihood,
        decay_prior_std: float | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.posterior = posterior
        self.likelihood = likelihood
        self.decay_prior_std = decay_prior_std  # prior on fixed weights

    def sample(
        self, x: Float[Tensor, "N I"], eps: Float[Tensor, "S E"], groups: int = 1
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "K"]]:
        """Compute training predictions for each draw and row, and each draw's KL in nats.

        With G `groups` of successive rows, there are S = K G draws. The first G draws are the first
        draws of all groups.
        """
        if isinstance(self.posterior, FactorialGaussian):
            means, variances, kl = self.posterior.layer_moments(eps, self.network.layer_sizes)
            outputs = self.network.sample_locally(x, means, variances, len(eps))
        else:
            theta, kl = self.posterior.sample(eps)
            theta = theta.unflatten(0, (-1, groups))
            kl = kl.unflatten(0, (-1, groups)).mean(1)
            if groups > 1:
                theta = theta.index_select(
                    1, torch.arange(len(x), device=x.device) * groups // len(x)
                )
            outputs, network_kl = self.network.run(x, theta)
            kl = kl if network_kl is None else kl + network_kl
        if self.decay_prior_std is not None:
            kl = kl + self.network.weight_decay(self.decay_prior_std)
        if outputs.requires_grad:
            outputs.register_hook(_drop_tiny)
        return self.likelihood(outputs), kl

    @torch.no_grad()
    def predict(
        self, x: Num[Tensor, "N I"], eps: Float[Tensor, "K E"], chunk_rows: int = CHUNK_ROWS
    ) -> Float[Tensor, "K N C"]:
        parts = eps.split(1 if self.network.draws_one_by_one else len(eps))
        return torch.cat(
            [
                self.serve(x, self.posterior(part)[:, None], max(1, chunk_rows // len(part)))
                for part in parts
            ]
        )

    def serve(
        self, x: Num[Tensor, "N I"], theta: Float[Tensor, "K P D"], rows: int
    ) -> Float[Tensor, "K N C"]:
        """Predict in batches of `rows` rows, given draws of theta."""
        parts = [self.likelihood(self.network(part.float(), theta)) for part in x.split(rows)]
        return torch.cat(parts, dim=1)


def _drop_tiny(gradient: Tensor) -> Tensor:
    """Set tiny gradients of confident predictions to zero.

    Further products would make them denormal, which slows down training several times.
    """
    return gradient.masked_fill(gradient.abs() < TINY_GRADIENT, 0.0)
