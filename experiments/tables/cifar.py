"""Accuracy on CIFAR-10: Table 1 of Krueger et al. 2017."""

from functools import partial
from pathlib import Path
from typing import Any

from experiments.cells import Measured, Target
from experiments.measures import measure_fit, recipe_with
from experiments.pages import draw_columns
from experiments.tables.mnist import COLUMNS, flow


def _fit(recipe: str, changes: dict[str, Any], seed: int, runs: Path) -> Measured:
    return measure_fit(recipe_with(recipe, seed, **changes), runs)


TARGETS = (
    Target(
        name="table-1-cifar",
        title="Accuracy on CIFAR-10 (Bayesian Hypernetworks, Table 1)",
        protocol=(
            "Four 3x3 convolutions of 64, 64, 128 and 128 channels, a dense layer of 512, batches "
            "of 128, 20 epochs of Adam, one draw a step; 46,000 rows train, 2,000 choose the "
            "checkpoint; 100 draws of 10,000 test rows. It needs a GPU, or days."
        ),
        rows={
            **{f"realnvp-{n}": partial(_fit, "cifar10-bhn-realnvp", flow(n)) for n in (0, 4, 8)},
            "dropout": partial(_fit, "cifar10-dropout", {}),
            "mle": partial(_fit, "cifar10-mle", {}),
        },
        columns=COLUMNS,
        papers={
            "realnvp-0": {"accuracy": 67.83},
            "realnvp-4": {"accuracy": 74.77},
            "realnvp-8": {"accuracy": 74.90},
            "dropout": {"accuracy": 74.08},
            "mle": {"accuracy": 72.75},
        },
        draw=draw_columns,
        remarks=(
            "Rows are above the paper's; hypernetworks are not ahead of our own dropout and "
            "maximum likelihood, whose checkpoints validation rows choose too."
        ),
    ),
)
