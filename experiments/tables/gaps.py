"""Predictions in gaps of UCI data sets.

Foong et al. 2019, "'In-between' uncertainty in Bayesian neural networks".
"""

from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64
from matplotlib.figure import Figure
from scipy import stats

from experiments.cells import Column, Measured, Results, Target, mean_and_spread
from experiments.certify import hamiltonian as hmc
from experiments.measures import measure_rows
from experiments.pages import column_values, panels
from experiments.uci import read_table, split_table
from training.data.rows import SplitSizes
from training.fit import fit
from training.folders import data_root

COLUMNS = {"yacht": 6, "energy": 8, "concrete": 8, "bostonHousing": 13, "wine-quality-red": 11}
METHODS = (
    "batch-ensemble",
    "anchored-ensemble",
    "gp-layer",
    "last-layer-hmc",
    "laplace",
    "bbb-gaussian",
    "bhn-realnvp",
    "dropout-alpha",
)
UNITS, STEPS, BATCH_ROWS = 50, 1500, 32
RANDOM_SPLITS = 3  # per data set


def gap_order(x: Float64[np.ndarray, "N I"], column: int) -> Int64[np.ndarray, "N"]:
    """Sort rows by a column, with the middle third last."""
    low, middle, high = np.array_split(np.argsort(x[:, column], kind="stable"), 3)
    return np.concatenate([low, high, middle])


def random_order(x: Float64[np.ndarray, "N I"], column: int) -> Int64[np.ndarray, "N"]:
    return np.random.default_rng(column).permutation(len(x))


ORDERS = {"gap": gap_order, "random": random_order}


def measure_split(name: str, method: str, kind: str, column: int, runs: Path) -> Measured:
    """Measure a fit on the first two thirds of the rows, tested on the last third."""
    x, y = read_table(data_root() / "uci" / name)
    train, test = np.split(ORDERS[kind](x, column), [len(x) - round(len(x) / 3)])
    train_rows = len(train) - sum(SplitSizes(None, None, None, column).rows(len(train)))
    epochs = max(1, round(STEPS / (train_rows / BATCH_ROWS)))
    recipe = hmc.compared_recipe(
        f"gaps-{name}",
        method,
        column,
        data={"source": f"uci:{name}/{kind}-{column}"},
        units=UNITS,
        training={"epochs": epochs, "batch_rows": BATCH_ROWS},
        ramp_epochs=epochs / 10,
        **hmc.REGRESSION,
    )
    result = fit(recipe, split_table(recipe, x, y, train, test), runs=runs, quiet=True)
    data, splits = result.data, result.splits
    values = measure_rows(result, data.test)
    constant = stats.norm(data.train.y.mean(), data.train.y.std()).logpdf(data.test.y).mean()
    held_out = np.concatenate([splits.reference.x, splits.ranking.x])
    inside, outside = (
        float(result.outputs(rows)[..., 0].std(axis=0).mean()) for rows in (data.test.x, held_out)
    )
    values |= {"gain": values["log_likelihood"] - float(constant), "ratio": inside / outside}
    result.discard_checkpoint()
    return Measured({f"{kind}_{key}": value for key, value in values.items()}, data.digest()[:16])


def measure(name: str, method: str, column: int, runs: Path) -> Measured:
    measured = measure_split(name, method, "gap", column, runs)
    if column < RANDOM_SPLITS:
        measured.values.update(measure_split(name, method, "random", column, runs).values)
    return measured  # `moving` stays empty, because the number of steps is fixed


def count_worse(gains: list[float]) -> str:
    return f"{sum(gain < 0 for gain in gains)} of {len(gains)}"


def _draw(target: Target, results: Results) -> Figure:
    """Plot the gain of each gap, and the mean gain of random splits."""
    figure, axes = panels(len(COLUMNS), 3, 13, 3.6)
    for axis, name in zip(axes, COLUMNS, strict=True):
        axis.axvline(0.0, color="0.5", linewidth=0.8)
        for i, method in enumerate(METHODS):
            cells = results.get(f"{name}-{method}", [])
            gains, random = (column_values(cells, f"{kind}_gain") for kind in ORDERS)
            if gains and random:
                mean, _ = mean_and_spread(random)
                axis.plot(gains, [i] * len(gains), "o", color="C0", alpha=0.6, label="one gap")
                axis.plot(mean, i, "k|", markersize=14, label="mean of random splits")
        axis.set_xscale("symlog", linthresh=1.0)
        axis.set_yticks(range(len(METHODS)), METHODS)
        axis.set(title=name, ylim=(len(METHODS) - 0.5, -0.5))
        axis.grid(axis="x", alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside right upper")
    figure.suptitle(target.title)
    figure.supxlabel("log-likelihood, minus that of a constant Gaussian (nats per row)")
    return figure


GAPS = Target(
    name="gaps",
    title="Predictions in gaps of UCI data sets",
    protocol=(
        "For each input column, rows are sorted by it, and the middle third is held out (Foong et "
        "al. 2019). A seed is a column; ± is the spread over columns. The first "
        f"{RANDOM_SPLITS} columns of a set also have a random split of the same size. Methods "
        f"have the settings of [gap](gap.md), with {UNITS} units and about {STEPS:,} steps of "
        f"{BATCH_ROWS} rows. Nothing was tuned.\n\n"
        "The third column counts gaps with a lower log-likelihood than a constant Gaussian with "
        "the mean and deviation of the training targets. The last column is the mean epistemic "
        "deviation in the gap, divided by that of held-out rows outside it."
    ),
    rows={
        f"{name}-{method}": partial(measure, name, method) for name in COLUMNS for method in METHODS
    },
    columns={
        "gap_log_likelihood": Column("log-likelihood, gap", 2),
        "random_log_likelihood": Column("log-likelihood, random", 2),
        "gap_gain": Column("worse than a constant", summary=count_worse),
        "gap_rmse": Column("RMSE, gap", 2),
        "random_rmse": Column("RMSE, random", 2),
        "gap_ratio": Column("deviation, gap / outside", 2),
    },
    draw=_draw,
    remarks=(
        "No method is reliable in gaps. Each column has one fit.\n\n"
        "* **Energy**: in the gaps of the first three columns, every method is worse than a "
        "constant, by 6 to 331 nats per row. In the other five, losses are small.\n"
        "* **Yacht**: `last-layer-hmc`, `laplace` and `bhn-realnvp` fail in two or three of six "
        "gaps. `batch-ensemble`, `anchored-ensemble` and `bbb-gaussian` never fail.\n"
        "* **Concrete**: the gaps are harmless. No method is worse than a constant, and the mean "
        "log-likelihood is only .03 to .19 nats per row lower than on random splits.\n"
        "* **Boston**: each method fails in 2 to 5 of 13 gaps. `bbb-gaussian` loses up to .3 nats "
        "per row, the ensembles up to 2.2 and `bhn-realnvp` up to 13.6.\n"
        "* **Wine**: the gaps are harmless, too. The mean log-likelihood is as high as on random "
        "splits, and no method is more uncertain in gaps than outside.\n"
        "* **Deviation**: `bbb-gaussian`, `bhn-realnvp` and `dropout-alpha` are hardly more "
        "uncertain in gaps than outside. `gp-layer` and the ensembles are, except for wine, but "
        "not enough for their larger errors. `bbb-gaussian` loses least because it also fits "
        "worst outside.\n"
        "* **Short fits**: random splits have lower likelihoods than "
        "[default fits](uci-defaults.md), which are longer and have more training rows."
    ),
    caption="Dots left of the line are worse than a constant prediction with constant noise.",
    seeds=max(COLUMNS.values()),
    row_seeds={f"{name}-{method}": COLUMNS[name] for name in COLUMNS for method in METHODS},
)

TARGETS = (GAPS,)
