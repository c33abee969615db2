"""Findings about data, and the plan that follows from them, as lines of text."""

import numpy as np

from training.data.findings import Findings
from training.data.plan import SPLITS, Plan

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
