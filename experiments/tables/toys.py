"""Regression on one input: posteriors between and beyond the training rows."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from matplotlib.figure import Figure

from experiments.cells import Column, Measured, Results, Target
from experiments.measures import make_measured
from experiments.pages import first_seeds, panels
from training import recipe as recipes
from training.data.rows import Dataset, Rows
from training.fit import fit
from training.recipe import Recipe

QUARTILES = (25, 50, 75)
HELD_OUT = {"validation": 18, "reference": 1, "ranking": 1}  # no calibration here
GRID = 121
SINES_ROWS, SINES_UNITS = 200, 100
MAX_EPOCHS = 6000
CUBIC_ROWS, CUBIC_EPOCHS = 20, 30_000  # an epoch is one step
TEMPERED = "bbb-gaussian", "bhn-scales", "bhn-weights", "variational-hypernet"
METHODS: dict[str, dict[str, Any]] = {
    "mle": {"method": "mle", "posterior": {}},
    "dropout-alpha": {"method": "dropout-alpha", "posterior": {"rate": 0.1}},
    "bbb-gaussian": {"method": "bbb-gaussian", "posterior": {"initial_log_std": -3.0}},
    "bhn-scales": {"method": "bhn-realnvp", "posterior": {"hidden": 50, "initial_log_std": -3.0}},
    "bhn-weights": {
        "method": "bhn-weights",
        "posterior": {"hidden": 50, "initial_log_std": -3.0},
        "network": {"hidden": [20]},
    },
    "variational-hypernet": {"method": "variational-hypernet", "posterior": {"hidden": 10}},
    "laplace": {"method": "laplace", "posterior": {}},
    "ensemble": {"method": "ensemble", "posterior": {"members": 10}},
}

Draw = Callable[
    [np.random.Generator, int], tuple[Float64[np.ndarray, "N"], Float64[np.ndarray, "N"]]
]


def draw_sines(generator: np.random.Generator, rows: int) -> tuple[Any, Any]:
    """Draw noisy sums of sines for x in [0, 0.5].

    y = x + 0.3 sin(2 pi (x + e)) + 0.3 sin(4 pi (x + e)) + e.

    Blundell et al. 2015, section 5.2.
    """
    x, e = generator.uniform(0.0, 0.5, rows), generator.normal(0.0, 0.02, rows)
    turns = 2 * np.pi * (x + e)
    return x, x + 0.3 * np.sin(turns) + 0.3 * np.sin(2 * turns) + e


def draw_cubic(generator: np.random.Generator, rows: int) -> tuple[Any, Any]:
    """Draw noisy cubes y = x^3 + e, e ~ N(0, 9), for x in [-4, 4].

    Hernandez-Lobato and Adams 2015.
    """
    x = generator.uniform(-4.0, 4.0, rows)
    return x, x**3 + generator.normal(0.0, 3.0, rows)


def dataset(draw: Draw, rows: int, seed: int) -> Dataset:
    generator = np.random.default_rng(seed)
    parts = [draw(generator, n) for n in (rows + sum(HELD_OUT.values()), 500)]
    train, test = (Rows(x[:, None].astype(np.float32), y.astype(np.float32)) for x, y in parts)
    return Dataset(train, test, (1,), (), float(train.x.min()), float(train.x.max()))


def make_recipe(
    method: str,
    units: int,
    seed: int,
    epochs: int = MAX_EPOCHS,
    kl_weight: float | None = None,
) -> Recipe:
    content: dict[str, Any] = {
        "name": f"toy-{method}",
        "task": "regression",
        "seed": seed,
        "data": {"source": "npz:toy.npz", **HELD_OUT},
        "network": {"hidden": [units]},
        "likelihood": {"noise": "homoscedastic"},
        "training": {
            "max_epochs": epochs,
            "patience": 400,
            "batch_rows": 50,
            "learning_rate": 5e-3,
        },
        "serving": {"draws": 200},
        **METHODS[method],
    }
    if kl_weight is not None:
        content["training"]["kl_weight"] = kl_weight  # to fit few rows
    return recipes.validate(content, "toys")


def measure(
    draw: Draw,
    rows: int,
    units: int,
    ends: tuple[float, float],
    epochs: int,
    method: str,
    kl_weight: float | None,
    seed: int,
    runs: Path,
) -> Measured:
    data = dataset(draw, rows, seed)
    recipe = make_recipe(method, units, seed, epochs, kl_weight)
    result = fit(recipe, data, runs=runs, quiet=True)
    grid = np.linspace(*ends, GRID)
    means = result.outputs(grid[:, None].astype(np.float32))[..., 0].astype(np.float64)
    low, median, high = np.percentile(means, QUARTILES, axis=0)
    inside = (grid >= data.minimum) & (grid <= data.maximum)
    spread = means.std(axis=0)
    values = {
        "log_likelihood": float(result.log_likelihood(data.test).mean()),
        "ratio": float(spread[~inside].mean() / max(spread[inside].mean(), 1e-9)),
        "curves": [curve.round(4).tolist() for curve in (grid, low, median, high)],
        "rows": [data.train.x[:rows, 0].tolist(), data.train.y[:rows].tolist()],
    }
    return make_measured(result, values)


def _draw(target: Target, results: Results) -> Figure:
    """Plot the first seed's median and interquartile range over draws, by method."""
    measured = first_seeds(results)
    across = min(4, len(measured))
    figure, axes = panels(len(measured), across, max(8, 3.2 * across), 2.8, margin=0.5)
    for axis, (row, values) in zip(axes, measured.items(), strict=True):
        grid, low, median, high = values["curves"]
        x, y = values["rows"]
        axis.plot(x, y, ".", color="0.6", markersize=3, label="training row")
        axis.fill_between(grid, low, high, color="C0", alpha=0.3, linewidth=0, label="quartiles")
        axis.plot(grid, median, color="C0", label="median")
        margin = max(y) - min(y)
        axis.set(title=row, ylim=(min(y) - margin, max(y) + margin))
    axes[0].legend(fontsize="small")
    figure.suptitle(target.title)
    figure.supxlabel("x")
    figure.supylabel("mean of y over draws")
    return figure


def _target(
    name: str,
    title: str,
    draw: Draw,
    rows: int,
    units: int,
    ends: tuple[float, float],
    epochs: int = MAX_EPOCHS,
    tempered: Sequence[str] = (),
    protocol: str = "",
    remarks: str = "",
) -> Target:
    settings: dict[str, tuple[str, float | None]] = {method: (method, None) for method in METHODS}
    settings |= {f"{method} .1": (method, 0.1 / rows) for method in tempered}
    return Target(
        name=name,
        title=title,
        protocol=(
            f"Networks have one hidden layer of {units} units (20 for `bhn-weights`), and are "
            f"trained on {rows} rows for up to {epochs:,} epochs. The ratio is the mean standard "
            f"deviation of the draws' means off the data, divided by that on the data.{protocol}"
        ),
        rows={
            row: partial(measure, draw, rows, units, ends, epochs, *setting)
            for row, setting in settings.items()
        },
        columns={
            "log_likelihood": Column("log-likelihood", 3),
            "ratio": Column("ratio off / on the data", 1),
        },
        kl_weights={f"{method} .1": "0.1" for method in tempered},
        draw=_draw,
        caption="The band should widen where there are no training rows.",
        remarks=remarks,
    )


SINES = _target(
    "toy-sines",
    "A regression with quartiles (Weight Uncertainty, Figure 5; Bayesian Hypernetworks, Figure 1)",
    draw_sines,
    SINES_ROWS,
    SINES_UNITS,
    (-0.4, 1.0),
)
CUBIC = _target(
    "toy-cubic",
    "A cubic regression (Variational Hypernetworks)",
    draw_cubic,
    CUBIC_ROWS,
    100,
    (-6.0, 6.0),
    CUBIC_EPOCHS,
    tempered=TEMPERED,
    protocol=(" `.1` rows use a tenth of the KL weight, the only setting that the paper tuned."),
    remarks=(
        "At the full weight, `variational-hypernet` predicts a constant. With a tenth, its mean "
        "follows the cubic as in the paper, but its held-out likelihood is the lowest."
    ),
)
TARGETS = (SINES, CUBIC)
