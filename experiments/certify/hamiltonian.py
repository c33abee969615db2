"""Hamiltonian Monte Carlo for small networks (Neal 2011).

Approximate posteriors are compared with these draws.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from training import recipe as recipes
from training.bayes.gaussian import GaussianPosterior
from training.bayes.network import BayesianModel
from training.fit import Fitted
from training.recipe import Recipe

LogDensity = Callable[[Float[Tensor, "K D"]], Float[Tensor, "K"]]

ACCEPTED = 0.8  # target share of accepted proposals
ADAPTATION = 0.05  # change of the log step size per unit of acceptance
FIRST_STEP = 0.01
CHAINS, WARM_UP, KEPT = 16, 1000, 1000
EVERY = 40  # thinning of the reference draws
PATH = 40  # maximum leapfrog steps per proposal
SAMPLED = (  # for protocols of tables
    f"{CHAINS} chains of {KEPT:,} draws after {WARM_UP:,} warm-up draws, from the posterior that "
    "`bbb-gaussian` approximates"
)
DRAWS = 400
EXACT = "hamiltonian"
METHODS: dict[str, dict[str, Any]] = {
    "bbb-gaussian": {"method": "bbb-gaussian", "posterior": {}},
    "bbb-mixture": {"method": "bbb-mixture", "posterior": {}},
    "mvn": {"method": "mvn", "posterior": {}},
    "bhn-realnvp": {"method": "bhn-realnvp", "posterior": {"hidden": 50}},
    "bhn-weights": {"method": "bhn-weights", "posterior": {"hidden": 50}},
    "dropout-alpha": {"method": "dropout-alpha", "posterior": {"rate": 0.05, "prior_std": 1.0}},
    "variational-hypernet": {"method": "variational-hypernet", "posterior": {"hidden": 10}},
    "laplace": {"method": "laplace", "posterior": {}},
    "gp-layer": {"method": "gp-layer", "posterior": {}},
    "ensemble": {"method": "ensemble", "posterior": {"members": 10, "prior_std": 1.0}},
    "anchored-ensemble": {"method": "anchored-ensemble", "posterior": {}},
    "batch-ensemble": {"method": "batch-ensemble", "posterior": {"members": 16, "prior_std": 1.0}},
}
OVER_WEIGHTS = ("bbb-gaussian", "bbb-mixture", "mvn", "bhn-weights")
REGRESSION: dict[str, Any] = {"task": "regression", "likelihood": {"noise": "homoscedastic"}}


def compared_recipe(
    name: str,
    method: str,
    seed: int,
    *,
    data: dict[str, Any],
    units: int,
    training: dict[str, Any],
    ramp_epochs: float = 300.0,
    **sections: Any,
) -> Recipe:
    """Create a method's recipe for the comparison.

    Posteriors over weights need a KL ramp. Without it they end in a poor optimum, a straight line.
    """
    ramp = {"kl_ramp_epochs": ramp_epochs, "learning_rate": 1e-2} if method in OVER_WEIGHTS else {}
    content = {
        "name": f"{name}-{method}",
        "seed": seed,
        "data": data,
        "network": {"hidden": [units]},
        "training": {"learning_rate": 3e-3, **ramp, **training},
        "serving": {"draws": DRAWS},
        **sections,
        **METHODS[method],
    }
    return recipes.validate(content, name)


def sample(
    log_density: LogDensity,
    start: Float[Tensor, "K D"],
    warm_up: int,
    draws: int,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "M K D"], float]:
    """Sample K chains, and return the draws and the acceptance rate.

    The warm-up adapts the step size, and halfway sets the masses to the inverse variances over the
    chains. A proposal has a random number of leapfrog steps, which avoids periodic orbits.
    """
    theta = start.detach().clone()
    scale = torch.ones_like(theta[0])  # roots of the inverse masses
    value, gradient = _with_gradient(log_density, theta)
    log_step, samples, warm_up_samples, accepted = math.log(FIRST_STEP), [], [], 0.0
    for i in range(warm_up + draws):
        momentum = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        length = int(torch.randint(1, PATH + 1, (), generator=generator))
        step = math.exp(log_step) * scale
        proposal, slope, speed, new_value = theta, gradient, momentum, value
        for _ in range(length):
            speed = speed + 0.5 * step * slope
            proposal = proposal + step * speed
            new_value, slope = _with_gradient(log_density, proposal)
            speed = speed + 0.5 * step * slope
        energy = new_value - value - 0.5 * (speed.square() - momentum.square()).sum(1)
        chance = torch.nan_to_num(energy, nan=-torch.inf).clamp(max=0.0).exp()
        uniform = torch.rand(len(theta), generator=generator, dtype=theta.dtype)
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


def sample_answers(
    result: Fitted,
    serve: Callable[[BayesianModel, Float[Tensor, "K D"], Float[Tensor, "N I"]], Tensor],
    places: Float[np.ndarray, "M I"],
    seed: int,
    extra: int = 0,
) -> tuple[Float[Tensor, "S K M ..."], Float64[np.ndarray, "J M ..."], float]:
    """Sample outputs by chain, and return them with the acceptance rate.

    The posterior has the likelihood and the prior of a `bbb-gaussian` fit, whose weights are not
    used. `extra` numbers after the weights have flat priors.
    """
    model, rows = result.model.double().eval(), result.splits.train
    x, grid = torch.from_numpy(rows.x).double(), torch.from_numpy(places).double()
    y, posterior = torch.from_numpy(rows.y), model.posterior
    assert isinstance(posterior, GaussianPosterior)
    size = posterior.theta_dimension

    def log_density(theta: Tensor) -> Tensor:
        log_likelihood = model.likelihood.log_likelihood(serve(model, theta, x), y).sum(1)
        return log_likelihood + posterior.log_prior(theta[:, :size])

    random = torch.Generator().manual_seed(seed)
    start = 0.5 * torch.randn(CHAINS, size + extra, generator=random, dtype=torch.float64)
    draws, accepted = sample(log_density, start, WARM_UP, KEPT, random)
    with torch.no_grad():
        chains = torch.stack([serve(model, theta, grid) for theta in draws[::10]])
        thinned = serve(model, draws.flatten(0, 1)[::EVERY], grid).numpy()
    return chains, thinned, accepted


def _with_gradient(
    log_density: LogDensity, theta: Float[Tensor, "K D"]
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K D"]]:
    theta = theta.detach().requires_grad_()
    value = log_density(theta)
    (gradient,) = torch.autograd.grad(value.sum(), theta)
    return value.detach(), gradient


def split_r_hat(values: Float[Tensor, "M K ..."]) -> Float[Tensor, "..."]:
    """Compute split R-hat; values near 1 indicate convergence.

    Gelman et al. 2013, equation 11.4.
    """
    half = len(values) // 2
    halves = torch.cat([values[:half], values[half : 2 * half]], dim=1)
    within = halves.var(dim=0).mean(dim=0)
    between = halves.mean(dim=0).var(dim=0)
    return (((half - 1) / half * within + between) / within).sqrt()
