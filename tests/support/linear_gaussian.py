"""Linear regressions with Gaussian noise, whose posteriors are known: what a variational fit can be held against.

Noise, and what else a method takes for a parameter, are what the fit found: the reference is exact given those.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from training.data import Rows, Splits
from training.fitting.run import Run
from training.nn.model import BayesianModel, build
from training.recipe import Recipe

UNITS = 4


class Total(nn.Module):
    """The sum of all units."""

    def forward(self, h):
        return h.sum(-1, keepdim=True)


def linear(shape, outputs):
    """One layer: y = w x + b."""
    return nn.Linear(shape[0], outputs)


def summed(shape, outputs):
    """One layer of several units, added up: y is linear in the scales of its units."""
    return nn.Sequential(nn.Linear(shape[0], UNITS), Total())


@dataclass(frozen=True)
class Problem:
    """Rows of a linear regression whose inputs are correlated."""

    splits: Splits
    inputs: int

    @classmethod
    def make(cls, rows: int = 1280, inputs: int = 5, seed: int = 0) -> "Problem":
        rng = np.random.default_rng(seed)
        mixing = np.eye(inputs) + 0.15 * rng.normal(size=(inputs, inputs))
        x = rng.normal(size=(rows + 60, inputs)) @ mixing
        y = x @ rng.normal(size=inputs) + rng.normal(size=rows + 60)
        everything = Rows(x.astype(np.float32), y.astype(np.float32))
        parts = [everything.take(np.arange(rows + 15 * i, rows + 15 * (i + 1))) for i in range(4)]
        return cls(Splits(everything.take(np.arange(rows)), *parts), inputs)


def recipe(method: str, initial_log_std: float, epochs: int = 150, seed: int = 0, **posterior) -> Recipe:
    """The documented defaults, but for the start."""
    over_scales = method in ("bhn-realnvp", "bhn-iaf")
    return Recipe.model_validate(
        {
            "name": "linear",
            "method": method,
            "task": "regression",
            "seed": seed,
            "data": {"source": "digits", "validation_rows": 1, "reference_rows": 1, "ranking_rows": 1},
            "network": {"factory": f"tests.support.linear_gaussian:{'summed' if over_scales else 'linear'}"},
            "posterior": {"initial_log_std": initial_log_std, **posterior},
            "training": {"epochs": epochs, "learning_rate": 5e-3},
        }
    )


def fit(problem: Problem, settings: Recipe, folder) -> tuple[BayesianModel, Run]:
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(settings, problem.splits, (problem.inputs,), 0, folder, torch.device("cpu"))
    return run.fit(quiet=True).eval(), run


@torch.no_grad()
def exact(model: BayesianModel, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact posterior's mean and precision, given the model's other parameters; for a prior N(0, 1)."""
    x = torch.from_numpy(problem.splits.train.x).double()
    y = torch.from_numpy(problem.splits.train.y).double()
    model = model.double()
    model.likelihood.log_variance.data = model.likelihood.log_variance.data.double()
    size = model.posterior.theta_dimension
    # outputs are affine in theta
    points = torch.cat([torch.zeros(1, size), torch.eye(size)]).double()
    served = model.likelihood(model.network(x, points[:, None])[0])
    constant, design = served[0, :, 0], (served[1:, :, 0] - served[0, :, 0]).T
    variance = served[0, 0, 1].exp()
    precision = design.T @ design / variance + torch.eye(size).double()
    mean = torch.linalg.solve(precision, design.T @ (y - constant) / variance)
    model.float()
    return mean, precision


@torch.no_grad()
def moments(model: BayesianModel, draws: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    """The fitted posterior's mean and variance of each number."""
    eps = torch.randn(draws, model.posterior.noise_dimension, generator=torch.Generator().manual_seed(1))
    theta = model.posterior(eps).double()
    return theta.mean(0), theta.var(0)


def at_exact_posterior(problem: Problem, method: str, variances_times: float) -> BayesianModel:
    """A model that was not fitted, at the best posterior of its family but for the variances."""
    model = build(recipe(method, -3.0), (problem.inputs,), 0).eval()
    model.likelihood.start(torch.from_numpy(problem.splits.train.y))
    mean, precision = exact(model, problem)
    with torch.no_grad():
        model.posterior.start_at(mean.float())
        sigma = (variances_times / precision.diagonal()).sqrt().float()
        model.posterior.rho.copy_(torch.log(torch.expm1(sigma)))
    return model
