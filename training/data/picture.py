"""A picture of data: each column's distribution, of each class or against the target."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from training.data.column_findings import ColumnFinding
from training.data.findings import Findings

MOST_COLUMNS = 24
MOST_CLASSES = 6  # that are drawn apart
MOST_POINTS = 2_000
BINS = 30
BARS = 12


def draw(found: Findings, path: Path) -> None:
    """Draw the target and the first columns, as a PNG."""
    plt.switch_backend("Agg")
    columns = found.used[:MOST_COLUMNS]
    across = min(4, len(columns) + 1)
    down = -(-(len(columns) + 1) // across)
    figure, axes = plt.subplots(
        down, across, figsize=(4.2 * across, 2.9 * down), layout="constrained", squeeze=False
    )
    places = list(axes.flat)
    _draw_target(places[0], found)
    for axis, column in zip(places[1:], columns, strict=False):
        _draw_column(axis, column, found)
    for axis in places[len(columns) + 1 :]:
        axis.axis("off")
    more = (
        f"; the first {MOST_COLUMNS} of {len(found.used)} columns"
        if len(found.used) > MOST_COLUMNS
        else ""
    )
    figure.suptitle(f"{found.source}: {found.rows} rows{more}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_target(axis: Axes, found: Findings) -> None:
    if found.classes:
        _bars(axis, dict(list(found.classes.items())[:BARS]), None)
        axis.set_title(f"{found.target or 'class'} (target)", fontsize=10)
    elif found.targets is not None:
        axis.hist(found.targets[np.isfinite(found.targets)], bins=BINS, color="0.4")
        axis.set_title(f"{found.target or 'y'} (target)", fontsize=10)
        axis.set_ylabel("rows")
    else:
        axis.axis("off")


def _draw_column(axis: Axes, column: ColumnFinding, found: Findings) -> None:
    missing = f", {100 * column.missing:.2g} % missing" if column.missing else ""
    axis.set_title(f"{column.name[:30]} ({column.kind}{missing})", fontsize=10)
    if isinstance(column.values, list):
        counts: dict[str, int] = {}
        for value in column.values:
            if value is not None:
                counts[value] = counts.get(value, 0) + 1
        frequent = sorted(counts, key=lambda value: -counts[value])[:BARS]
        _bars(axis, {value: counts[value] for value in frequent}, len(counts))
        return
    values = np.asarray(column.values, dtype=np.float64)
    is_there = np.isfinite(values)
    if column.kind == "time":
        values = 1970 + values / (365.2425 * 86_400)
        axis.set_xlabel("year")
    if found.targets is not None and len(found.targets) == len(values):
        order = np.random.default_rng(0).permutation(np.flatnonzero(is_there))[:MOST_POINTS]
        axis.plot(values[order], found.targets[order], ".", markersize=2, color="C0")
        axis.set_ylabel(found.target or "y")
        return
    low, high = np.quantile(values[is_there], [0.005, 0.995]) if is_there.any() else (0.0, 1.0)
    bins = np.linspace(low, high if high > low else low + 1.0, BINS + 1).tolist()
    labels = list(found.classes)[:MOST_CLASSES]
    if (
        found.labels is not None
        and len(found.labels) == len(values)
        and len(found.classes) <= MOST_CLASSES
    ):
        of = np.array(found.labels)
        for label in labels:
            axis.hist(
                values[is_there & (of == label)],
                bins=bins,
                histtype="step",
                density=True,
                label=label[:15],
            )
        axis.legend(fontsize=7)
        axis.set_ylabel("density")
    else:
        axis.hist(values[is_there], bins=bins, color="0.4")
        axis.set_ylabel("rows")


def _bars(axis: Axes, counts: dict[str, int], distinct: int | None) -> None:
    axis.barh([name[:20] for name in counts][::-1], list(counts.values())[::-1], color="0.4")
    axis.tick_params(axis="y", labelsize=7)
    if distinct is not None and distinct > len(counts):
        axis.set_xlabel(f"rows; the {len(counts)} most frequent of {distinct}")
    else:
        axis.set_xlabel("rows")
