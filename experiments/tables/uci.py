"""Regression on the standard splits of the UCI data sets.

Li and Gal 2017, "Dropout inference in Bayesian neural networks with alpha-divergences".
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from experiments.cells import Column, Measured, Results, Target
from experiments.measures import load_recipe, measure_fit, measure_rows
from experiments.uci import load_uci
from training import recipe as recipes
from training.data.findings import inspect_source
from training.data.plan import make_plan
from training.fit import fit
from training.folders import data_root
from training.sections import DataSection

STEPS = 20_000  # mostly better than 5,000 on the validation rows of four sets
WIDE, WIDE_UNITS, UNITS = "protein-tertiary-structure", 100, 50
ALPHAS = (0.0, 0.5, 1.0)
# RMSE and log-likelihood of MC dropout: Gal and Ghahramani 2016, with 100 times the epochs and a
# grid search.
PUBLISHED = {
    "bostonHousing": (2.90, -2.40),
    "concrete": (4.82, -2.93),
    "energy": (0.54, -1.21),
    "kin8nm": (0.079, 1.14),
    "naval-propulsion-plant": (None, 4.45),
    "power-plant": (4.01, -2.80),
    "protein-tertiary-structure": (4.27, -2.87),
    "wine-quality-red": (0.62, -0.93),
    "yacht": (0.67, -1.25),
}


def _fit(name: str, alpha: float, split: int, runs: Path) -> Measured:
    """Fit a model on a split, after holding out some of the split's training rows.

    A tenth is used for validation, and a few rows are used for calibration.
    """
    rows = len((data_root() / "uci" / name / f"index_train_{split}.txt").read_text().split())
    calibration = {"reference": 10, "ranking": 19}
    train_rows = rows - rows // 10 - sum(calibration.values())
    recipe = load_recipe(
        "uci-concrete",
        0,
        name=f"{name}-alpha-{alpha:g}",
        data={"source": f"uci:uci/{name}/{split}", "validation": rows // 10} | calibration,
        network={"hidden": [WIDE_UNITS if name == WIDE else UNITS]},
        method="dropout-alpha",
        posterior={"rate": 0.05, "prior_std": 1.0},
        training={
            "epochs": max(1, round(STEPS / (train_rows // 32))),
            "batch_rows": 32,
            "kl_ramp_epochs": None,
            "alpha": alpha,
            "samples": 10,
        },
    )
    return measure_fit(recipe, runs, load_uci(recipe))


UCI = Target(
    name="uci",
    title="UCI regression (alpha-divergence dropout)",
    protocol=(
        f"Networks have one hidden layer of {UNITS} units ({WIDE_UNITS} for Protein) and "
        f"homoscedastic noise, and are trained for about {STEPS:,} steps of 32 rows. A seed is a "
        "standard split. Brackets show MC dropout (Gal and Ghahramani 2016), over 20 splits with a "
        "grid search and 100 times the epochs."
    ),
    rows={
        f"{name}-alpha-{alpha:g}": partial(_fit, name, alpha)
        for name in PUBLISHED
        for alpha in ALPHAS
    },
    columns={"log_likelihood": Column("log-likelihood", 3)},
    papers={
        f"{name}-alpha-0": {"log_likelihood": published}
        for name, (_, published) in PUBLISHED.items()
    },
    seeds=5,
)


def _fit_default(name: str, split: int, runs: Path) -> Measured:
    """Fit a model to a split's training rows, as `dubito fit --data` does."""
    source = {"source": f"uci:uci/{name}/{split}"}
    few = {"validation": 10, "reference": 10, "ranking": 19}
    train = load_uci(load_recipe("uci-concrete", 0, data=source | few)).train
    path = runs / f"{name}-{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = ",".join([*(f"x{i}" for i in range(train.x.shape[1])), "y"])
    table = np.column_stack([train.x, train.y])
    np.savetxt(path, table, "%.9g", ",", header=header, comments="")
    section = DataSection(source=f"csv:{path.name}", target="y")
    findings = inspect_source(section, runs, "regression")
    plan = make_plan(replace(findings, has_test=True), section, f"{name}-default", None)
    content = plan.recipe.model_dump(exclude_unset=True)
    content["data"] = {**content["data"], **source, "target": None}
    recipe = recipes.validate(content, name)
    result = fit(recipe, load_uci(recipe), runs=runs, quiet=True)
    values = measure_rows(result, result.data.test)
    # `moving` stays empty: defaults count, level or not
    return Measured(values, result.data.digest()[:16])


def _above(results: Results) -> str:
    measured = {
        name: [cell.measured.values for cell in cells] for name, cells in results.items() if cells
    }
    above = [
        name
        for name, seeds in measured.items()
        if np.mean([values["log_likelihood"] for values in seeds]) > PUBLISHED[name][1]
    ]
    return f"{len(above)} of {len(measured)} sets have a higher log-likelihood than in brackets."


DEFAULTS = Target(
    name="uci-defaults",
    title="UCI regression with default settings",
    protocol=(
        "The fits are those of `dubito fit --data` without a recipe: a batch ensemble with two "
        "hidden layers, encoded columns and heteroscedastic noise. A seed is a standard split. "
        "Brackets show MC dropout (Gal and Ghahramani 2016) over 20 splits, with another network: "
        "one hidden layer and homoscedastic noise.\n\nThe defaults were selected on rows of all "
        "sets except naval-propulsion-plant and protein-tertiary-structure, so only these two "
        "compare fairly."
    ),
    rows={name: partial(_fit_default, name) for name in PUBLISHED},
    columns={
        "rmse": Column("RMSE", 3),
        **UCI.columns,
    },
    papers={
        name: {
            key: value
            for key, value in zip(("rmse", "log_likelihood"), published, strict=True)
            if value is not None
        }
        for name, published in PUBLISHED.items()
    },
    seeds=5,
    conclude=_above,
)

TARGETS = (UCI, DEFAULTS)
