"""Pages and pictures for all targets, with an index."""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.cells import MIN_SEEDS, Cell, Column, Results, Target, mean_and_spread

NONE = "–"
OLDER = "†"
TEMPERATURE = "‡"
OTHERS = "Other comparisons"
HEADER = f"""\
# The papers' tables and figures

`make reproduce` measures the missing cells and writes these pages. A cell is one seed of one row.
`table-1-cifar`, `alpha-cnn`, `alpha-mnist-wide` and `weight-uncertainty-600` need a GPU.

Tables show the mean±standard deviation over seeds, with the paper's figure in brackets. A row has
{MIN_SEEDS} seeds unless its page says otherwise. It has figures if the validation curves of at
least {MIN_SEEDS} seeds, and of more than half of the seeds, have levelled off. The
[findings](FINDINGS) test each claim.
"""


def write_pages(targets: Sequence[Target], out: Path, findings: Path) -> None:
    plt.switch_backend("Agg")
    out.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for target in sorted(targets, key=paper_order):
        results = target.results(out)
        measured = sum(map(len, results.values()))
        path = out / f"{target.name}.md"
        valid = {row: cells if counts(cells) else [] for row, cells in results.items() if cells}
        num_valid = sum(map(bool, valid.values()))
        picture = out / f"{target.name}.png"
        if num_valid:
            if target.draw:
                figure = target.draw(target, valid)
                figure.savefig(picture, dpi=100)
                plt.close(figure)
            path.write_text(page(target, results, link_to(picture, path.parent)))
        name = f"[{target.name}]({link_to(path, out)})" if num_valid else target.name
        cells = target.num_cells
        progress = "" if measured == cells else f" ({measured} of {cells} cells)"
        title, paper = split_title(target)
        group, _, place = paper.partition(", ")
        if f"## {group or OTHERS}" not in lines:
            lines += ["", f"## {group or OTHERS}", ""]
        lines.append(f"- {name}: {title}{place and f', {place}'}{progress}")
    header = HEADER.replace("FINDINGS", link_to(findings, out))
    (out / "README.md").write_text(header + "\n".join(lines) + "\n")


def paper_order(target: Target) -> tuple[bool, str]:
    """Return a sort key that groups targets by the paper named in their title."""
    _, paper = split_title(target)
    return not paper, paper.lower()


def split_title(target: Target) -> tuple[str, str]:
    """Split a target's title into its text and the paper named in brackets."""
    title, _, paper = target.title.removesuffix(")").partition(" (")
    return title, paper


def link_to(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def page(target: Target, results: Results, picture: str) -> str:
    header = ["", *(column.title for column in target.columns.values())]
    lines = [
        f"# {target.title}",
        "",
        f"{target.protocol}{describe_seeds(results)}",
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(row_line(target, row, cells) for row, cells in results.items() if cells),
        "",
        *([target.conclude(results), ""] if target.conclude else []),
        *notes(target, results),
        *([target.remarks, ""] if target.remarks else []),
    ]
    if target.draw:
        lines += [f"![Plot]({picture})", "", target.caption]
    return "\n".join(lines) + "\n"


def describe_seeds(results: Results) -> str:
    counts = {len(cells) for cells in results.values() if cells}
    low, high = min(counts), max(counts)
    if low == high:
        return "" if low == MIN_SEEDS else f" Each row has {low} seeds."
    return f" Rows have {low} to {high} seeds."


def row_line(target: Target, row: str, cells: list[Cell]) -> str:
    label = f"{row} {OLDER}" if is_older(target, cells) else row
    weight = target.kl_weights.get(row)
    columns = [f"{label} {TEMPERATURE} {weight}" if weight else label]
    for key, column in target.columns.items():
        values = column_values(cells, key)
        text = NONE
        if counts(cells) and values:
            text = "not finite"
            if all(map(math.isfinite, values)):
                text = summary(column, values)
        paper = target.papers.get(row, {}).get(key)
        columns.append(text if paper is None else f"{text} ({paper})")
    return f"| {' | '.join(columns)} |"


def summary(column: Column, values: list[float]) -> str:
    if column.summary is not None:
        return column.summary(values)
    mean, spread = mean_and_spread(values)
    return f"{mean:.{column.digits}f}±{spread:.{column.digits}f}"


def count(values: list[float]) -> str:
    return f"{sum(values):.0f} of {len(values)}"


def counts(cells: list[Cell]) -> bool:
    """Check whether enough seeds have level curves for the result to count."""
    level = sum(not cell.measured.moving for cell in cells)
    return level >= MIN_SEEDS and 2 * level > len(cells)


def is_older(target: Target, cells: list[Cell]) -> bool:
    return any(cell.revision != target.revision for cell in cells)


def column_values(cells: list[Cell], key: str) -> list[float]:
    return [cell.measured.values[key] for cell in cells if key in cell.measured.values]


def notes(target: Target, results: Results) -> list[str]:
    """List the reasons for empty rows, and remarks on revisions and temperatures."""
    lines = []
    not_run = [f"`{row}`" for row, cells in results.items() if not cells]
    if not_run:
        lines.append(f"* Not run: {', '.join(not_run)}.")
    moving: dict[str, list[str]] = defaultdict(list)
    for row, cells in results.items():
        curves = Counter(curve for cell in cells for curve in cell.measured.moving)
        if not counts(cells):
            for curve, n in curves.items():
                moving[curve].append(f"`{row}` ({n} of {len(cells)})")
        if not curves and 0 < len(cells) < MIN_SEEDS:
            lines.append(f"* `{row}`: {len(cells)} of {MIN_SEEDS} seeds.")
    for curve, rows in sorted(moving.items()):
        lines.append(f"* In some seeds, {curve}: {', '.join(rows)}.")
    if any(is_older(target, cells) for cells in results.values()):
        lines.append(f"* {OLDER} measured by an earlier revision; `--again` repeats it.")
    if any(results[row] for row in target.kl_weights):
        lines.append(f"* {TEMPERATURE} temperature: the weight of the KL relative to the ELBO's.")
    return [*lines, ""] if lines else []


def first_seeds(results: Results) -> dict[str, dict[str, Any]]:
    return {row: cells[0].measured.values for row, cells in results.items() if cells}


def set_bars(
    titles: Mapping[str, str], sets: Sequence[str], label: str, target: Target, results: Results
) -> Figure:
    """Plot the value `KEY_SET` of each data set as bars, with a panel for each key in `titles`."""
    figure, axes = plt.subplots(
        1, len(titles), figsize=(11, 3.6), sharey=True, layout="constrained"
    )
    width = 0.8 / len(results)
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for i, (row, cells) in enumerate(results.items()):
            shares = [mean_and_spread(column_values(cells, f"{key}_{name}")) for name in sets]
            means, spreads = zip(*shares, strict=True)
            places = np.arange(len(sets)) + (i + 0.5) * width - 0.4
            axis.bar(places, means, width, yerr=spreads, capsize=2, label=row)
        axis.set_xticks(range(len(sets)), sets, fontsize="small")
        axis.set_title(title)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel(label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(target.title)
    return figure


def panels(
    count: int, across: int, width: float, height: float, margin: float = 0.0, share: bool = True
) -> tuple[Figure, list[Axes]]:
    """Create a figure with a grid of axes."""
    down = -(-count // across)
    figure, axes = plt.subplots(
        down,
        across,
        figsize=(width, margin + height * down),
        sharex=share,
        sharey=share,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, [*axes.flat[:count]]
