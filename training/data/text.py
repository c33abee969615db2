"""What was found of data, and what follows from it, in lines."""

from training.data.findings import Findings
from training.data.plan import Plan

SHOWN = 12
NAME_WIDTH = 24


def report(found: Findings) -> list[str]:
    """Return all that was found."""
    lines = [*_head(found), *_target(found)]
    if found.columns:
        width = min(NAME_WIDTH, max(len(column.name) for column in found.columns))
        lines.append("columns:")
        for column in found.columns:
            missing = f"; {_share(column.missing)} missing" if column.missing else ""
            lines.append(
                f"  {column.name[:width]:<{width}}  {column.kind:<11}  {column.why}{missing}"
            )
            lines += [f"  {'':<{width}}  {'':<11}  ! {note}" for note in column.notes]
        tails = sorted((c for c in found.used if c.tail > 5), key=lambda column: -column.tail)[:3]
        if tails:
            shown = ", ".join(f"{column.name} ({column.tail:.0f})" for column in tails)
            lines.append(
                "heaviest tails (interquartile ranges from the median to the furthest value): "
                f"{shown}"
            )
    return [*lines, *found.notes, *(f"! {warning}" for warning in found.warnings)]


def short_report(found: Findings) -> list[str]:
    """Return what is worth knowing before a fit."""
    lines = [*_head(found), *_target(found)]
    if found.columns:
        kinds = [column.kind for column in found.columns]
        named = [
            f"{kinds.count(kind)} {kind}"
            for kind in ("numeric", "categorical", "time")
            if kind in kinds
        ]
        lines.append(f"columns: {', '.join(named) or 'none'}")
    left_out = [
        f"{column.name} ({column.why})" for column in found.columns if column.kind == "ignored"
    ]
    if left_out:
        lines.append(f"left out: {'; '.join(left_out[:SHOWN])}" + _more(left_out))
    noted = [f"column {column.name}: {note}" for column in found.columns for note in column.notes]
    return [*lines, *found.notes, *(f"! {text}" for text in [*noted[:SHOWN], *found.warnings])]


def plan_lines(plan: Plan) -> list[str]:
    """Return what a plan decided, and why."""
    recipe = plan.recipe
    network = f"hidden {recipe.network.hidden}" if recipe.network.hidden else recipe.network.kind
    training = recipe.training
    parts = {
        "network": (f"{network}", plan.reasons.get("network")),
        "method": (recipe.method, plan.reasons.get("method")),
        "splits": (
            ", ".join(plan.reasons[f"data.{name}"].split(" of ")[0] + f" {name}" for name in SPLITS)
            + (
                f", {recipe.data.test_fraction:g} of all rows test"
                if recipe.data.test_fraction
                else ""
            ),
            "by group" if recipe.data.group else "by time" if recipe.data.time else None,
        ),
        "training": (
            f"batches of {training.batch_rows}, rate {training.learning_rate:g}, until it levels "
            "off, at most "
            f"{training.max_epochs} epochs",
            plan.reasons.get("training.max_epochs"),
        ),
    }
    if recipe.data.target_transform == "auto":
        parts["target"] = ("as it is or transformed", plan.reasons.get("data.target_transform"))
    lines = [
        f"  {name:<9} {text}" + (f" ({why})" if why else "") for name, (text, why) in parts.items()
    ]
    return [*lines, *(f"! {warning}" for warning in plan.warnings)]


SPLITS = ("validation", "reference", "ranking")


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
        return [
            f"target: {y.min():.4g} to {y.max():.4g}, mean {y.mean():.4g}, standard deviation "
            f"{y.std():.4g}"
        ]
    return []


def _more(shown: list[str]) -> str:
    return f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""


def _share(share: float) -> str:
    return f"{100 * share:.2g} %"
