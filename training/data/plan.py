"""The recipe that follows from what data are: by rules, each with its reason (docs/your-data.md
lists them).

Defaults were chosen on validation rows of a panel of public sets (docs/results/panel.md).
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from model_store.artifacts.manifest import NAME_PATTERN
from model_store.conformal.calibration import DEFAULT_FPR
from model_store.errors import InvalidInput
from training.data.column_findings import tail_of
from training.data.findings import Findings
from training.data.splitting import default_rows, default_test_fraction
from training.data.targets import is_count
from training.recipe import DataSection, Recipe, validate

FEWEST_ROWS = 20  # of a set that a recipe is made for
STEP_S, MULTIPLICATIONS_A_SECOND = (
    0.004,
    3e9,
)  # what a step takes beside its products, and these, on one core
LONGEST_S = 75.0  # of a fit's steps
FEWEST_STEPS, MOST_STEPS = 600, 20_000
# interquartile ranges from a target's median to its furthest value; of 10,000 Gaussian ones 3
HEAVY_TARGET = 10.0
CONVOLVED_SIDE = 14  # pixels a side from which on images are convolved


@dataclass(frozen=True)
class Plan:
    """A recipe, and why it says what it says, by its dotted keys."""

    recipe: Recipe
    reasons: dict[str, str]
    warnings: list[str]


def plan_of(found: Findings, section: DataSection, name: str | None, seed: int | None) -> Plan:
    """Return the recipe for what was found.

    Raises:
        InvalidInput: naming what the data do not bear.
    """
    if found.task is None:
        raise InvalidInput("--target", "the name of a column", "none")
    if found.rows < FEWEST_ROWS:
        raise InvalidInput("data.source", f"at least {FEWEST_ROWS} rows", f"{found.rows}")
    reasons: dict[str, str] = {}
    is_image = found.source.startswith("images:")
    width = _width(found)
    rows = (
        found.rows
        if found.has_test
        else found.rows - round(default_test_fraction(found.rows) * found.rows)
    )
    sizes = {split: default_rows(split, rows) for split in ("validation", "reference", "ranking")}
    train = rows - sum(sizes.values())
    content: dict[str, Any] = {
        "name": name or name_of(found.source),
        "task": found.task,
        "seed": seed or 0,
    }
    reasons["task"] = found.why
    data = section.model_dump(exclude_defaults=True)
    if not found.has_test:
        data["test_fraction"] = default_test_fraction(found.rows)
        reasons["data.test_fraction"] = "a fifth of the rows, at most 10,000"
    for split, size in sizes.items():
        data[split] = share_of(size, rows)
        reasons[f"data.{split}"] = f"{size} of {rows} rows"
    data["columns"] = {
        **section.columns,
        **{c.name: "ignored" for c in found.columns if c.kind == "ignored"},
    }
    reasons["data.columns"] = "; ".join(
        f"{c.name}: {c.why}" for c in found.columns if c.kind == "ignored"
    )
    ids = [c.name for c in found.columns if c.is_id]
    if ids and section.id is None:
        data["id"] = ids[0]
        reasons["data.id"] = "explanations name training rows by it"
    if found.image_size is not None:
        data["image_size"] = list(found.image_size)
        reasons["data.image_size"] = "images are of several sizes, or large"
    content["data"] = {key: value for key, value in data.items() if value or value == 0}
    convolved = is_image and min(found.shape[-2:]) >= CONVOLVED_SIDE
    batch = 32 if train < 5_000 else 64 if train < 50_000 else 256
    units = 0
    if convolved:
        content |= {
            "method": "dropout",
            "network": {"kind": "gal-cnn"},
            "posterior": {"prior_std": 1.0},
        }
        reasons["network"] = "convolutions, since rows are images"
        reasons["method"] = "masks of units: the cheapest posterior of a network of convolutions"
        side = min(found.shape[-2:])
        multiplications = float(
            side * side * 16 * 32 * (17 if len(found.shape) == 2 else 20)
            + 32 * 128 * side * side / 4
        )
        content["training"] = {"learning_rate": 1e-3}
        samples = 1
    else:
        if found.task == "classification":
            units, samples = 100, 1
            posterior: dict[str, Any] = {"couplings": 2, "hidden": 50, "initial_log_std": -3.0}
            content |= {"method": "bhn-realnvp", "training": {"learning_rate": 1e-2}}
        else:
            units, samples = 128, 10
            posterior = {"rate": 0.1, "prior_std": 0.3}
            content |= {"method": "dropout-alpha", "training": {"learning_rate": 3e-3}}
        content |= {"network": {"hidden": [units, units]}, "posterior": posterior}
        reasons["network"] = "two hidden layers"
        reasons["method"] = "tried on a panel of public sets (docs/results/panel.md)"
        multiplications = float(width * units + units * units + units * max(2, len(found.classes)))
    if found.task == "regression":
        content["likelihood"] = {"noise": "heteroscedastic"}
        reasons["likelihood.noise"] = "a row's noise is learned beside its mean"
        why = _why_transform(found.targets)
        if why is not None:
            content["data"]["target_transform"] = "auto"
            reasons["data.target_transform"] = why
    steps = max(1, train // min(batch, max(1, train)))
    step_s = STEP_S + 3 * multiplications * batch * samples / MULTIPLICATIONS_A_SECOND
    most = min(max(FEWEST_STEPS, round(LONGEST_S / step_s)), MOST_STEPS)
    content["training"] |= {"batch_rows": batch, "max_epochs": max(1, most // steps)}
    reasons["training.batch_rows"] = f"of {train} training rows"
    reasons["training.max_epochs"] = (
        f"{most} steps, about {most * step_s:.0f} s on one core; fewer if it levels off"
    )
    return Plan(validate(content, "plan"), reasons, _too_few(sizes["ranking"]))


def name_of(source: str) -> str:
    """Return a model's name, of the file or folder that its data are in."""
    stem = re.split(r"[/\\]", source.partition(":")[2].rstrip("/\\"))[-1].split(".")[0]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:64]
    return name if re.match(NAME_PATTERN, name) else "model"


def share_of(size: int, rows: int) -> float:
    """Return the shortest share that comes to so many of so many rows."""
    for digits in range(1, 9):
        share = round(size / rows, digits)
        if 0 < share < 0.5 and round(share * rows) == size:
            return share
    return size / rows


def _width(found: Findings) -> int:
    if found.shape:
        width = 1
        for side in found.shape:
            width *= side
        return width
    return sum(min(65, len(set(c.values))) if isinstance(c.values, list) else 3 for c in found.used)


def _why_transform(targets: np.ndarray | None) -> str | None:
    """Return why transforms of a regression's target are tried, None where they are not."""
    if targets is None or not len(targets):
        return None
    y = targets[np.isfinite(targets)].astype(np.float64)
    if is_count(y) and y.min() <= y.std():
        return (
            "counts: held-out rows choose between the target as it is, its logarithm and its ranks"
        )
    tail = tail_of(y)
    if tail <= HEAVY_TARGET:
        return None
    return (
        f"a heavy tail ({tail:.0f} interquartile ranges): held-out rows choose the target's scale"
    )


def _too_few(ranking: int) -> list[str]:
    """Return what the numbers of rows do not bear."""
    said = []
    smallest = 1 / (ranking + 1)
    if smallest > DEFAULT_FPR:
        said.append(
            f"{ranking} ranking rows: no flag can be kept at a rate below {smallest:.3g}, so "
            "requests must name an "
            f"`fpr` of that or more (the default is {DEFAULT_FPR:g}, which takes 19 rows)"
        )
    return said
