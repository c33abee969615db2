"""A small recipe for digits and its variants.

It has one density detector for a fast export. `ALL_DETECTORS` enables the others.
"""

import json
from pathlib import Path
from typing import Any

from training.recipe import Recipe

ALL_DETECTORS = {"combined": None}
SMALL = {
    "name": "small",
    "method": "bhn-realnvp",
    "data": {"source": "digits", "validation": 60, "reference": 40, "ranking": 40},
    "network": {"hidden": [12]},
    "posterior": {},
    "training": {"epochs": 1},
    "serving": {"draws": 5},
}
QUICK = {
    "name": "digits",
    "seed": 0,
    "data": {"validation": 120, "reference": 140, "ranking": 220},
    "network": {"hidden": [64, 64]},
    "posterior": {"couplings": 2, "hidden": 50, "initial_log_std": -4.0},
    "training": {"epochs": 30, "batch_rows": 64},
    "serving": {"draws": 100, **ALL_DETECTORS},
}
LONGER_FIT = {
    "data": {"reference": 60, "ranking": 60},
    "training": {"epochs": 40, "batch_rows": 64, "learning_rate": 5e-3},
    "serving": {"draws": 20},
}
ONE_ROW_EACH = {"validation": 1, "reference": 1, "ranking": 1}


def content_with(**changes: Any) -> dict[str, Any]:
    """Return `SMALL` with changes. The section `network` is replaced, others are merged."""
    content = {**SMALL, **changes}
    merged = {
        section: {**defaults, **content[section]}
        for section, defaults in SMALL.items()
        if isinstance(defaults, dict) and section != "network"
    }
    score = "epistemic_std" if content.get("task") == "regression" else "entropy"
    has_ids = merged["data"].get("vocabulary") or merged["data"].get("text")
    if content["method"] == SMALL["method"]:  # fewer nodes to export
        merged["posterior"] = {"couplings": 1, "hidden": 8, **merged["posterior"]}
    small = {} if has_ids else {"combined": [score, "residual"]}
    if has_ids and "network" not in changes:
        content["network"] = {"factory": "nets:network"}
    serving = {**small, **merged["serving"]}
    return {
        **content,
        **merged,
        "serving": {key: value for key, value in serving.items() if value is not None},
    }


def recipe_with(**changes: Any) -> Recipe:
    """Parse `SMALL` with changes."""
    return Recipe.model_validate(content_with(**changes))


def get_recipe(source: str, task: str = "classification", **data: Any) -> Recipe:
    return recipe_with(task=task, data={"source": source, **ONE_ROW_EACH, **data})


def write_recipe(folder: Path, **changes: Any) -> Path:
    """Write `SMALL` with changes to NAME.toml, and return its path."""
    content = content_with(**changes)
    path = folder / f"{content['name']}.toml"
    path.write_text(_toml(content))
    return path


def _toml(content: dict[str, Any]) -> str:
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    lines = [f"{name} = {_value(value)}" for name, value in content.items() if name not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)
