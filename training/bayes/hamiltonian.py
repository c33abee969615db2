"""Hamiltonian Monte Carlo (Neal 2011), and a posterior that stores its draws."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from model_store.inference.noise import DRAW_INDEX
from training.bayes.laplace import LaplacePosterior
from training.bayes.layers import Slot

LogDensity = Callable[[Float[Tensor, "K D"]], Float[Tensor, "K"]]

ACCEPTED = 0.8  # target share of accepted proposals
ADAPTATION = 0.05  # change of the log step size per unit of acceptance
FIRST_STEP = 0.01
MAX_STEPS = 40  # leapfrog steps per proposal


def sample(
    log_density: LogDensity,
    start: Float[Tensor, "K D"],
    warm_up: int,
    draws: int,
    generator: torch.Generator,
    max_steps: int = MAX_STEPS,
) -> tuple[Float[Tensor, "M K D"], float]:
    """Run K chains, and return their draws and the acceptance rate.

    The warm-up adapts the step size. Halfway through, it sets the masses to the inverse variances
    over the chains. A proposal has a random number of leapfrog steps, which avoids periodic orbits.
    """
    theta = start.detach().clone()
    scale = torch.ones_like(theta[0])  # roots of the inverse masses
    value, gradient = _with_gradient(log_density, theta)
    log_step, samples, warm_up_samples, accepted = math.log(FIRST_STEP), [], [], 0.0
    for i in range(warm_up + draws):
        momentum = torch.randn(theta.shape, generator=generator, dtype=theta.dtype).to(theta.device)
        length = int(torch.randint(1, max_steps + 1, (), generator=generator))
        step = math.exp(log_step) * scale
        proposal, slope, speed, new_value = theta, gradient, momentum, value
        for _ in range(length):
            speed = speed + 0.5 * step * slope
            proposal = proposal + step * speed
            new_value, slope = _with_gradient(log_density, proposal)
            speed = speed + 0.5 * step * slope
        energy = new_value - value - 0.5 * (speed.square() - momentum.square()).sum(1)
        chance = torch.nan_to_num(energy, nan=-torch.inf).clamp(max=0.0).exp()
        uniform = torch.rand(len(theta), generator=generator, dtype=theta.dtype).to(theta.device)
        accepts = (uniform < chance)[:, None]
        theta = torch.where(accepts, proposal, theta)
        gradient = torch.where(accepts, slope, gradient)
        value = torch.where(accepts[:, 0], new_value, value)
        if i < warm_up:
            log_step += ADAPTATION * (chance.mean().item() - ACCEPTED) * (4.0 if i < 100 else 1.0)
            warm_up_samples.append(theta)
            if i == warm_up // 2:
                scale = torch.stack(warm_up_samples[i // 2 :]).flatten(0, 1).std(0)
                log_step += math.log(1.0 / scale.mean().item())
        else:
            samples.append(theta)
            accepted += chance.mean().item() / draws
    return torch.stack(samples), accepted


def _with_gradient(
    log_density: LogDensity, theta: Float[Tensor, "K D"]
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K D"]]:
    with torch.enable_grad():
        theta = theta.detach().requires_grad_()
        value = log_density(theta)
        (gradient,) = torch.autograd.grad(value.sum(), theta)
    return value.detach(), gradient


def split_r_hat(values: Float[Tensor, "M K ..."]) -> Float[Tensor, "..."]:
    """Compute split R-hat, which is near 1 if chains agree (Gelman et al. 2013, equation 11.4)."""
    half = len(values) // 2
    halves = torch.cat([values[:half], values[half : 2 * half]], dim=1)
    within = halves.var(dim=0).mean(dim=0)
    between = halves.mean(dim=0).var(dim=0)
    return (((half - 1) / half * within + between) / within).sqrt()


class SampledPosterior(LaplacePosterior):
    """A posterior stored as draws of the last layer's weights, mean + deviations[k].

    The Laplace approximation is the sampler's starting point and its scale. The deviations are 0
    until `keep` sets them.
    """

    algorithm = DRAW_INDEX
    deviations: Tensor

    def __init__(self, slot: Slot, prior_std: float | None, draws: int) -> None:
        super().__init__(slot, prior_std)
        self.noise_dimension, self.max_draws = 1, draws
        self.register_buffer("deviations", torch.zeros(draws, slot.size))

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return self.mean + self.deviations.index_select(0, eps[:, 0].long())

    @torch.no_grad()
    def keep(self, theta: Float[Tensor, "K D"]) -> None:
        self.deviations.copy_(theta - self.mean)
