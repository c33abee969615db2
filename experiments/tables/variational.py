"""Uncertainty of variational hypernetworks as a function of the KL weight.

Kristiadi, "Variational hypernetworks", section 4.
"""

from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from experiments.cells import Column, Measured, Results, Target
from experiments.measures import IdxOutliers, load_recipe, make_measured
from experiments.tables.detection import ROWS, draw_attacked, evaluated, read_fgsm
from model_store.scores.classification import Scores
from training.data.arrays import find_idx, read_idx
from training.data.rows import Rows
from training.fit import Fitted
from training.folders import data_root

WEIGHTS = ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5")  # of the KL: Kristiadi's lambda
BATCH_ROWS = 200
TRAIN_ROWS = 52_000
POINT = "point"  # the same network without a posterior
QUANTILES = np.linspace(0.0, 1.0, 101)
OTHER = "notmnist"


def measure(row: str, seed: int, runs: Path) -> Measured:
    base = "mnist-mle" if row == POINT else "mnist-variational-hypernet"
    training = {} if row == POINT else {"kl_weight": float(row) / BATCH_ROWS}
    recipe = load_recipe(base, seed, network={"hidden": [100]}, training=training)
    result, report = evaluated(recipe, runs, (IdxOutliers.named(OTHER),), attacks=True)
    images = read_idx(find_idx(data_root() / OTHER, "t10k-images-idx3-ubyte"), 3)
    values: dict[str, Any] = {
        "accuracy": 100 * report["test"]["accuracy"],
        "log_likelihood": report["test"]["log_likelihood"],
        "auroc": 100 * report["outliers"][OTHER]["scores"]["entropy"]["auroc"],
    }
    for name, x in {"test": result.data.test.x, OTHER: images.reshape(len(images), -1)}.items():
        entropies = compute_entropy(result, x[:ROWS])
        values[f"entropy_{name}"] = float(entropies.mean())
        values[f"quantiles_{name}"] = np.quantile(entropies, QUANTILES).round(4).tolist()
    values |= read_fgsm(report)
    return make_measured(result, values)


def compute_entropy(result: Fitted, x: np.ndarray) -> Float[np.ndarray, "N"]:
    scores, _ = result.score(Rows(x, np.zeros(len(x), dtype=np.int64)))
    assert isinstance(scores, Scores)
    return scores.entropy


def _draw(target: Target, results: Results) -> Figure:
    """Plot the entropy CDFs of the first seed, and accuracy and entropy under FGSM."""
    figure, (cdf, accuracy, entropy) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for i, (row, cells) in enumerate(results.items()):
        if not cells:
            continue
        first, color = cells[0].measured.values, f"C{i}"
        label = row if row == POINT else f"λ = {row}"
        cdf.plot(first["quantiles_test"], QUANTILES, "--", color=color)
        cdf.plot(first[f"quantiles_{OTHER}"], QUANTILES, color=color, label=label)
    draw_attacked(accuracy, entropy, results)
    cdf.set(xlabel="entropy, nats", ylabel="share of rows", title="MNIST (dashed) and notMNIST")
    cdf.grid(alpha=0.3)
    cdf.legend()
    figure.suptitle(target.title)
    return figure


VARIATIONAL = Target(
    name="variational-hypernet",
    title="Uncertainty by the KL weight (Variational Hypernetworks)",
    protocol=(
        "The network is 784-100-10, with a hypernetwork of 50 hidden units. Rows are KL weights, "
        f"and a network without a posterior. There are {ROWS:,} test rows and {ROWS:,} rows of "
        "notMNIST. FGSM uses the gradient of one draw."
    ),
    rows={row: partial(measure, row) for row in (POINT, *WEIGHTS)},
    columns={
        "accuracy": Column("accuracy, %"),
        "log_likelihood": Column("log-likelihood", 4),
        "entropy_test": Column("entropy of MNIST", 3),
        f"entropy_{OTHER}": Column("of notMNIST", 3),
        "auroc": Column("AUROC of entropy, %", 1),
        "attacked_accuracy_0.1": Column("accuracy under FGSM .1, %", 1),
        "attacked_entropy_0.1": Column("its entropy", 3),
    },
    kl_weights={row: f"{float(row) / BATCH_ROWS * TRAIN_ROWS:.3g}" for row in WEIGHTS},
    draw=_draw,
    caption="With a posterior, notMNIST and attacked rows have more entropy than MNIST.",
    publishes=True,
)

TARGETS = (VARIATIONAL,)
