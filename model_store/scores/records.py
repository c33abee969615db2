"""Check arrays, and select or concatenate the rows of nested records."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float64).max)
SMALLEST = float(np.finfo(np.float64).smallest_subnormal)


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
    """Concatenate arrays, dictionaries or dataclasses. Other values are from the first part."""
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


def check_tensor(
    tensors: Mapping[str, np.ndarray],
    name: str,
    dtype: type,
    shape: tuple[int, ...],
    low: float = -LARGEST,
    high: float = LARGEST,
) -> np.ndarray:
    """Check a tensor's type, shape and range. Raise ValueError if it is missing or invalid.

    A 0 in `shape` stands for any length above 0.
    """
    tensor = tensors.get(name)
    if (
        tensor is None
        or tensor.dtype != dtype
        or tensor.ndim != len(shape)
        or any(n == 0 or m not in (0, n) for n, m in zip(tensor.shape, shape, strict=True))
    ):
        lengths = ", ".join(str(n) if n else "1 or more" for n in shape)
        raise ValueError(f"{name}: expected {np.dtype(dtype)} numbers of shape ({lengths})")
    # NumPy scalars compare float32 tensors as float64. Python floats would round to 0 or infinity.
    if not np.all((tensor >= np.float64(low)) & (tensor <= np.float64(high))):
        raise ValueError(f"{name}: expected finite numbers from {low:g} to {high:g}")
    return tensor
