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

from experiments.cells import Column, Measured, Results, Target
from experiments.pages import count
from training import recipe as recipes
from training.bayes.hypernetwork import HypernetworkPosterior
from training.bayes.likelihoods import Gaussian
from training.bayes.network import BayesianModel
from training.data.rows import Rows, Splits
from training.fitting.convergence import change_warning
from training.fitting.run import Run, run_provenance
from training.recipe import Recipe

UNITS = 4
SEEDS = 3  # per problem
TOLERANCE = 0.15
PROBLEMS = 10
FIRST_PROBLEM = 5000  # seed; no default was chosen on these problems
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
    """A layer that sums all units."""

    def forward(self, h: Tensor) -> Tensor:
        return h.sum(-1, keepdim=True)


def linear(shape: Sequence[int], _: int) -> nn.Module:
    """Build a network with one linear layer, y = w x + b."""
    return nn.Linear(shape[0], 1)


def summed(shape: Sequence[int], _: int) -> nn.Module:
    """Build one layer and sum its units, so the output is linear in their scales."""
    return nn.Sequential(nn.Linear(shape[0], UNITS), Total())


@dataclass(frozen=True)
class Problem:
    """A linear regression problem with correlated inputs."""

    splits: Splits
    inputs: int

    @classmethod
    def random(cls, seed: int) -> "Problem":
        """Draw a random problem with 300 to 1,500 rows and 3 to 8 columns."""
        rng = np.random.default_rng(seed)
        rows, inputs = int(rng.integers(300, 1501)), int(rng.integers(3, 9))
        return cls.make(rows, inputs, seed, rng.uniform(0.15, 0.6), rng.uniform(0.3, 2.0))

    @classmethod
    def make(
        cls,
        rows: int = 1280,
        inputs: int = 5,
        seed: int = 0,
        mixing_std: float = 0.15,
        noise_std: float = 1.0,
    ) -> "Problem":
        rng = np.random.default_rng(seed)
        mixing = np.eye(inputs) + mixing_std * rng.normal(size=(inputs, inputs))
        x = rng.normal(size=(rows + 60, inputs)) @ mixing
        y = x @ rng.normal(size=inputs) + noise_std * rng.normal(size=rows + 60)
        all_rows = Rows(x.astype(np.float32), y.astype(np.float32))
        parts = [all_rows.take(np.arange(rows + 15 * i, rows + 15 * (i + 1))) for i in range(4)]
        return cls(Splits(all_rows.take(np.arange(rows)), *parts), inputs)


def recipe(
    method: str,
    initial_log_std: float | None,
    seed: int = 0,
    training: Mapping[str, Any] | None = None,
    **posterior: Any,
) -> Recipe:
    """Create a recipe with default settings, except for initial scale and schedule.

    An empty `training` keeps the default schedule.
    """
    if initial_log_std is not None:
        posterior["initial_log_std"] = initial_log_std
    factory = "summed" if method in ("bhn-realnvp", "bhn-iaf") else "linear"
    content = {
        "name": "linear",
        "method": method,
        "task": "regression",
        "seed": seed,
        "data": {"source": "digits", "validation": 1, "reference": 1, "ranking": 1},
        "network": {"factory": f"{__name__}:{factory}"},
        "posterior": posterior,
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
    served = model.likelihood(model.network(x, points[:, None]))
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
    theta = _draws(model, draws)
    return theta.mean(0), theta.var(0)


def _draws(model: BayesianModel, draws: int = 20_000) -> Float[Tensor, "K D"]:
    random = torch.Generator().manual_seed(1)
    eps = torch.randn(draws, model.posterior.noise_dimension, generator=random)
    return model.posterior(eps).double()


@torch.no_grad()
def compare(
    model: BayesianModel, problem: Problem
) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
    """Compare a fit with the best factorial Gaussian.

    Returns the variance ratios, and the errors of the means in standard deviations.
    """
    mean, precision = exact(model, problem)
    fitted_mean, fitted_variance = moments(model)
    best = 1.0 / precision.diagonal()
    return fitted_variance / best, (fitted_mean - mean) / best.sqrt()


@torch.no_grad()
def deviation_ratios(model: BayesianModel, problem: Problem) -> Float[Tensor, "N"]:
    """Compute the ratio of each test row's epistemic deviation to the optimal one.

    The optimal posterior is the best factorial Gaussian, or the exact posterior for flows.
    """
    _, precision = exact(model, problem)
    is_flow = isinstance(model.posterior, HypernetworkPosterior)
    best = torch.linalg.inv(precision) if is_flow else torch.diag(1.0 / precision.diagonal())
    x, size = torch.from_numpy(problem.splits.test.x), model.posterior.theta_dimension
    points = torch.cat([torch.zeros(1, size), torch.eye(size)])
    means = model.likelihood(model.network(x, points[:, None]))[..., 0].double()
    design = (means[1:] - means[0]).T
    theta = _draws(model)
    return (theta @ design.T).std(0) / (design @ best * design).sum(1).sqrt()


def measure(method: str, seed: int, runs: Path) -> Measured:
    problem = Problem.random(FIRST_PROBLEM + seed // SEEDS)
    equal_parts = {"std_1": 1.0, "std_2": 1.0} if method == "bbb-mixture" else {}
    settings = recipe(method, None, seed % SEEDS, training={}, **equal_parts)
    model, run = fit(problem, settings, runs / f"{method}-{seed}")
    ratios = deviation_ratios(model, problem)
    facts = run_provenance(run, problem.splits).convergence
    assert facts is not None
    run.checkpoint.unlink(missing_ok=True)
    low, median, high = torch.quantile(ratios, torch.tensor([0.0, 0.5, 1.0]).double()).tolist()
    return Measured(
        {
            "low": low,
            "median": median,
            "high": high,
            "near": float(abs(median - 1.0) <= TOLERANCE),
            "warned": float(change_warning(facts) is not None),
            "change": 100.0 * facts["uncertainty_change"]["median"],
        },
        "made",
    )


def _conclude(results: Results) -> str:
    fits = [cell.measured.values for cells in results.values() for cell in cells]
    limits = 1.0 - TOLERANCE, 1.0 + TOLERANCE
    outside = [fit for fit in fits if fit["low"] < limits[0] or fit["high"] > limits[1]]
    return (
        f"In {len(outside)} of {len(fits)} fits, at least one row is off by more than "
        f"{100 * TOLERANCE:g} %; {sum(fit['warned'] for fit in outside):.0f} of them warned."
    )


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


EXACT = Target(
    name="exact",
    title="Uncertainty of linear regressions compared with the exact one",
    protocol=(
        f"Each method is fitted with its defaults to {PROBLEMS} random problems of 300 to 1,500 "
        f"rows and 3 to 8 correlated columns, with {SEEDS} seeds each. The ratio is between a test "
        "row's epistemic deviation and that of the best posterior of the family: a factorial "
        "Gaussian, or for `bhn-*` the exact posterior. Columns contain the smallest and largest "
        "value of all fits."
    ),
    rows={method: partial(measure, method) for method in METHODS},
    columns={
        "median": Column("median row", summary=_range),
        "low": Column("lowest row", summary=_range),
        "high": Column("highest row", summary=_range),
        "near": Column(f"median within {100 * TOLERANCE:g} %", summary=count),
        "change": Column("reported change, %", summary=_range),
        "warned": Column("fits with a warning", summary=count),
    },
    conclude=_conclude,
    remarks="Both parts of the mixture prior are equal, so that the best posterior is known.",
    seeds=PROBLEMS * SEEDS,
    revision=2,
)

TARGETS = (EXACT,)
