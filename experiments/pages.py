"""A target's page and picture, with ours and the paper's figures, and the index of all."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.cells import FEWEST_SEEDS, Cell, Column, Results, Target, mean_and_spread

NONE = "–"
OLDER = "†"
ON_GPU = (
    "A page counts its cells by torch's version: `+cu` ones were measured on a GPU, which "
    "`table-1-cifar`, `alpha-cnn`, `alpha-mnist-wide` and `weight-uncertainty-600` need: the last "
    "has 234,000 steps a fit."
)


def write_pages(targets: Sequence[Target], out: Path, guides: Path) -> None:
    plt.switch_backend("Agg")
    out.mkdir(parents=True, exist_ok=True)
    known: list[str] = []
    left: list[str] = []
    for target in sorted(targets, key=paper_of):
        results = target.results(out)
        measured = sum(map(len, results.values()))
        path = out / f"{target.name}.md"
        shown = {row: cells if counts(cells) else [] for row, cells in results.items() if cells}
        counted = sum(map(bool, shown.values()))
        picture = out / f"{target.name}.png"
        if counted:
            figure = target.draw(target, shown)
            figure.savefig(picture, dpi=100)
            plt.close(figure)
        if measured:
            link = link_to(picture, path.parent) if counted else None
            path.write_text(page(target, results, link))
        text = f"[{target.title}]({link_to(path, out)})" if measured else target.title
        shares = (f"{counted} of {len(results)}", f"{measured} of {len(results) * target.seeds}")
        line = f"| {text} | `{target.name}` | {' | '.join(shares)} |"
        (known if measured else left).append(line)
    lines = [
        "# The papers' tables and figures",
        "",
        "`make reproduce` measures what is missing, cell by cell, and writes these pages; `dubito "
        "reproduce TARGET` does one of them; several such commands at once share the cells. A cell "
        "is a seed of a row. A row's figures count, and are shown, if the validation curves of at "
        f"least {FEWEST_SEEDS} seeds, and of more than half, have levelled off, by the fit's own "
        "rule or over its last fifth. Means are of all its seeds. "
        f"[What was found]({link_to(guides / 'findings.md', out)}), claim by claim.",
        "",
        "| page | target | rows shown | cells measured |",
        "|---|---|---|---|",
        *known,
        *left,
        "",
        ON_GPU,
    ]
    (out / "README.md").write_text("\n".join(lines) + "\n")


def paper_of(target: Target) -> tuple[bool, str]:
    """Return what puts targets of a paper together: a title ends with it, in brackets."""
    _, bracket, paper = target.title.rpartition(" (")
    return not bracket, paper.lower()


def link_to(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def page(target: Target, results: Results, picture: str | None) -> str:
    header = ["", *(column.title for column in target.columns.values()), "seeds"]
    lines = [
        f"# {target.title}",
        "",
        f"`python -m training reproduce {target.name}`. {target.protocol}",
        "",
        "Mean ± standard deviation over seeds"
        + ("; in brackets the paper's." if target.papers else "."),
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(row_line(target, row, cells) for row, cells in results.items() if cells),
        "",
        *([target.conclude(results), ""] if target.conclude else []),
        *notes(target, results),
        *([target.remarks, ""] if target.remarks else []),
        *([f"![{target.title}]({picture})"] if picture else []),
    ]
    return "\n".join(lines) + "\n"


def row_line(target: Target, row: str, cells: list[Cell]) -> str:
    shown = [f"{row} {OLDER}" if is_older(target, cells) else row]
    for key, column in target.columns.items():
        values = values_of(cells, key)
        text = NONE
        if counts(cells) and values:
            text = "not finite"
            if all(map(math.isfinite, values)):
                text = summary(column, values)
        paper = target.papers.get(row, {}).get(key)
        shown.append(text if paper is None else f"{text} ({paper})")
    return f"| {' | '.join([*shown, str(len(cells))])} |"


def summary(column: Column, values: list[float]) -> str:
    if column.summary is not None:
        return column.summary(values)
    mean, spread = mean_and_spread(values)
    return f"{mean:.{column.digits}f} ± {spread:.{column.digits}f}"


def count(values: list[float]) -> str:
    return f"{sum(values):.0f} of {len(values)}"


def counts(cells: list[Cell]) -> bool:
    """Whether enough curves have levelled off: a level one is taken to rise now and then, by
    chance."""
    level = sum(not cell.measured.moving for cell in cells)
    return level >= FEWEST_SEEDS and 2 * level > len(cells)


def is_older(target: Target, cells: list[Cell]) -> bool:
    return any(cell.revision != target.revision for cell in cells)


def values_of(cells: list[Cell], key: str) -> list[float]:
    return [cell.measured.values[key] for cell in cells if key in cell.measured.values]


def notes(target: Target, results: Results) -> list[str]:
    """Return why rows are empty, which cells are of other code, and what measured them."""
    said = []
    not_run = [f"`{row}`" for row, cells in results.items() if not cells]
    if not_run:
        said.append(f"* Not run: {', '.join(not_run)}.")
    for row, cells in results.items():
        moving = Counter(what for cell in cells for what in cell.measured.moving)
        if moving:
            how_many = (f"{what} in {n} of {len(cells)}" for what, n in sorted(moving.items()))
            said.append(f"* {row}: {'; '.join(how_many)} seeds.")
        elif 0 < len(cells) < FEWEST_SEEDS:
            said.append(f"* {row}: {len(cells)} of {FEWEST_SEEDS} seeds.")
    measured = [cell for cells in results.values() for cell in cells]
    if any(is_older(target, cells) for cells in results.values()):
        said.append(f"* {OLDER} an earlier revision measured it; `--again` measures it anew.")
    commits = counted([cell.commit for cell in measured])
    torches = counted([cell.versions["torch"] for cell in measured])
    said.append(f"* Commits of cells: {commits}; torch: {torches}.")
    return [*said, ""]


def counted(names: list[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(Counter(names).items()))


def dots(axis: Axes, target: Target, results: Results, key: str) -> None:
    """Draw a dot a seed, and a cross for the paper's."""
    names = list(results)
    for position, (row, cells) in enumerate(results.items()):
        values = values_of(cells, key)
        axis.plot(values, [position] * len(values), "o", color="C0", alpha=0.7)
        paper = target.papers.get(row, {}).get(key)
        if isinstance(paper, float):
            axis.plot(paper, position, "x", color="C3", markersize=8)
    axis.set(xlabel=target.columns[key].title, yticks=range(len(names)))
    axis.set_yticklabels(names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)


def first_seeds(results: Results) -> dict[str, dict[str, Any]]:
    """Return the values of each row's first seed."""
    return {row: cells[0].measured.values for row, cells in results.items() if cells}


def panels(
    count: int, across: int, width: float, height: float, margin: float = 0.0, share: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of axes; `height` and `margin` make its height by rows."""
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


def draw_columns(target: Target, results: Results) -> Figure:
    """Draw a plot for each column: a dot a seed, a cross for the paper's."""
    width, height = 1.5 + 3.5 * len(target.columns), 1.4 + 0.32 * len(results)
    figure, axes = plt.subplots(
        1,
        len(target.columns),
        figsize=(width, height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, key in zip(axes[0], target.columns, strict=True):
        dots(axis, target, results, key)
        axis.locator_params(axis="x", nbins=6)
    figure.suptitle(f"{target.title} (× the paper's)" if target.papers else target.title)
    return figure


def draw_boxes(target: Target, results: Results) -> Figure:
    """Draw a box plot over seeds of the first column, a dot a seed, a cross for the paper's."""
    key = next(iter(target.columns))
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.5 * len(results)), layout="constrained")
    values = [values_of(cells, key) for cells in results.values()]
    places = range(len(values))
    axis.boxplot(values, orientation="horizontal", positions=places, widths=0.5, showfliers=False)
    dots(axis, target, results, key)
    figure.suptitle(f"{target.title} (× the paper's)")
    return figure
