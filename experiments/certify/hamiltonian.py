"""Hamiltonian Monte Carlo for small networks.

Its draws are compared with approximate posteriors.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from training import recipe as recipes
from training.bayes.gaussian import GaussianPosterior
from training.bayes.hamiltonian import sample
from training.bayes.network import BayesianModel
from training.fit import Fitted
from training.recipe import Recipe

CHAINS, WARM_UP, KEPT = 16, 1000, 1000
EVERY = 40  # thinning of the reference draws
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
    "last-layer-hmc": {"method": "last-layer-hmc", "posterior": {"draws": 400}},
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

    Posteriors over weights need a KL ramp. Without it, they end in a poor optimum, a straight line.
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


def sample_answers(
    result: Fitted,
    serve: Callable[[BayesianModel, Float[Tensor, "K D"], Float[Tensor, "N I"]], Tensor],
    places: Float[np.ndarray, "M I"],
    seed: int,
    extra: int = 0,
) -> tuple[Float[Tensor, "S K M ..."], Float64[np.ndarray, "J M ..."], float]:
    """Sample outputs from the posterior by Hamiltonian Monte Carlo.

    Returns thinned outputs for each chain, thinned outputs for all chains together, and the
    acceptance rate.

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
