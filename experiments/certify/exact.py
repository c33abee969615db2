"""Comparison of variational fits with exact posteriors of linear regressions.

The reference is exact given the fit's noise and its other parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from experiments.cells import Column, Measured, Target
from experiments.pages import draw_columns
from training import recipe as recipes
from training.bayes.likelihoods import Gaussian
from training.bayes.network import BayesianModel
from training.data import Rows, Splits
from training.fitting.run import Run, run_provenance
from training.recipe import Recipe

UNITS = 4
STARTS = (-7.0, -4.0, -1.0)  # log deviations
# With these settings the family contains the exact or the best factorial posterior.
METHODS: dict[str, dict[str, float]] = {
    "bbb-gaussian": {},
    "bbb-mixture": {"std_1": 1.0, "std_2": 1.0},  # equals the prior N(0, 1)
    "mvn": {},
    "bhn-weights": {"couplings": 0},
    "bhn-realnvp": {"couplings": 0},
    "bhn-iaf": {"couplings": 0},
}
# The default takes several times as long as this schedule, which tests use.
SCHEDULE = {"epochs": 150, "learning_rate": 5e-3}


class Total(nn.Module):
    """Add all units."""

    def forward(self, h: Tensor) -> Tensor:
        return h.sum(-1, keepdim=True)


def linear(shape: Sequence[int], _: int) -> nn.Module:
    """One layer: y = w x + b."""
    return nn.Linear(shape[0], 1)


def summed(shape: Sequence[int], _: int) -> nn.Module:
    """Sum the units of one layer, so that the output is linear in their scales."""
    return nn.Sequential(nn.Linear(shape[0], UNITS), Total())


@dataclass(frozen=True)
class Problem:
    """A linear regression problem with correlated inputs."""

    splits: Splits
    inputs: int

    @classmethod
    def make(cls, rows: int = 1280, inputs: int = 5, seed: int = 0) -> "Problem":
        rng = np.random.default_rng(seed)
        mixing = np.eye(inputs) + 0.15 * rng.normal(size=(inputs, inputs))
        x = rng.normal(size=(rows + 60, inputs)) @ mixing
        y = x @ rng.normal(size=inputs) + rng.normal(size=rows + 60)
        all_rows = Rows(x.astype(np.float32), y.astype(np.float32))
        parts = [all_rows.take(np.arange(rows + 15 * i, rows + 15 * (i + 1))) for i in range(4)]
        return cls(Splits(all_rows.take(np.arange(rows)), *parts), inputs)


def recipe(
    method: str,
    initial_log_std: float,
    seed: int = 0,
    training: Mapping[str, Any] | None = None,
    **posterior: Any,
) -> Recipe:
    """Create a recipe with the documented defaults, except for the start and the schedule.

    An empty `training` keeps the default schedule.
    """
    factory = "summed" if method in ("bhn-realnvp", "bhn-iaf") else "linear"
    content = {
        "name": "linear",
        "method": method,
        "task": "regression",
        "seed": seed,
        "data": {"source": "digits", "validation": 1, "reference": 1, "ranking": 1},
        "network": {"factory": f"{__name__}:{factory}"},
        "posterior": {"initial_log_std": initial_log_std, **posterior},
        "training": SCHEDULE if training is None else training,
    }
    return recipes.validate(content, "exact")


def fit(problem: Problem, settings: Recipe, folder: Path) -> tuple[BayesianModel, Run]:
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(settings, problem.splits, (problem.inputs,), 0, folder, torch.device("cpu"))
    return run.fit(quiet=True).eval(), run


@torch.no_grad()
def exact(
    model: BayesianModel, problem: Problem
) -> tuple[Float[Tensor, "D"], Float[Tensor, "D D"]]:
    """Compute the exact posterior mean and precision under the prior N(0, 1)."""
    x = torch.from_numpy(problem.splits.train.x).double()
    y = torch.from_numpy(problem.splits.train.y).double()
    model = model.double()
    assert isinstance(model.likelihood, Gaussian)
    assert model.likelihood.log_variance is not None
    model.likelihood.log_variance.data = model.likelihood.log_variance.data.double()
    size = model.posterior.theta_dimension
    # Outputs are affine in theta, so these points determine the design matrix.
    points = torch.cat([torch.zeros(1, size), torch.eye(size)]).double()
    served = model.likelihood(model.network(x, points[:, None])[0])
    constant, design = served[0, :, 0], (served[1:, :, 0] - served[0, :, 0]).T
    variance = served[0, 0, 1].exp()
    precision = design.T @ design / variance + torch.eye(size).double()
    mean = torch.linalg.solve(precision, design.T @ (y - constant) / variance)
    model.float()
    return mean, precision


@torch.no_grad()
def moments(
    model: BayesianModel, draws: int = 20_000
) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
    """Estimate the mean and variance of each component of theta."""
    random = torch.Generator().manual_seed(1)
    eps = torch.randn(draws, model.posterior.noise_dimension, generator=random)
    theta = model.posterior(eps).double()
    return theta.mean(0), theta.var(0)


@torch.no_grad()
def compare(
    model: BayesianModel, problem: Problem
) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
    """Compare a fit with the best factorial Gaussian.

    Return the ratios of variances, and the errors of means in standard deviations.
    """
    mean, precision = exact(model, problem)
    fitted_mean, fitted_variance = moments(model)
    best = 1.0 / precision.diagonal()
    return fitted_variance / best, (fitted_mean - mean) / best.sqrt()


def measure(method: str, start: float, seed: int, runs: Path) -> Measured:
    problem = Problem.make()
    settings = recipe(method, start, seed, training={}, **METHODS[method])
    folder = runs / f"{method}{start:g}-{seed}"
    model, run = fit(problem, settings, folder)
    ratio, off = compare(model, problem)
    facts = run_provenance(run, problem.splits)
    assert facts.convergence is not None
    run.checkpoint.unlink(missing_ok=True)
    return Measured(
        {
            "least": ratio.min().item(),
            "most": ratio.max().item(),
            "worst": max(ratio.max().item(), 1.0 / ratio.min().item()),
            "off": off.abs().max().item(),
            "settled": 100.0 * facts.convergence["settled"],
        },
        "made",
    )


EXACT = Target(
    name="exact",
    title="Variances of a linear-Gaussian problem compared with the exact ones",
    protocol=(
        "Each method is fitted with its defaults to 1,280 rows of five correlated columns, with "
        "three initial standard deviations (`from` their logarithm). The worst factor, in either "
        "direction, is between the variance of a parameter and that of the best factorial "
        "Gaussian. The largest error of the means is in exact standard deviations."
    ),
    rows={
        f"{method} from {start:g}": partial(measure, method, start)
        for method in METHODS
        for start in STARTS
    },
    columns={
        "worst": Column("worst factor"),
        "off": Column("error of means"),
        "settled": Column("reported as converged, %", 0),
    },
    draw=draw_columns,
    remarks=(
        "Flows have no couplings, and both parts of the mixture are equal, so that the best "
        "posterior of the family is known."
    ),
    seeds=10,
)

TARGETS = (EXACT,)
