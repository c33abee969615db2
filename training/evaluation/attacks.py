"""Attacks on a fitted classifier: rows changed so that its label changes.

K draws, N rows, I numbers in a flat row, in the units of the data. Step sizes and radii are
fractions of the data's range, maximum - minimum; what comes out is clipped to that range. An
attacker's gradient is that of the cross entropy of the mean probability over its draws, -log mean_k
p(y | x, theta_k).

* `fgsm`: one step along the gradient's sign (Goodfellow et al., "Explaining and harnessing adversarial examples",
  2015), for several step sizes at once.
* `towards`: many small steps that raise the probability of a chosen class (Kurakin et al., "Adversarial examples in
  the physical world", 2017; Li and Gal 2017, section 5.3).
* `pgd`: steps from a random start, kept within a radius in the maximum norm (Madry et al., "Towards deep learning
  models resistant to adversarial attacks", 2018).
* `quiet_pgd`: the same by an attacker who knows the detectors and keeps them quiet: a row that still has its label
  takes a step against the label, one that has lost it a step that lowers the statistic (selective
  projected
  gradient descent: Bryniarski et al., "Evading adversarial example detection defenses with
      orthogonal projected
  gradient descent", 2022).

The draws behind gradients, and random starts, are those of the seeds given; nothing else is random.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from model_store.inference.noise import noise, standard_normal
from training.export.served import ServedNetwork
from training.posteriors import Posterior

CHUNK_ROW_DRAWS = 8192  # rows x draws in one pass
STEP_OF_RADIUS = 2.5  # the steps of all iterations together, in radii, as Madry et al. take them
LOST_BY = 1.5  # nats by which another class leads before a row counts as having lost its label

Gradient = Callable[[Tensor, int], Tensor]  # of a place and the number of the step
Statistic = Callable[[Float[Tensor, "K N C"], Float[Tensor, "N M"]], Float[Tensor, "N"]]


@dataclass(frozen=True)
class AttackDraws:
    """The draws that an attacker's gradient is of: the same for every step, or with `fresh` new
    ones for each."""

    count: int
    seed: int = 0
    fresh: bool = False


@dataclass(frozen=True, eq=False)
class Attacked:
    """A fitted classifier as an attacker has it: gradients and all, and the range that rows are
    clipped to."""

    network: ServedNetwork
    posterior: Posterior
    minimum: float
    maximum: float

    @torch.no_grad()
    def theta(self, draws: AttackDraws, step: int = 0) -> Float[Tensor, "K 1 D"]:
        """Return the draws for a step; of a model with a list of draws always its first ones."""
        most = self.posterior.max_draws
        count = min(draws.count, most or draws.count)
        first = count * step if draws.fresh and most is None else 0
        eps = noise(
            self.posterior.algorithm, draws.seed, first, count, self.posterior.noise_dimension
        )
        return self.posterior(torch.from_numpy(eps))[:, None]

    def log_probs(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K 1 D"]
    ) -> Float[Tensor, "K N C"]:
        """Return log class probabilities of each draw and row."""
        return self.network.likelihood(self.network.network(x, theta)[0])

    def clip(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B I"]:
        """Return rows within the range."""
        return x.clamp(self.minimum, self.maximum)

    @property
    def span(self) -> float:
        """The range that steps are fractions of."""
        return self.maximum - self.minimum


def fgsm(
    attacked: Attacked,
    x: Float[Tensor, "N I"],
    y: Int64[Tensor, "N"],
    steps: Sequence[float],
    draws: AttackDraws,
) -> Float[Tensor, "S N I"]:
    """Return the rows moved by each step along the sign of the loss's gradient."""
    direction = _gradient(attacked, x, y, attacked.theta(draws)).sign()
    return torch.stack([attacked.clip(x + step * attacked.span * direction) for step in steps])


def towards(
    attacked: Attacked,
    x: Float[Tensor, "N I"],
    target: Int64[Tensor, "N"],
    iterations: int,
    draws: AttackDraws,
    step: float = 0.01,
) -> Float[Tensor, "N I"]:
    """Return the rows after steps that each raise the probability of their target class."""
    size = -step * attacked.span
    return _climb(
        x,
        iterations,
        size,
        attacked.clip,
        lambda x, i: _gradient(attacked, x, target, attacked.theta(draws, i)),
    )


def pgd(
    attacked: Attacked,
    x: Float[Tensor, "N I"],
    y: Int64[Tensor, "N"],
    radius: float,
    iterations: int,
    draws: AttackDraws,
    start_seed: int = 0,
) -> Float[Tensor, "N I"]:
    """Return rows of high loss within `radius` of x in the maximum norm."""
    ball = _Ball(attacked, x, radius)
    start, size = ball.start(start_seed), ball.step(iterations)
    return _climb(
        start,
        iterations,
        size,
        ball.project,
        lambda x, i: _gradient(attacked, x, y, attacked.theta(draws, i)),
    )


def quiet_pgd(
    attacked: Attacked,
    x: Float[Tensor, "N I"],
    y: Int64[Tensor, "N"],
    radius: float,
    iterations: int,
    draws: AttackDraws,
    statistic: Statistic,
    start_seed: int = 0,
) -> Float[Tensor, "N I"]:
    """Return rows within `radius` of x that have lost their label while the detectors' statistic is
    low.

    Of the places that a row comes by, it is the one of the lowest statistic among those where the
    label is lost, or the last one where it never is.

    Args:
        statistic: what the flag looks at, from log class probabilities and density scores, more
            meaning more unlike the data; differentiable.
    """
    ball = _Ball(attacked, x, radius)
    start, size = ball.start(start_seed), -ball.step(iterations)
    quietest = _Quietest(attacked, y, draws, statistic, start, torch.full((len(x),), torch.inf))
    _climb(
        start, iterations + 1, size, ball.project, quietest.gradient
    )  # the last step is not looked at
    return quietest.best


def _climb(
    x: Tensor, steps: int, size: float, project: Callable[[Tensor], Tensor], gradient: Gradient
) -> Tensor:
    """Return where steps along a gradient's sign lead, each of a size (less than 0: downhill) and
    then projected."""
    for i in range(steps):
        x = project(x + size * gradient(x, i).sign())
    return x


def _of_loss(attacked: Attacked, y: Tensor, draws: AttackDraws) -> Gradient:
    """Return the gradient of the cross entropy, at each step under that step's draws."""
    return lambda x, i: _gradient(attacked, x, y, attacked.theta(draws, i))


@dataclass(eq=False)
class _Quietest:
    """What an attacker who keeps the detectors quiet walks down, and the best places that it has
    come by.

    A place is better if the label is lost there and the statistic is lower than wherever it was
    lost before; until it is lost, the last place is the best.
    """

    attacked: Attacked
    y: Tensor
    draws: AttackDraws
    statistic: Statistic
    best: Tensor
    lowest: Tensor  # the statistic at the best places, infinite where the label was never lost

    def gradient(self, x: Tensor, i: int) -> Tensor:
        """Return the margin's gradient where a row has its label, the statistic's where it has lost
        it."""
        theta = self.attacked.theta(self.draws, i)
        parts = [
            _label_and_statistic(self.attacked, rows, labels, theta, self.statistic)
            for rows, labels in zip(_chunks(x, theta), _chunks(self.y, theta), strict=True)
        ]
        margin, quiet, to_label, to_quiet = (
            torch.cat(values) for values in zip(*parts, strict=True)
        )
        lost = margin <= -LOST_BY
        better = (lost & (quiet < self.lowest)) | (torch.isinf(self.lowest) & ~lost)
        self.best = torch.where(better[:, None], x, self.best)
        self.lowest = torch.where(lost, torch.minimum(self.lowest, quiet), self.lowest)
        return torch.where(lost[:, None], to_quiet, to_label)


@dataclass(frozen=True, eq=False)
class _Ball:
    """What is within a radius of rows, and in the range."""

    attacked: Attacked
    centre: Tensor
    radius: float

    def start(self, seed: int) -> Tensor:
        """Return a place for each row, uniform over its ball; row n's depends on the seed and n
        alone."""
        normal = torch.from_numpy(standard_normal(seed, 0, *self.centre.shape))
        return self.project(self.centre + self._size * (2.0 * torch.special.ndtr(normal) - 1.0))

    def step(self, iterations: int) -> float:
        return STEP_OF_RADIUS * self._size / iterations

    def project(self, x: Tensor) -> Tensor:
        near = torch.minimum(torch.maximum(x, self.centre - self._size), self.centre + self._size)
        return self.attacked.clip(near)

    @property
    def _size(self) -> float:
        return self.radius * self.attacked.span


def log_mean_probs(log_probs: Float[Tensor, "K N C"]) -> Float[Tensor, "N C"]:
    """Return the logarithm of the mean probabilities over draws."""
    return torch.logsumexp(log_probs, dim=0) - math.log(len(log_probs))


def _gradient(attacked: Attacked, x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    """Return the gradient of each row's cross entropy."""
    parts = []
    for rows, labels in zip(_chunks(x, theta), _chunks(y, theta), strict=True):
        rows = rows.detach().requires_grad_()
        log_probs = log_mean_probs(attacked.log_probs(rows, theta))
        parts.append(torch.autograd.grad(-log_probs.gather(1, labels[:, None]).sum(), rows)[0])
    return torch.cat(parts)


def _label_and_statistic(
    attacked: Attacked, x: Tensor, y: Tensor, theta: Tensor, statistic: Statistic
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's margin (log p of its label less that of the next class), statistic, and
    both gradients."""
    x = x.detach().requires_grad_()
    outputs, _, density = attacked.network(x, theta)
    log_probs = log_mean_probs(outputs)
    own = log_probs.gather(1, y[:, None])[:, 0]
    margin = own - log_probs.scatter(1, y[:, None], -torch.inf).max(1).values
    quiet = statistic(outputs, density)
    (to_label,) = torch.autograd.grad(margin.sum(), x, retain_graph=True)
    (to_quiet,) = torch.autograd.grad(quiet.sum(), x)
    return margin.detach(), quiet.detach(), to_label, to_quiet


def _chunks(values: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
    return values.split(max(1, CHUNK_ROW_DRAWS // len(theta)))
