"""Alpha-divergence dropout on MNIST: accuracy, attacks and training time.

Li and Gal 2017, "Dropout inference in Bayesian neural networks with alpha-divergences", sections
5.2, 5.3 and the appendix.
"""

import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.cells import Column, Measured, Results, Target
from experiments.measures import load_recipe, make_measured, measure_fit
from experiments.tables.accuracy import COLUMNS
from experiments.tables.detection import draw_attacked, evaluated, read_fgsm
from training.fit import fit
from training.recipe import Recipe

ALPHAS = (0.0, 0.5, 1.0)
POINT = "mlp"  # the same network without dropout
SMALL, WIDE = (100, 100), (1000, 1000, 1000)
CNN = "gal-cnn-without-dropout"
CNN_DENSE = ["6", "8"]  # its Linear layers
NUMBERS_OF_DRAWS = (1, 2, 5, 10, 20, 50)
TIMED_EPOCHS = 3
ROWS = {POINT: POINT, **{f"alpha-{alpha:g}": alpha for alpha in ALPHAS}}


def measure(units: tuple[int, ...], row: str, seed: int, runs: Path) -> Measured:
    recipe = _recipe(row, seed, {"hidden": list(units)})
    result, report = evaluated(recipe, runs, (), attacks=True)
    values: dict[str, Any] = {
        "accuracy": 100 * report["test"]["accuracy"],
        "log_likelihood": report["test"]["log_likelihood"],
        **read_fgsm(report),
    }
    return make_measured(result, values)


def measure_cnn(row: str, seed: int, runs: Path) -> Measured:
    network: dict[str, Any] = {"hidden": None, "kind": CNN}
    if row == POINT:
        return measure_fit(_recipe(row, seed, network), runs)
    network["bayesian"] = CNN_DENSE
    return measure_fit(_recipe(row, seed, network, {"input_rate": 0.5}), runs)


def _recipe(
    row: str, seed: int, network: dict[str, Any], posterior: dict[str, Any] | None = None
) -> Recipe:
    if row == POINT:
        return load_recipe("mnist-mle", seed, network=network)
    return load_recipe(
        "mnist-dropout-alpha",
        seed,
        network=network,
        posterior=posterior or {},
        training={"alpha": ROWS[row]},
    )


def measure_time(draws: int, seed: int, _: Path) -> Measured:
    """Measure the median CPU time per epoch, excluding the first epoch."""
    recipe = load_recipe(
        "mnist-dropout-alpha", seed, training={"samples": draws, "epochs": TIMED_EPOCHS}
    )
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        result = fit(
            recipe, runs=runs, quiet=True, callback=lambda _: ends.append(time.process_time())
        )
        seconds = [end - begin for begin, end in pairwise(ends)]
        values = {"seconds": statistics.median(seconds)}
        return Measured(values, result.data.digest()[:16])  # `moving` stays empty: only time counts


def _draw(target: Target, results: Results) -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    accuracy, entropy = axes
    draw_attacked(accuracy, entropy, results)
    accuracy.legend()
    figure.suptitle(target.title)
    return figure


def _target(name: str, units: tuple[int, ...], where: str) -> Target:
    shape = "-".join(map(str, units))
    return Target(
        name=name,
        title=f"Dropout by alpha on MNIST, {where} (alpha-divergence dropout)",
        protocol=(
            f"The network is 784-{shape}-10 with dropout .5 and 10 masks per step, or without "
            "dropout (`mlp`). FGSM uses the gradient of one draw. Entropy is the mean "
            "over attacked rows."
        ),
        rows={row: partial(measure, units, row) for row in ROWS},
        columns={
            "accuracy": Column("accuracy, %"),
            "log_likelihood": Column("log-likelihood", 4),
            "attacked_accuracy_0.1": Column("accuracy under FGSM .1, %", 1),
            "attacked_entropy_0.1": Column("its entropy", 3),
        },
        draw=_draw,
        caption="With dropout, accuracy falls more slowly under attack and entropy rises.",
        publishes=True,
    )


ALPHA = _target("alpha-mnist", SMALL, "two layers of 100 units")
ALPHA_WIDE = _target("alpha-mnist-wide", WIDE, "three layers of 1,000 units")
ALPHA_DRAWS = Target(
    name="alpha-draws",
    title="Training time by the number of masks (alpha-divergence dropout)",
    protocol=(
        "A row's name is the number of masks per step of a 784-100-100-10 network, with alpha .5 "
        "on one core."
    ),
    rows={f"{draws}": partial(measure_time, draws) for draws in NUMBERS_OF_DRAWS},
    columns={"seconds": Column("seconds per epoch")},
)

ALPHA_CNN = Target(
    name="alpha-cnn",
    title="Dropout by alpha on MNIST, a convolutional network (alpha-divergence dropout)",
    protocol=(
        "The network has two 4x4 convolutions of 32 filters, a dense layer of 128 units, and "
        "dropout .5 before both dense layers."
    ),
    rows={"no-dropout" if row == POINT else row: partial(measure_cnn, row) for row in ROWS},
    columns=COLUMNS,
    remarks=("In the paper, alpha 0 is better than 1 and equal to .5 by both measures."),
)

TARGETS = (ALPHA, ALPHA_DRAWS, ALPHA_WIDE, ALPHA_CNN)
