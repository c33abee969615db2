"""What was found of data, and what follows from it: in lines, and in a picture of each column."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from training.data.column_findings import ColumnFinding
from training.data.findings import Findings
from training.data.plan import SPLITS, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_COLUMNS = 24
MOST_CLASSES = 6  # that are drawn apart
MOST_POINTS = 2_000
BINS = 30
BARS = 12
SHOWN = 12
NAME_WIDTH = 24


def full_report(found: Findings) -> list[str]:
    lines = [*_head(found), *_target(found)]
    if found.columns:
        width = min(NAME_WIDTH, max(len(column.name) for column in found.columns))
        lines.append("columns:")
        for column in found.columns:
            missing = f"; {_share(column.missing)} missing" if column.missing else ""
            named = f"  {column.name[:width]:<{width}}  {column.kind:<11}"
            lines.append(f"{named}  {column.why}{missing}")
            notes = [] if column.kind == "ignored" else column.notes  # those are among warnings
            lines += [f"  {'':<{width}}  {'':<11}  ! {note}" for note in notes]
        tails = sorted((c for c in found.used if c.tail > 5), key=lambda column: -column.tail)[:3]
        if tails:
            shown = ", ".join(f"{column.name} ({np.round(column.tail):.6g})" for column in tails)
            of_what = "interquartile ranges from the median to the furthest value"
            lines.append(f"heaviest tails ({of_what}): {shown}")
    return [*lines, *found.notes, *(f"! {warning}" for warning in found.warnings)]


def short_report(found: Findings) -> list[str]:
    lines = [*_head(found), *_target(found)]
    if found.columns:
        kinds = [column.kind for column in found.columns]
        usual = ("numeric", "categorical", "time")
        named = [f"{kinds.count(kind)} {kind}" for kind in usual if kind in kinds]
        lines.append(f"columns: {', '.join(named) or 'none'}")
    left_out = [f"{one.name} ({one.why})" for one in found.columns if one.kind == "ignored"]
    if left_out:
        lines.append(f"left out: {'; '.join(left_out[:SHOWN])}" + _more(left_out))
    noted = [f"column {column.name}: {note}" for column in found.columns for note in column.notes]
    return [*lines, *found.notes, *(f"! {text}" for text in [*noted[:SHOWN], *found.warnings])]


def plan_lines(plan: Plan) -> list[str]:
    recipe = plan.recipe
    network = recipe.network.kind
    if recipe.network.hidden is not None:
        network = f"hidden {recipe.network.hidden}"
        bins = recipe.network.bins
        network += "" if bins is None else f" of numbers and their places in {bins} bins"
    training = recipe.training
    splits = [plan.reasons[f"data.{name}"].split(" of ")[0] + f" {name}" for name in SPLITS]
    if recipe.data.test_fraction:
        splits.append(f"{recipe.data.test_fraction:g} of all rows test")
    by = "by group" if recipe.data.group else "by time" if recipe.data.time else None
    until = "validation rows get no likelier" if training.early_stopping else "it levels off"
    steps = (
        f"batches of {training.batch_rows}, rate {training.learning_rate:g}, until {until}, "
        f"at most {training.max_epochs} epochs"
    )
    parts = {
        "network": (f"{network}", plan.reasons.get("network")),
        "method": (recipe.method, plan.reasons.get("method")),
        "splits": (", ".join(splits), by),
        "training": (steps, plan.reasons.get("training.max_epochs")),
    }
    if recipe.data.target_transform == "auto":
        parts["target"] = ("as it is or transformed", plan.reasons.get("data.target_transform"))
    lines = [
        f"  {name:<9} {text}" + (f" ({why})" if why else "") for name, (text, why) in parts.items()
    ]
    return [*lines, *(f"! {warning}" for warning in plan.warnings)]


def _head(found: Findings) -> list[str]:
    shape = f" of shape {found.shape}" if found.shape else ""
    task = found.task or "no task"
    return [f"{found.source}: {found.rows} rows{shape}; {task}: {found.why}"]


def _target(found: Findings) -> list[str]:
    if found.classes:
        shown = [f"{label} {count}" for label, count in list(found.classes.items())[:SHOWN]]
        return [f"{len(found.classes)} classes: {', '.join(shown)}" + _more(list(found.classes))]
    if found.targets is not None and len(found.targets):
        y = found.targets
        moments = f"mean {y.mean():.4g}, standard deviation {y.std():.4g}"
        return [f"target: {y.min():.4g} to {y.max():.4g}, {moments}"]
    return []


def _more(shown: list[str]) -> str:
    return f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""


def _share(share: float) -> str:
    return f"{100 * share:.2g} %"


def draw(found: Findings, path: Path) -> None:
    from matplotlib.figure import Figure  # slow, and for pictures alone

    columns = found.used[:MOST_COLUMNS]
    across = min(4, len(columns) + 1)
    down = -(-(len(columns) + 1) // across)
    figure = Figure((4.2 * across, 2.9 * down), layout="constrained")
    places = list(figure.subplots(down, across, squeeze=False).flat)
    _draw_target(places[0], found)
    for axis, column in zip(places[1:], columns, strict=False):
        _draw_column(axis, column, found)
    for axis in places[len(columns) + 1 :]:
        axis.axis("off")
    more = ""
    if len(found.used) > MOST_COLUMNS:
        more = f"; the first {MOST_COLUMNS} of {len(found.used)} columns"
    figure.suptitle(f"{found.source}: {found.rows} rows{more}")
    figure.savefig(path, dpi=110)


def _draw_target(axis: "Axes", found: Findings) -> None:
    if found.classes:
        _bars(axis, dict(list(found.classes.items())[:BARS]), None)
        axis.set_title(f"{found.target or 'class'} (target)", fontsize=10)
    elif found.targets is not None:
        axis.hist(found.targets[np.isfinite(found.targets)], bins=BINS, color="0.4")
        axis.set_title(f"{found.target or 'y'} (target)", fontsize=10)
        axis.set_ylabel("rows")
    else:
        axis.axis("off")


def _draw_column(axis: "Axes", column: ColumnFinding, found: Findings) -> None:
    missing = f", {100 * column.missing:.2g} % missing" if column.missing else ""
    axis.set_title(f"{column.name[:30]} ({column.kind}{missing})", fontsize=10)
    if isinstance(column.values, list):
        counts = Counter(value for value in column.values if value is not None)
        _bars(axis, dict(counts.most_common(BARS)), len(counts))
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
    has_labels = found.labels is not None and len(found.labels) == len(values)
    if has_labels and len(found.classes) <= MOST_CLASSES:
        of = np.array(found.labels)
        for label in found.classes:
            here, name = values[is_there & (of == label)], label[:15]
            axis.hist(here, bins=bins, histtype="step", density=True, label=name)
        axis.legend(fontsize=7)
        axis.set_ylabel("density")
    else:
        axis.hist(values[is_there], bins=bins, color="0.4")
        axis.set_ylabel("rows")


def _bars(axis: "Axes", counts: dict[str, int], distinct: int | None) -> None:
    axis.barh([name[:20] for name in counts][::-1], list(counts.values())[::-1], color="0.4")
    axis.tick_params(axis="y", labelsize=7)
    if distinct is not None and distinct > len(counts):
        axis.set_xlabel(f"rows; the {len(counts)} most frequent of {distinct}")
    else:
        axis.set_xlabel("rows")
