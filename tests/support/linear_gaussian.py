"""Linear regressions with Gaussian noise, whose posteriors are known: what a variational fit can be
held against.

Noise, and what else a method takes for a parameter, are what the fit found: the reference is exact
    given those.

`python -m tests.support.linear_gaussian -7 -4 -1` fits every method by the defaults of recipes from
these starts, and prints a table.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from training.data import Rows, Splits
from training.fitting.run import Run, run_provenance
from training.model import BayesianModel, build
from training.recipe import Recipe

UNITS = 4
METHODS: dict[
    str, dict[str, float]
] = {  # with what makes the exact posterior, or the best factorial one, theirs
    "bbb-gaussian": {},
    "bbb-mixture": {"std_1": 1.0, "std_2": 1.0},  # of equal parts: the prior N(0, 1)
    "mvn": {},
    "bhn-weights": {"couplings": 0},
    "bhn-realnvp": {"couplings": 0},
    "bhn-iaf": {"couplings": 0},
}
SCHEDULE = {
    "epochs": 150,
    "learning_rate": 5e-3,
}  # of tests: the default takes several times as long


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


def recipe(
    method: str, initial_log_std: float, seed: int = 0, training=None, **posterior
) -> Recipe:
    """The documented defaults, but for the start and the schedule: an empty `training` has the
    default one too."""
    over_scales = method in ("bhn-realnvp", "bhn-iaf")
    return Recipe.model_validate(
        {
            "name": "linear",
            "method": method,
            "task": "regression",
            "seed": seed,
            "data": {
                "source": "digits",
                "validation_rows": 1,
                "reference_rows": 1,
                "ranking_rows": 1,
            },
            "network": {
                "factory": f"tests.support.linear_gaussian:{'summed' if over_scales else 'linear'}"
            },
            "posterior": {"initial_log_std": initial_log_std, **posterior},
            "training": SCHEDULE if training is None else training,
        }
    )


def fit(problem: Problem, settings: Recipe, folder) -> tuple[BayesianModel, Run]:
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(settings, problem.splits, (problem.inputs,), 0, folder, torch.device("cpu"))
    return run.fit(quiet=True).eval(), run


@torch.no_grad()
def exact(model: BayesianModel, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact posterior's mean and precision, given the model's other parameters; for a prior
    N(0, 1)."""
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
    eps = torch.randn(
        draws, model.posterior.noise_dimension, generator=torch.Generator().manual_seed(1)
    )
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


@torch.no_grad()
def compared(model: BayesianModel, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Variances over those of the best factorial Gaussian, and means off by how many of its
    standard deviations."""
    mean, precision = exact(model, problem)
    fitted_mean, fitted_variance = moments(model)
    best = 1.0 / precision.diagonal()
    return fitted_variance / best, (fitted_mean - mean) / best.sqrt()


def main() -> None:
    problem = Problem.make()
    print(
        "| method | start | epochs | variance / best | largest error of a mean | settled "
        "|\n|---|---|---|---|---|---|"
    )
    for method, posterior in METHODS.items():
        for start in map(float, sys.argv[1:]):
            with tempfile.TemporaryDirectory() as folder:
                model, run = fit(
                    problem, recipe(method, start, training={}, **posterior), Path(folder)
                )
            ratio, off = compared(model, problem)
            facts = run_provenance(run, problem.splits)
            assert facts.convergence is not None
            row = (
                f"| {method} | {start:g} | {facts.epochs} | {ratio.min():.2f} to {ratio.max():.2f} "
            )
            row += f"| {off.abs().max():.2f} | {'yes' if facts.convergence['settled'] else 'no'} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
