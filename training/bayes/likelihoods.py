"""Likelihoods p(y | outputs) for classification and regression.

`forward` maps the network's outputs to the predictions of the served graph: log-probabilities, or
mean and log variance.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from model_store.types import Task

Noise = Literal["homoscedastic", "heteroscedastic"]
# For a standardised target: standard deviations from 3e-4 to 3e3 times the target's.
LOG_VARIANCE_LIMIT = 16.0
SPEED = 10.0  # learning rate factor of the homoscedastic noise


class Likelihood(nn.Module):
    task: Task
    metric: str  # name of the metric that averages `row_metric`
    score: str  # name of the proper score that selects a checkpoint
    outputs: int  # number of network outputs
    meaning: str  # of the outputs, for errors
    temperature: Tensor  # T; predictions are p(y | x, theta)^(1/T), normalised

    def __call__(self, outputs: Float[Tensor, "K N O"]) -> Float[Tensor, "K N C"]:
        """Convert outputs to the predictions listed in `model_store.inference.runtime.OUTPUTS`."""
        predictions: Tensor = super().__call__(outputs)
        return predictions

    def log_likelihood(
        self, predictions: Float[Tensor, "K N C"], y: Tensor
    ) -> Float[Tensor, "K N"]:
        """Compute log p(y | x, theta) for each draw and row, in nats."""
        raise NotImplementedError

    def weighted_log_likelihood(
        self, predictions: Float[Tensor, "K N C"], y: Tensor
    ) -> Float[Tensor, "K N"]:
        """Compute the class-weighted training log-likelihood for each draw and row."""
        return self.log_likelihood(predictions, y)

    def mixture_log_likelihood(
        self, predictions: Float[Tensor, "K N C"], y: Tensor
    ) -> Float[Tensor, "N"]:
        """Compute log mean_k p(y | x, theta_k) for each row, in nats."""
        log_likelihood = self.log_likelihood(predictions.double(), y)
        return torch.logsumexp(log_likelihood, dim=0) - math.log(len(predictions))

    def tempered(
        self, predictions: Float[Tensor, "K N C"], temperature: float
    ) -> Float[Tensor, "K N C"]:
        """Convert predictions from temperature 1 to another temperature."""
        raise NotImplementedError

    def row_metric(self, predictions: Float[Tensor, "N C"], y: Tensor) -> Float[Tensor, "N"]:
        """Compute each row's squared error, or for classes, whether its prediction is correct."""
        raise NotImplementedError

    def to_metric(self, mean: float) -> float:
        """Convert the mean of `row_metric` to the reported metric (accuracy or RMSE)."""
        return mean

    def validation(self, predictions: Float[Tensor, "K N C"], y: Tensor) -> Float[Tensor, "N S"]:
        """Compute each row's proper score (lower is better), log-likelihood and `row_metric`.

        For classes, two columns follow: the log-probability of all wrong labels, and the mean of
        their log-likelihoods weighted by their probabilities. The last column is the row's
        epistemic uncertainty: BALD in nats, or the standard deviation of the draws' means.
        """
        raise NotImplementedError

    def start(self, y: Tensor) -> None:
        """Initialise the targets' mean and scale from the training set."""


class Categorical(Likelihood):
    """The categorical likelihood p(y | logits) = softmax(logits)_y.

    With class weights w, outputs fit p_w(y | x), which is proportional to w_y p(y | x). Predictions
    are p(y | x).
    """

    task: Task = "classification"
    metric = "accuracy"
    score = "brier"
    log_weights: Tensor | None

    def __init__(self, classes: int, is_weighted: bool = False) -> None:
        super().__init__()
        self.outputs = classes
        self.meaning = "one for each class"
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("log_weights", torch.zeros(classes) if is_weighted else None)

    def forward(self, outputs: Float[Tensor, "K N C"]) -> Float[Tensor, "K N C"]:
        logits = outputs if self.log_weights is None else outputs - self.log_weights
        return functional.log_softmax(logits / self.temperature, dim=-1)

    def log_likelihood(
        self, log_probs: Float[Tensor, "K N C"], y: Int64[Tensor, "N"]
    ) -> Float[Tensor, "K N"]:
        return log_probs.gather(2, y.expand(len(log_probs), -1)[:, :, None])[:, :, 0]

    def weighted_log_likelihood(
        self, log_probs: Float[Tensor, "K N C"], y: Int64[Tensor, "N"]
    ) -> Float[Tensor, "K N"]:
        if self.log_weights is None:
            return self.log_likelihood(log_probs, y)
        weighted = functional.log_softmax(log_probs + self.log_weights, dim=-1)
        return self.log_weights.exp()[y] * self.log_likelihood(weighted, y)

    def tempered(
        self, log_probs: Float[Tensor, "K N C"], temperature: float
    ) -> Float[Tensor, "K N C"]:
        """Compute log(p^(1/T) / sum_c p_c^(1/T)).

        See Guo et al. 2017, "On calibration of modern neural networks".
        """
        return functional.log_softmax(log_probs / temperature, dim=-1)

    def row_metric(
        self, log_probs: Float[Tensor, "N C"], y: Int64[Tensor, "N"]
    ) -> Float[Tensor, "N"]:
        return (log_probs.argmax(1) == y).double()

    def validation(
        self, log_probs: Float[Tensor, "K N C"], y: Int64[Tensor, "N"]
    ) -> Float[Tensor, "N 6"]:
        probs = log_probs.exp().mean(0).double()
        true_probs = probs.gather(1, y[:, None])[:, 0]
        # Brier score: the sum over classes of (p_c - [y = c])^2.
        brier = probs.square().sum(1) - 2.0 * true_probs + 1.0
        log_likelihood = self.mixture_log_likelihood(log_probs, y)
        classes = torch.arange(self.outputs - 1, device=y.device)
        mixed = torch.logsumexp(log_probs.double(), dim=0) - math.log(len(log_probs))
        wrong = mixed.gather(1, classes + (classes >= y[:, None]).long())  # all classes except y
        wrong_mean = (wrong.softmax(1) * wrong).sum(1)
        columns = [brier, log_likelihood, self.row_metric(probs, y), wrong.logsumexp(1), wrong_mean]
        entropies = torch.special.entr(log_probs.double().exp()).sum(2)
        columns.append(torch.special.entr(probs).sum(1) - entropies.mean(0))
        return torch.stack(columns, dim=1)


class Gaussian(Likelihood):
    """The Gaussian likelihood N(y; m, T s^2), with learned noise s and temperature T.

    The outputs are m and, for heteroscedastic noise, log s^2. Homoscedastic noise is one parameter.
    Outputs refer to the standardised target, or to the target itself if `is_in_units` (for networks
    trained elsewhere).
    """

    task: Task = "regression"
    metric = "rmse"
    score = "crps"
    target_mean: Tensor
    target_std: Tensor

    def __init__(self, noise: Noise, is_in_units: bool = False) -> None:
        super().__init__()
        self.is_in_units = is_in_units
        self.outputs = 2 if noise == "heteroscedastic" else 1
        self.meaning = "mean and log variance" if noise == "heteroscedastic" else "the mean"
        self.register_buffer("target_mean", torch.zeros(()))
        self.register_buffer("target_std", torch.ones(()))
        self.register_buffer("temperature", torch.ones(()))
        self.log_variance = nn.Parameter(torch.zeros(())) if noise == "homoscedastic" else None

    def forward(self, outputs: Float[Tensor, "K N O"]) -> Float[Tensor, "K N 2"]:
        """Compute the mean and log variance in the target's units."""
        mean = outputs[..., :1]
        if not self.is_in_units:
            mean = mean * self.target_std + self.target_mean
        if self.log_variance is not None:
            log_variance = (SPEED * self.log_variance).expand(mean.shape)
        else:
            log_variance = outputs[..., 1:]
            if self.is_in_units:
                log_variance = log_variance - 2.0 * self.target_std.log()
        log_variance = log_variance.clamp(-LOG_VARIANCE_LIMIT, LOG_VARIANCE_LIMIT)
        log_variance = log_variance + 2.0 * self.target_std.log()
        return torch.cat([mean, log_variance + self.temperature.log()], dim=-1)

    def log_likelihood(
        self, moments: Float[Tensor, "K N 2"], y: Float[Tensor, "N"]
    ) -> Float[Tensor, "K N"]:
        mean, log_variance = moments.unbind(-1)
        square = (y - mean).square() * (-log_variance).exp()
        return -0.5 * (math.log(2.0 * math.pi) + log_variance + square)

    def tempered(
        self, moments: Float[Tensor, "K N 2"], temperature: float
    ) -> Float[Tensor, "K N 2"]:
        """Multiply the variance by T.

        N(y; m, s^2)^(1/T) is proportional to N(y; m, T s^2).
        """
        mean, log_variance = moments.unbind(-1)
        return torch.stack([mean, log_variance + math.log(temperature)], dim=-1)

    def row_metric(
        self, moments: Float[Tensor, "N 2"], y: Float[Tensor, "N"]
    ) -> Float[Tensor, "N"]:
        return (moments[:, 0] - y).double().square()

    def to_metric(self, mean: float) -> float:
        return math.sqrt(mean)

    def validation(
        self, moments: Float[Tensor, "K N 2"], y: Float[Tensor, "N"]
    ) -> Float[Tensor, "N 4"]:
        moments = moments.double()
        log_likelihood = self.mixture_log_likelihood(moments, y)
        errors = self.row_metric(moments.mean(0), y)
        epistemic = moments[..., 0].std(0, correction=0)
        return torch.stack([crps(moments, y), log_likelihood, errors, epistemic], dim=1)

    @torch.no_grad()
    def start(self, y: Float[Tensor, "N"]) -> None:
        self.target_mean.copy_(y.double().mean())
        self.target_std.copy_(y.double().std(correction=0))

    @torch.no_grad()
    def fit_noise(self, moments: Float[Tensor, "N 2"], y: Float[Tensor, "N"]) -> None:
        """Set homoscedastic noise to the root mean square error of predictions."""
        if self.log_variance is not None:
            errors = self.row_metric(moments, y) / self.target_std.double().square()
            self.log_variance.copy_(errors.mean().clamp(min=1e-12).log() / SPEED)


def crps(moments: Float[Tensor, "K N 2"], y: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Compute the continuous ranked probability score for a Gaussian mixture, in units of y.

        mean_k A(y - m_k, s_k) - mean_kj A(m_k - m_j, sqrt(s_k^2 + s_j^2)) / 2

    A(m, s) is E|z| for z ~ N(m, s^2). Less is better (Grimit et al. 2006, "The continuous ranked
    probability score for circular variables and its application to mesoscale forecast ensemble
    verification").
    """
    mean, variance = moments[..., 0], moments[..., 1].exp()
    to_target = _mean_absolute(y - mean, variance).mean(0)
    pairs = [
        _mean_absolute(m - mean, v + variance).mean(0) for m, v in zip(mean, variance, strict=True)
    ]
    return to_target - 0.5 * torch.stack(pairs).mean(0)


def _mean_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """Compute E|z| for z ~ N(mean, variance)."""
    std = variance.sqrt()
    z = mean / std
    density = (-0.5 * z.square()).exp() / math.sqrt(2.0 * math.pi)
    return mean * torch.erf(z / math.sqrt(2.0)) + 2.0 * std * density
