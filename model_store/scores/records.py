"""Select and concatenate rows of dataclasses of arrays."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

# A dataclass of arrays, dictionaries of arrays and nested records; other fields apply to all rows
R = TypeVar("R", bound=Any)


def take(record: R, rows: slice | np.ndarray) -> R:
    def select(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[rows]
        if isinstance(value, dict):
            return {name: select(part) for name, part in value.items()}
        return take(value, rows) if is_dataclass(value) else value

    return replace(record, **{f.name: select(getattr(record, f.name)) for f in fields(record)})


def concatenate(parts: list[R]) -> R:
    """Concatenate records; fields without rows come from the first part."""

    def join(values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, np.ndarray):
            return np.concatenate(values)
        if isinstance(first, dict):
            return {name: join([value[name] for value in values]) for name in first}
        return concatenate(values) if is_dataclass(first) else first

    first = parts[0]
    if len(parts) == 1:
        return first
    joined = {f.name: join([getattr(part, f.name) for part in parts]) for f in fields(first)}
    return replace(first, **joined)
