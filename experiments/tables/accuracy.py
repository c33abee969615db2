"""Accuracy on MNIST and CIFAR-10.

Table 1 of Krueger et al. 2017, and Table 1 of Blundell et al. 2015.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cells import Column, Measured, Target
from experiments.measures import load_recipe, measure_fit
from training.data import load
from training.data.rows import Dataset
from training.folders import data_root
from training.recipe import Recipe

COLUMNS = {"accuracy": Column("accuracy, %"), "log_likelihood": Column("log-likelihood", 4)}
HELD_OUT = {"validation": 8000, "reference": 1000, "ranking": 1000}
TRAIN_ROWS = 60_000 - sum(HELD_OUT.values())
FEW, FEW_HELD_OUT = 5000, {"validation": 1000, "reference": 500, "ranking": 500}
FEW_EPOCHS = 100
FEW_REMARKS = "Unlike the paper's, our fits without couplings are as good as the fits with 12."


def make_recipe(base: str, seed: int, **changes: Any) -> Recipe:
    """Make an MNIST recipe. Several tables share its fit."""
    return load_recipe(
        base, seed, **{"data": HELD_OUT, "network": {"hidden": [800, 800]}, **changes}
    )


def flow(couplings: int) -> dict[str, Any]:
    return {"posterior": {"couplings": couplings}}


def _fit(recipe: str, changes: dict[str, Any], seed: int, runs: Path) -> Measured:
    return measure_fit(make_recipe(recipe, seed, **changes), runs)


def _fit_cifar(recipe: str, changes: dict[str, Any], seed: int, runs: Path) -> Measured:
    return measure_fit(load_recipe(recipe, seed, **changes), runs)


def _fit_few(recipe: str, changes: dict[str, Any], seed: int, runs: Path) -> Measured:
    few = load_recipe(recipe, seed, data=FEW_HELD_OUT, **changes)
    return measure_fit(few, runs, first_rows(few, FEW + sum(FEW_HELD_OUT.values())))


def first_rows(recipe: Recipe, rows: int) -> Dataset:
    data = _load(recipe.data.source)
    return replace(data, train=data.train.take(np.arange(rows)))


@cache
def _load(source: str) -> Dataset:
    recipe = load_recipe("mnist", 0, data={"source": source})
    return load(recipe, data_root())


TABLE_1 = Target(
    name="table-1",
    title="Accuracy on MNIST (Bayesian Hypernetworks, Table 1)",
    protocol=(
        "The network is 784-800-800-10, trained on 50,000 rows. `realnvp-N` has N couplings with "
        "200 hidden units each; `realnvp-0` is elementwise affine."
    ),
    rows={
        **{f"realnvp-{n}": partial(_fit, "mnist-bhn-realnvp", flow(n)) for n in (0, 2, 4, 6, 8)},
        "iaf": partial(_fit, "mnist-bhn-iaf", {}),
        "bbb": partial(_fit, "mnist-bbb-gaussian", {}),
        "dropout": partial(_fit, "mnist-dropout", {}),
        "mle": partial(_fit, "mnist-mle", {}),
    },
    columns=COLUMNS,
    papers={
        "realnvp-0": {"accuracy": 98.28},
        "realnvp-2": {"accuracy": 98.39},
        "realnvp-4": {"accuracy": 98.47},
        "realnvp-6": {"accuracy": 98.59},
        "realnvp-8": {"accuracy": 98.63},
        "bbb": {"accuracy": 98.01},
        "dropout": {"accuracy": 98.73},
    },
    kl_weights={"bbb": "0.001"},
    remarks=(
        "`realnvp-8` and `dropout` are below the paper's figures. For `realnvp-8`, a larger KL "
        "weight raised the validation likelihood, but not the accuracy."
    ),
)


def _few(units: int, couplings: tuple[int, ...]) -> dict[str, Any]:
    common: dict[str, Any] = {
        "network": {"hidden": [units, units]},
        "training": {"epochs": FEW_EPOCHS},
    }
    flows = {
        f"realnvp-{n}": partial(_fit_few, "mnist-bhn-realnvp", common | flow(n)) for n in couplings
    }
    return flows | {"dropout": partial(_fit_few, "mnist-dropout", common)}


def _few_target(units: int, papers: dict[str, float]) -> Target:
    flows = tuple(int(row.removeprefix("realnvp-")) for row in papers if row != "dropout")
    return Target(
        name=f"table-1-few-{units}",
        title=f"MNIST's first 5,000 rows, {units} units (Bayesian Hypernetworks, Table 1)",
        protocol=(f"The network is 784-{units}-{units}-10, trained for {FEW_EPOCHS} epochs."),
        rows=_few(units, flows),
        columns=COLUMNS,
        papers={row: {"accuracy": accuracy} for row, accuracy in papers.items()},
        seeds=5,
        remarks=FEW_REMARKS,
    )


FEW_A = _few_target(
    800, {"realnvp-0": 92.06, "realnvp-8": 94.25, "realnvp-12": 96.16, "dropout": 95.58}
)
FEW_B = _few_target(
    1200, {"realnvp-0": 90.91, "realnvp-8": 96.27, "realnvp-12": 96.51, "dropout": 95.52}
)

UNITS = (400, 800, 1200)
WIDE_UNITS = UNITS[:2]
ERRORS = {  # of the test rows, %
    "sgd": ("mnist-mle", (1.83, 1.84, 1.88)),
    "dropout": ("mnist-mle-dropout", (1.51, 1.33, 1.36)),
    "bbb-gaussian": ("mnist-bbb-gaussian", (1.82, 1.99, 2.04)),
    "bbb-mixture": ("mnist-bbb-mixture", (1.36, 1.34, 1.32)),
}

WIDE_SPIKE: dict[str, Any] = {  # narrow part of the prior, 8 times as wide as in the paper
    "posterior": {"initial_log_std": -4.0, "std_2": 0.02},
    "training": {"epochs": 60, "kl_weight": 2e-6},
}

ELBO: dict[str, Any] = {"training": {"epochs": 14, "kl_weight": None}}  # the paper's objective


def layers(units: int) -> dict[str, Any]:
    return {"network": {"hidden": [units, units]}}


WEIGHT_UNCERTAINTY = Target(
    name="weight-uncertainty",
    title="Accuracy on MNIST (Weight Uncertainty, Table 1)",
    protocol=(
        "Networks have two hidden layers of 400, 800 or 1,200 units. We use Adam instead of SGD, "
        "and 8 to 60 epochs instead of 600. The narrow part of the prior has a standard deviation "
        "of .0025 in `bbb-mixture`, the paper's widest, and of .02 in `bbb-mixture-wide`."
    ),
    rows={
        f"{method}-{units}": partial(_fit, recipe, layers(units))
        for method, (recipe, _) in ERRORS.items()
        for units in UNITS
    }
    | {
        f"bbb-mixture-wide-{units}": partial(_fit, "mnist-bbb-mixture", layers(units) | WIDE_SPIKE)
        for units in WIDE_UNITS
    }
    | {"bbb-gaussian-elbo-400": partial(_fit, "mnist-bbb-gaussian", layers(400) | ELBO)},
    columns=COLUMNS,
    papers={
        f"{method}-{units}": {"accuracy": round(100 - error, 2)}
        for method, (_, errors) in ERRORS.items()
        for units, error in zip(UNITS, errors, strict=True)
    }
    | {
        f"bbb-mixture-wide-{units}": {"accuracy": round(100 - error, 2)}
        for units, error in zip(WIDE_UNITS, ERRORS["bbb-mixture"][1], strict=False)
    }
    | {"bbb-gaussian-elbo-400": {"accuracy": round(100 - ERRORS["bbb-gaussian"][1][0], 2)}},
    kl_weights={
        **{f"bbb-gaussian-{units}": "0.001" for units in UNITS},
        **{f"bbb-mixture-{units}": "0.0015" for units in UNITS},
        **{f"bbb-mixture-wide-{units}": "0.1" for units in WIDE_UNITS},
    },
    remarks=(
        "With the paper's recipes, Bayes by Backprop is no better than the same network without "
        "it. [A wider spike](../convergence.md#mnist-the-width-of-the-spike) helps a little. [No "
        "mixture](../convergence.md#mnist-600-epochs-of-bayes-by-backprop) reaches the paper's "
        "1.34 %."
    ),
)

LONG_EPOCHS, LONG_UNITS = 600, 400
KL_WEIGHTS = {"full": None, "2e-6": 2e-6, "2e-7": 2e-7}


def _long(kl_weight: float | None) -> dict[str, Any]:
    training = {"epochs": LONG_EPOCHS, "kl_weight": kl_weight}
    return {**layers(LONG_UNITS), "training": training}


LONG = Target(
    name="weight-uncertainty-600",
    title=f"{LONG_EPOCHS} epochs of Bayes by Backprop on MNIST (Weight Uncertainty, Table 1)",
    protocol=(
        f"The networks of `weight-uncertainty` with {LONG_UNITS} units are trained for "
        f"{LONG_EPOCHS} epochs. A row's name contains the KL weight per training row; `full` is "
        "1 / 50,000."
    ),
    rows={
        f"{method}-{name}": partial(_fit, f"mnist-{method}", _long(weight))
        for method in ("bbb-gaussian", "bbb-mixture")
        for name, weight in KL_WEIGHTS.items()
    },
    columns=COLUMNS,
    papers={
        f"{method}-full": {"accuracy": round(100 - ERRORS[method][1][0], 2)}
        for method in ("bbb-gaussian", "bbb-mixture")
    },
    kl_weights={
        f"{method}-{name}": str(weight * TRAIN_ROWS)
        for method in ("bbb-gaussian", "bbb-mixture")
        for name, weight in KL_WEIGHTS.items()
        if weight
    },
    remarks=("[Figures of seed 0](../convergence.md#mnist-600-epochs-of-bayes-by-backprop)."),
)

CIFAR = Target(
    name="table-1-cifar",
    title="Accuracy on CIFAR-10 (Bayesian Hypernetworks, Table 1)",
    protocol=(
        "The network has four 3x3 convolutions and a dense layer of 512 units, and is trained for "
        "20 epochs."
    ),
    rows={
        **{f"realnvp-{n}": partial(_fit_cifar, "cifar10-bhn-realnvp", flow(n)) for n in (0, 4, 8)},
        "dropout": partial(_fit_cifar, "cifar10-dropout", {}),
        "mle": partial(_fit_cifar, "cifar10-mle", {}),
    },
    columns=COLUMNS,
    papers={
        "realnvp-0": {"accuracy": 67.83},
        "realnvp-4": {"accuracy": 74.77},
        "realnvp-8": {"accuracy": 74.90},
        "dropout": {"accuracy": 74.08},
        "mle": {"accuracy": 72.75},
    },
    remarks=(
        "All rows are above the paper's figures. Hypernetworks are not better than our dropout "
        "and maximum likelihood, which also select the checkpoint by validation rows."
    ),
)

TARGETS = (TABLE_1, FEW_A, FEW_B, WEIGHT_UNCERTAINTY, LONG, CIFAR)
