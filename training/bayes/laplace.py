"""Laplace approximation of the posterior over the last layer's weights.

    theta ~ N(m, (H + I / prior_std^2)^-1),    H = sum_n a_n a_n' x L_n

See MacKay 1992, "A practical Bayesian framework for backpropagation networks", and Daxberger et al.
2021, "Laplace redux". a_n is the layer's input for row n, with a 1 for the bias. L_n is the
expected second derivative of -log p(y_n | outputs), so H is the generalised Gauss-Newton matrix of
the last layer and its Fisher information (Martens 2020, "New insights and perspectives on the
natural gradient method").

Training fits only the mean m. Afterwards H is approximated by a Kronecker product, and
`Spread.widen` sets the covariance.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from scipy.optimize import brentq
from torch import Tensor, nn

from training.bayes.layers import Slot
from training.bayes.likelihoods import LOG_VARIANCE_LIMIT, Categorical, Gaussian, Likelihood
from training.bayes.linalg import eigh
from training.bayes.posterior import Posterior

MAX_PRIOR_STD = 1e4  # the minimum is its inverse


def output_hessian(
    likelihood: Likelihood, outputs: Float[Tensor, "N C"], y: Tensor
) -> Float[Tensor, "C C"]:
    """Compute the Hessian with respect to the outputs, summed over rows with class weights.

    L_n is diag(p) - p p' for classes, and diag(1 / s^2, 1/2) for a Gaussian's mean and log
    variance.
    """
    if isinstance(likelihood, Categorical):
        probs = root_probs = torch.softmax(outputs, dim=1)
        if likelihood.log_weights is not None:
            weights = likelihood.log_weights.exp()[y][:, None].to(probs)
            probs, root_probs = weights * probs, weights.sqrt() * probs
        return torch.diag(probs.sum(0)) - root_probs.T @ root_probs
    assert isinstance(likelihood, Gaussian)
    log_variance = likelihood(outputs[None])[0, :, 1:]
    scale = 1.0 if likelihood.is_in_units else likelihood.target_std
    diagonal = scale**2 * (-log_variance).exp()
    if outputs.shape[1] == 2:
        standardised = log_variance - 2.0 * likelihood.target_std.log()
        is_free = standardised.abs() < LOG_VARIANCE_LIMIT
        diagonal = torch.cat([diagonal, torch.where(is_free, 0.5, 0.0)], dim=1)
    return torch.diag(diagonal.sum(0))


@dataclass(frozen=True, eq=False)
class Eigen:
    """The eigenvalues of H, with the eigenvectors of its two factors as columns."""

    values: Float64[Tensor, "I O"]
    input_vectors: Float64[Tensor, "I I"]
    output_vectors: Float64[Tensor, "O O"]

    @classmethod
    def from_factors(
        cls, a: Float64[Tensor, "I I"], b: Float64[Tensor, "O O"], rows: int
    ) -> "Eigen":
        """Decompose H = A x B / rows, where A = sum_n a_n a_n' and B = sum_n L_n."""
        a_values, input_vectors = eigh(a.cpu())
        b_values, output_vectors = eigh(b.cpu())
        return cls(a_values[:, None] * b_values / max(rows, 1), input_vectors, output_vectors)

    def std(self, precision: float) -> Float64[Tensor, "I O"]:
        """Compute the standard deviation along each eigenvector, (lambda + precision)^-1/2."""
        return (self.values + precision).rsqrt()

    def effective_parameters(self, precision: float) -> float:
        """Compute the effective number of parameters, sum_i lambda_i / (lambda_i + precision)."""
        return (self.values / (self.values + precision)).sum().item()


def log_marginal_likelihood(
    log_likelihood: float, eigen: Eigen, square: float, precision: float
) -> float:
    """Compute the log marginal likelihood in nats, where `square` is |m|^2.

        log p(data) = log p(data | m) - (sum_i log(1 + lambda_i / precision) + precision |m|^2) / 2

    The result is exact if outputs are linear in theta, noise is Gaussian and m is the posterior
    mean.
    """
    log_det = torch.log1p(eigen.values / precision).sum().item()
    return log_likelihood - 0.5 * (log_det + precision * square)


def best_precision(eigen: Eigen, square: float) -> float:
    """Find the prior precision that maximises the marginal likelihood.

    At the maximum, the effective number of parameters equals precision |m|^2.
    """

    def excess(log_precision: float) -> float:
        precision = math.exp(log_precision)
        return eigen.effective_parameters(precision) - precision * square

    high = 2.0 * math.log(MAX_PRIOR_STD)
    if excess(-high) <= 0.0:
        return math.exp(-high)
    if excess(high) >= 0.0:
        return math.exp(high)
    return math.exp(brentq(excess, -high, high, xtol=1e-6))


class Spread(nn.Module):
    """The deviations U_A (S . E) U_B', where S_io = (a_i b_o + precision)^-1/2 (initially 0).

    See Ritter, Botev and Barber 2018, "A scalable Laplace approximation for neural networks". The
    prior precision is added in the eigenbasis of A x B, which is exact, instead of to the factors.
    """

    input_vectors: Tensor
    output_vectors: Tensor
    std: Tensor

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.shape = slot.shape
        # Eigenvectors are rows, because draws are multiplied from the left.
        self.register_buffer("input_vectors", torch.eye(slot.shape[0]))
        self.register_buffer("output_vectors", torch.eye(slot.shape[1]))
        self.register_buffer("std", torch.zeros(slot.shape))

    def forward(self, eps: Float[Tensor, "K D"]) -> Float[Tensor, "K D"]:
        scaled = eps.unflatten(1, self.shape) * self.std
        rotated = rotate(scaled, self.output_vectors).transpose(1, 2)
        return rotate(rotated, self.input_vectors).mT.flatten(1)

    @torch.no_grad()
    def widen(self, eigen: Eigen, precision: float) -> None:
        self.input_vectors.copy_(eigen.input_vectors.mT)
        self.output_vectors.copy_(eigen.output_vectors.mT)
        self.std.copy_(eigen.std(precision))


class LaplacePosterior(Posterior):
    """A Laplace posterior, theta = mean + spread(eps).

    During training, the KL is -log p(mean) up to a constant, so the mean is fitted by maximum a
    posteriori. If `prior_std` is None, the mean is fitted by maximum likelihood, and the prior is
    chosen afterwards.
    """

    trains_without_noise = True

    def __init__(self, slot: Slot, prior_std: float | None) -> None:
        super().__init__()
        self.noise_dimension = self.theta_dimension = slot.size
        self.shape = slot.shape
        self.prior_std = prior_std
        self.mean = nn.Parameter(torch.zeros(self.theta_dimension))
        self.spread = Spread(slot)

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return self.mean + self.spread(eps)

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        decay = self.mean.new_zeros(())
        if self.prior_std:
            decay = self.mean.square().sum() / (2.0 * self.prior_std**2)
        return self.mean.expand(len(eps), -1), decay.expand(len(eps))

    def centre(self) -> Float[Tensor, "D"]:
        return self.mean.detach().clone()

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        self.mean.copy_(theta)


def rotate(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply rows by a matrix of eigenvectors, or return them unchanged if it is 1 x 1."""
    return rows if matrix.shape[-1] == 1 else rows @ matrix
