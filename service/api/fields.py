"""Declarations of response fields.

The JSON and npz responses, the OpenAPI document and the tables in docs/api.md are derived from
them. `python -m service.api.reference` updates the tables.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from model_store.types import Task

Values = np.ndarray | Mapping[str, Any] | None  # one array, or several by name
CLASSES, COLUMNS, DRAWS = "classes", "columns", "draws"  # axes of variable length

LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")  # Markdown


@dataclass(frozen=True, eq=False)
class Field:
    """A field of a response."""

    name: str
    type: Any  # in JSON
    description: str  # Markdown, for the reference
    values: Callable[[Any], Values]  # one value per row of the results
    json: Callable[[Any], list[Any] | None] | None = None  # if JSON differs from `values`
    unit: str = ""
    task: Task | None = None  # None for both tasks
    axes: tuple[str | tuple[str, ...], ...] = ()  # after the rows: names of the axis or its entries
    is_optional: bool = False  # only in the response if requested
    place: int = 1  # sort key of the arrays


def fields_for_task(fields: Iterable[Field], task: Task) -> list[Field]:
    return [field for field in fields if field.task in (None, task)]


def arrays_by_name(fields: Iterable[Field], results: Any) -> Iterator[tuple[str, np.ndarray]]:
    for field in sorted(fields, key=lambda field: field.place):
        yield from _arrays(field.name, field.values(results))


def _arrays(name: str, values: Values) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(values, np.ndarray):
        yield name, values
    elif values is not None:
        for part, part_values in values.items():
            yield from _arrays(f"{name}.{part}", part_values)


def answer_model(name: str, docstring: str, fields: Iterable[Field]) -> type[BaseModel]:
    types: dict[str, Any] = {}
    for field in fields:
        meaning = LINK.sub(r"\1", field.description) + (f"; in {field.unit}" if field.unit else "")
        kind, default = (field.type | None, None) if field.is_optional else (field.type, ...)
        types[field.name] = (kind, FieldInfo(default=default, description=meaning))
    return create_model(name, __doc__=docstring, **types)


def reference_table(fields: Iterable[Field]) -> str:
    rows = [f"| `{field.name}` | {field.unit} | {field.description} |" for field in fields]
    return "\n".join(["| Field | Unit | Meaning |", "|---|---|---|", *rows])
