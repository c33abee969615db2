"""Pruning by signal-to-noise ratio.

Table 2 and Figure 3 of Blundell et al. 2015, "Weight uncertainty in neural networks".
"""

import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float32
from matplotlib.figure import Figure

from experiments.cells import Column, Measured, Results, Target, mean_and_spread
from experiments.measures import make_measured
from experiments.pages import column_values
from experiments.tables.accuracy import WIDE_SPIKE, layers, make_recipe
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from training.fit import fit, publish
from training.publishing.derive import is_weight, prune_version, signal_to_noise
from training.versions import open_parent

ERRORS = {0: 1.24, 50: 1.24, 75: 1.24, 95: 1.29, 98: 1.39}  # by % of removed weights
EDGES = np.linspace(-80.0, 60.0, 141)  # dB
DECIBELS = "signal-to-noise ratio, dB"
UNITS = 1200
TIMED_REQUESTS = 7
FITS: dict[str, dict[str, Any]] = {  # shared with `weight-uncertainty`
    "": layers(UNITS),
    "wide-": layers(400) | WIDE_SPIKE,
}


def measure(changes: dict[str, Any], percent: int, seed: int, runs: Path) -> Measured:
    recipe = make_recipe("mnist-bbb-mixture", seed, **changes)
    result = fit(recipe, runs=runs, quiet=True)
    assert result.folder is not None
    store = ModelStore(result.folder / "models")  # shared by all rows
    if not store.versions(recipe.name):
        publish(replace(result, folder=None), store)  # without a folder, it keeps the checkpoint
    parent = open_parent(store, recipe.name, "model")
    model = parent.model()
    ratio = signal_to_noise(model)[is_weight(model)].double().numpy()
    manifest, facts = prune_version(store, parent, result.data, percent / 100, "pruned")
    parent_request_ms, request_ms = request_times_ms(
        [Model.load(store.open(m.name, m.version, NEEDED)) for m in (parent.manifest, manifest)],
        result.splits.test.x[:1].astype(np.float32),
    )
    quality = manifest.quality
    decibels = 20 * np.log10(ratio.clip(1e-9)).clip(EDGES[0], EDGES[-1])
    values = {
        "error": 100 * (1 - quality["test_accuracy"]),
        "log_likelihood": quality["test_log_likelihood"],
        "kept": 100 * facts.kept_weights / facts.weights,
        "bytes": 100 * facts.bytes / facts.parent_bytes,
        "time": 100 * request_ms / parent_request_ms,
        "density": np.histogram(decibels, EDGES, density=True)[0].round(6).tolist(),
    }
    return make_measured(result, values)


def request_times_ms(models: list[Model], row: Float32[np.ndarray, "1 I"]) -> list[float]:
    """Measure each model's median time for one row with new draws, in milliseconds."""
    times: list[list[float]] = [[] for _ in models]
    for seed in range(TIMED_REQUESTS + 1):
        for model, times_ms in zip(models, times, strict=True):
            runtime, draws = model.runtime, model.manifest.noise.default_draws
            start_s = time.perf_counter()
            runtime.run_set(row, runtime.draw_set(seed, draws))
            times_ms.append(1000 * (time.perf_counter() - start_s))
    return [round(statistics.median(times_ms[1:]), 3) for times_ms in times]


def _draw(target: Target, results: Results) -> Figure:
    """Plot the ratio's density and CDF, and the error against the pruned share."""
    figure, (density, cdf, error) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for color, kind in enumerate(FITS):
        by_percent = {p: results.get(f"{kind}{p}", []) for p in ERRORS}
        by_percent = {percent: cells for percent, cells in by_percent.items() if cells}
        if not by_percent:
            continue
        label = kind.removesuffix("-") or "the recipe"
        for cell in next(iter(by_percent.values())):
            heights = np.array(cell.measured.values["density"])
            density.stairs(heights, EDGES, color=f"C{color}", alpha=0.7)
            cdf.plot(EDGES[1:], np.cumsum(heights * np.diff(EDGES)), color=f"C{color}", alpha=0.7)
        errors = [mean_and_spread(column_values(cells, "error")) for cells in by_percent.values()]
        means, spreads = zip(*errors, strict=True)
        error.errorbar([*by_percent], means, yerr=spreads, fmt="o-", capsize=3, label=label)
    density.set(xlabel=DECIBELS, ylabel="density")
    cdf.set(xlabel=DECIBELS, ylabel="share of weights")
    error.plot([*ERRORS], [*ERRORS.values()], "x", color="k", markersize=8, label="the paper's")
    error.set(xlabel="weights removed, %", ylabel="test error, %", yscale="log")
    for axis in (density, cdf, error):
        axis.grid(alpha=0.3)
    error.legend()
    figure.suptitle(target.title)
    return figure


PRUNING = Target(
    name="pruning",
    title="Pruning by signal-to-noise ratio (Weight Uncertainty, Table 2, Figure 3)",
    protocol=(
        f"A `bbb-mixture` with two hidden layers of {UNITS:,} units is pruned. A row's name is the "
        "percentage of pruned weights, which have the lowest |mu| / sigma. The time "
        "of a one-row request is in % of the full model's. `wide-*` prunes `bbb-mixture-wide-400`."
    ),
    rows={
        f"{kind}{percent}": partial(measure, changes, percent)
        for kind, changes in FITS.items()
        for percent in ERRORS
    },
    columns={
        "error": Column("test error, %"),
        "kept": Column("remaining weights, %", 1),
        "time": Column("time, %", 0),
    },
    papers={
        f"{kind}{percent}": {"error": error} for kind in FITS for percent, error in ERRORS.items()
    },
    kl_weights={f"{p}": "0.0015" for p in ERRORS} | {f"wide-{p}": "0.1" for p in ERRORS},
    draw=_draw,
    caption="With the wider spike, the error stays low until 75 % of the weights are removed.",
    remarks=(
        "With the paper's narrow spike, nearly all weights matter. See also [the wider "
        "spike](../convergence.md#mnist-the-width-of-the-spike)."
    ),
    publishes=True,
)

TARGETS = (PRUNING,)
