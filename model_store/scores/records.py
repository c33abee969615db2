"""Records of arrays that have a row each: some of their rows, and those of several in order."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

# a dataclass of arrays, dictionaries of arrays, such dataclasses, and what is the same of all rows
R = TypeVar("R", bound=Any)


def take(record: R, rows: slice | np.ndarray) -> R:
    def of(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[rows]
        if isinstance(value, dict):
            return {name: of(each) for name, each in value.items()}
        return take(value, rows) if is_dataclass(value) else value

    return replace(record, **{f.name: of(getattr(record, f.name)) for f in fields(record)})


def concatenate(parts: list[R]) -> R:
    """Return the rows of all parts; what is None or no array in the first is so in the result."""

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
