"""The recipe that follows from what data are: by rules, each with its reason (docs/your-data.md
lists them).

Defaults were chosen on validation rows of a panel of public sets (docs/results/panel.md).
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model_store.artifacts.manifest import NAME_PATTERN
from model_store.conformal.calibration import DEFAULT_FPR
from model_store.errors import InvalidInput
from training.data.column_findings import tail_of
from training.data.findings import Findings
from training.data.splitting import default_rows, default_test_fraction
from training.data.targets import is_count
from training.recipe import DataSection, Recipe, load, validate

FEWEST_OF_CLASS = 3  # rows, of which one trains at least
FEWEST_ROWS = 20  # of a set that a recipe is made for
STEP_S = 0.004  # of a step without its products, on one core
MULTIPLICATIONS_A_SECOND = 3e9  # of convolutions
PRODUCTS_A_SECOND = 1e10  # the same, of matrices
LONGEST_S = 60.0  # of a fit's steps
FEWEST_STEPS, MOST_STEPS, FEWEST_EPOCHS = 600, 20_000, 3
# interquartile ranges from a target's median to its furthest value; of 10,000 Gaussian ones 3
HEAVY_TARGET = 10.0
SPLITS = ("validation", "reference", "ranking")
RECIPE_WIDTH = 60  # of a line before its reason
COUNTS = "counts: held-out rows choose between the target as it is, its logarithm and its ranks"
UNITS, DROPOUT, BINS, MEMBERS = 128, 0.1, 16, 16  # of a network of layers
FEWEST_BINS, MOST_BINS = 2, 1024  # of a number, and of all columns
REFIT_ROWS = 10_000  # of training, of which more would tell little that is new
CONVOLVED_SIDE = 14  # pixels a side from which on images are convolved


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    reasons: dict[str, str]
    warnings: list[str]


def plan_of(found: Findings, section: DataSection, name: str | None, seed: int | None) -> Plan:
    if found.target is not None and found.task is None:
        raise InvalidInput(f"column {found.target}", "numbers or classes as the target", found.why)
    if found.task is None:
        raise InvalidInput("--target", "the name of a column", "none")
    if found.rows < FEWEST_ROWS:
        raise InvalidInput("data.source", f"at least {FEWEST_ROWS} rows", f"{found.rows}")
    reasons = {"task": found.why}
    test = 0 if found.has_test else round(default_test_fraction(found.rows) * found.rows)
    rows = found.rows - test
    sizes = {split: default_rows(split, rows) for split in SPLITS}
    train = rows - sum(sizes.values())
    content: dict[str, Any] = {
        "name": name or name_of(found.source),
        "task": found.task,
        "seed": seed or 0,
        "data": _data(found, section, rows, sizes, reasons),
    }
    batch = 32 if train < 2_000 else 128 if train < 50_000 else 256
    is_image = found.source.startswith("images:")
    if is_image and min(found.shape[-2:]) >= CONVOLVED_SIDE:
        row_s = _plan_convolutions(found, content, reasons) / MULTIPLICATIONS_A_SECOND
    else:
        row_s = _plan_layers(found, train, content, reasons) / PRODUCTS_A_SECOND
    if found.task == "regression":
        content["likelihood"] = {"noise": "heteroscedastic"}
        reasons["likelihood.noise"] = "a row's noise is learned with its mean"
        why = _why_transform(found.targets)
        if why is not None:
            content["data"]["target_transform"] = "auto"
            reasons["data.target_transform"] = why
    steps = max(1, train // min(batch, max(1, train)))
    step_s = STEP_S + 3 * row_s * batch
    most = min(max(FEWEST_STEPS, round(LONGEST_S / step_s)), MOST_STEPS)
    epochs = max(FEWEST_EPOCHS, most // steps)
    most = epochs * steps
    content["training"] |= {"batch_rows": batch, "max_epochs": epochs}
    reasons["training.batch_rows"] = f"of {train} training rows"
    seconds = f"about {most * step_s:.0f} s on one core"
    reasons["training.max_epochs"] = f"{most} steps, {seconds}; fewer if it stops before"
    warnings = []
    if rare := _rare(found, section):
        reasons["data.leave_out"] = f"fewer than {FEWEST_OF_CLASS} rows"
        content["data"]["leave_out"] = [*section.leave_out, *rare]
        named = ", ".join(f"{label!r} ({found.classes[label]})" for label in rare[:10])
        more = f" and {len(rare) - 10} more" if len(rare) > 10 else ""
        few = f"classes of {reasons['data.leave_out']} are left out"
        warnings = [f"{few}: {named}{more} (data.leave_out)"]
    warnings += _too_few(sizes["ranking"])
    return Plan(validate(content, "plan"), reasons, warnings)


def _rare(found: Findings, section: DataSection) -> list[str]:
    """Return the classes that have too few rows to be in every split, if two others are left."""
    kept = {label: n for label, n in found.classes.items() if label not in section.leave_out}
    rare = [label for label, n in kept.items() if n < FEWEST_OF_CLASS]
    return rare if len(kept) - len(rare) >= 2 else []


def _data(
    found: Findings, section: DataSection, rows: int, sizes: dict[str, int], reasons: dict[str, str]
) -> dict[str, Any]:
    data = section.model_dump(exclude_defaults=True)
    if not found.has_test:
        data["test_fraction"] = default_test_fraction(found.rows)
        reasons["data.test_fraction"] = "a fifth of the rows, at most 10,000"
    for split, size in sizes.items():
        data[split] = share_of(size, rows)
        reasons[f"data.{split}"] = f"{size} of {rows} rows"
    ignored = [column for column in found.columns if column.kind == "ignored"]
    data["columns"] = section.columns | dict.fromkeys((c.name for c in ignored), "ignored")
    reasons["data.columns"] = "; ".join(f"{column.name}: {column.why}" for column in ignored)
    ids = [column.name for column in found.columns if column.is_id]
    if ids and section.id is None:
        data["id"] = ids[0]
        reasons["data.id"] = "explanations name training rows by it"
    if found.image_size is not None:
        data["image_size"] = list(found.image_size)
        reasons["data.image_size"] = "images are of several sizes, or large"
    return {key: value for key, value in data.items() if value or value == 0}


def _plan_convolutions(found: Findings, content: dict[str, Any], reasons: dict[str, str]) -> float:
    content |= {
        "method": "dropout",
        "network": {"kind": "gal-cnn"},
        "posterior": {"prior_std": 1.0},
        "training": {"learning_rate": 1e-3},
    }
    reasons["network"] = "convolutions, since rows are images"
    reasons["method"] = "masks of units: the cheapest posterior of a network of convolutions"
    pixels = min(found.shape[-2:]) ** 2
    return float(pixels * 16 * 32 * (17 if len(found.shape) == 2 else 20) + 32 * 128 * pixels / 4)


def _plan_layers(
    found: Findings, train: int, content: dict[str, Any], reasons: dict[str, str]
) -> float:
    network: dict[str, Any] = {"hidden": [UNITS, UNITS], "dropout": DROPOUT}
    reasons["network"] = "two hidden layers"
    width = math.prod(found.shape)
    bins = min(BINS, MOST_BINS // max(1, len(found.used)))
    if not found.shape and bins >= FEWEST_BINS:
        network["bins"] = bins
        reasons["network.bins"] = "quantiles of each number, between which it is encoded"
        width = (1 + bins) * len(found.used)
    content |= {
        "method": "batch-ensemble",
        "network": network,
        "posterior": {"members": MEMBERS, "prior_std": 1.0},
        "training": {"learning_rate": 2e-3, "early_stopping": True},
    }
    if train < REFIT_ROWS:
        content["training"]["refit"] = True
        reasons["training.refit"] = "then fitted again, with validation rows among the others"
    reasons["method"] = (
        "tried on a panel of public sets (docs/results/panel.md); "
        "between clusters of rows anchored-ensemble doubts more"
    )
    outputs = max(2, len(found.classes))
    return float(MEMBERS * (width * UNITS + UNITS * UNITS + UNITS * outputs))


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


def name_of(source: str) -> str:
    stem = re.split(r"[/\\]", source.partition(":")[2].rstrip("/\\"))[-1].split(".")[0]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:64]
    return name if re.match(NAME_PATTERN, name) else "model"


def share_of(size: int, rows: int) -> float:
    for digits in range(1, 9):
        share = round(size / rows, digits)
        if 0 < share < 0.5 and round(share * rows) == size:
            return share
    return size / rows


def _why_transform(targets: np.ndarray | None) -> str | None:
    if targets is None or not len(targets):
        return None
    y = targets[np.isfinite(targets)].astype(np.float64)
    if is_count(y) and y.min() <= y.std():
        return COUNTS
    tail = tail_of(y)
    if tail <= HEAVY_TARGET:
        return None
    ranges = f"{np.round(tail):.6g} interquartile ranges"
    return f"a heavy tail ({ranges}): held-out rows choose the target's scale"


def _too_few(ranking: int) -> list[str]:
    smallest = 1 / (ranking + 1)
    if smallest <= DEFAULT_FPR:
        return []
    return [
        f"{ranking} ranking rows: no flag can be kept at a rate below {smallest:.3g}, so requests "
        f"must name an `fpr` of that or more (the default is {DEFAULT_FPR:g}, which takes 19 rows)"
    ]


def recipe_text(plan: Plan) -> str:
    content = plan.recipe.model_dump(exclude_defaults=True, exclude_none=True)
    content["posterior"] = plan.recipe.posterior.model_dump(exclude_none=True)
    content["training"] = plan.recipe.training.model_dump(exclude_none=True)
    content.setdefault("task", plan.recipe.task)
    content.setdefault("seed", plan.recipe.seed)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    reasons = plan.reasons
    lines = ["# Made of the data by the rules of docs/your-data.md. Change what you know better."]
    lines.append("")
    lines += [_line(key, of, reasons.get(key)) for key, of in content.items() if key not in tables]
    for table, values in tables.items():
        reason = reasons.get(table)
        lines += ["", f"[{table}]" + (f"  # {reason}" if reason else "")]
        lines += [_line(key, of, reasons.get(f"{table}.{key}")) for key, of in values.items()]
    return "\n".join(lines) + "\n"


def keep_recipe(plan: Plan, path: Path) -> Recipe:
    text = recipe_text(plan)
    if path.exists():
        if load(path) != plan.recipe:
            expected = "a path where no other recipe is (`fit RECIPE` fits the one that is there)"
            raise InvalidInput("--recipe-out", expected, str(path))
        return load(path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        got = f"{path}: {error.strerror}"
        raise InvalidInput("--recipe-out", "a path that can be written", got) from None
    return load(path)


def _line(key: str, value: Any, reason: str | None) -> str:
    line = f"{_key(key)} = {_value(value)}"
    if not reason:
        return line
    said = "".join(c if c.isprintable() else "?" for c in " ".join(reason.split()))
    return f"{line:<{RECIPE_WIDTH}}  # {said}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(inner)}" for k, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
