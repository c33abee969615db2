"""Select and concatenate rows in nested records of arrays."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np


def take(value: Any, rows: slice | np.ndarray) -> Any:
    """Select rows from an array, or from each array in a dictionary or dataclass."""
    if isinstance(value, np.ndarray):
        return value[rows]
    if isinstance(value, dict):
        return {name: take(part, rows) for name, part in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{f.name: take(getattr(value, f.name), rows) for f in fields(value)})


def concatenate(parts: list[Any]) -> Any:
    """Concatenate arrays, dictionaries or dataclasses. Other values come from the first part."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, dict):
        return {name: concatenate([part[name] for part in parts]) for name in first}
    if not is_dataclass(first) or isinstance(first, type):
        return first
    names = [f.name for f in fields(first)]
    return replace(first, **{n: concatenate([getattr(p, n) for p in parts]) for n in names})
