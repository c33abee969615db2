"""Recipes as files: TOML, with the reason beside what a rule decided."""

import json
from pathlib import Path
from typing import Any

from model_store.errors import InvalidInput
from training.data.plan import Plan
from training.recipe import Recipe, load

WIDTH = 60  # of a line before its reason


def recipe_text(plan: Plan) -> str:
    """Return a recipe as TOML that is read as the same recipe."""
    content = plan.recipe.model_dump(exclude_defaults=True, exclude_none=True)
    content["posterior"] = plan.recipe.posterior.model_dump(exclude_none=True)
    content["training"] = plan.recipe.training.model_dump(exclude_none=True)
    content.setdefault("task", plan.recipe.task)
    content.setdefault("seed", plan.recipe.seed)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    lines = [
        "# Made of the data by the rules of docs/your-data.md. Change what you know better.",
        "",
    ]
    lines += [
        _line(key, value, plan.reasons.get(key))
        for key, value in content.items()
        if key not in tables
    ]
    for table, values in tables.items():
        reason = plan.reasons.get(table)
        lines += ["", f"[{table}]" + (f"  # {reason}" if reason else "")]
        lines += [
            _line(key, value, plan.reasons.get(f"{table}.{key}")) for key, value in values.items()
        ]
    return "\n".join(lines) + "\n"


def keep_recipe(plan: Plan, path: Path) -> Recipe:
    """Write a recipe where nothing or the same recipe is, and return it as it is read.

    Raises:
        InvalidInput: if another file is there, or none can be written.
    """
    text = recipe_text(plan)
    if path.exists():
        if load(path) != plan.recipe:
            expected = "a path where no other recipe is (`fit RECIPE` fits the one that is there)"
            raise InvalidInput("--recipe-out", expected, str(path))
        return load(path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(
            "--recipe-out", "a path that can be written", f"{path}: {error.strerror}"
        ) from None
    return load(path)


def _line(key: str, value: Any, reason: str | None) -> str:
    line = f"{_key(key)} = {_value(value)}"
    if not reason:
        return line
    said = "".join(c if c.isprintable() else "?" for c in " ".join(reason.split()))
    return f"{line:<{WIDTH}}  # {said}"


def _key(key: str) -> str:
    return (
        key
        if key.replace("_", "").replace("-", "").isascii() and key.replace("_", "").isalnum()
        else _value(key)
    )


def _value(value: Any) -> str:
    """Return a value as TOML, which writes strings, numbers and lists as JSON does."""
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items())
            + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value).replace("\x7f", "\\u007f")
