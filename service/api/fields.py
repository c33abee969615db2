"""A field of an answer, declared once: its forms in JSON, arrays and tables follow.

`predictions.py` and `explanations.py` declare the fields. The OpenAPI document follows from them,
and so do the tables in docs/api.md: `python -m service.api.reference` rewrites these.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from model_store.types import Task

Values = np.ndarray | Mapping[str, Any] | None  # arrays with a row each, by name where several
CLASSES, DRAWS = "classes", "draws"  # axes whose length the model or the request decides

LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")  # of Markdown


@dataclass(frozen=True, eq=False)
class Field:
    """A field of an answer. What holds for most fields is the default."""

    name: str
    type: Any  # of its value in JSON
    words: str  # its meaning, in the reference
    values: Callable[[Any], Values]  # of the results: a row each
    json: Callable[[Any], list[Any] | None] | None = None  # where these are others in JSON
    unit: str = ""
    task: Task | None = None  # None: of both
    axes: tuple[str | tuple[str, ...], ...] = ()  # but for the rows: names of their parts, or whose
    is_optional: bool = False  # left out unless asked for
    place: int = 1  # among arrays; JSON goes by the order of declaration


def fields_for_task(fields: Iterable[Field], task: Task) -> list[Field]:
    return [field for field in fields if field.task in (None, task)]


def arrays_by_name(fields: Iterable[Field], results: Any) -> Iterator[tuple[str, np.ndarray]]:
    for field in sorted(fields, key=lambda field: field.place):
        yield from _arrays(field.name, field.values(results))


def _arrays(name: str, values: Values) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(values, np.ndarray):
        yield name, values
    elif values is not None:
        for part, of_part in values.items():
            yield from _arrays(f"{name}.{part}", of_part)


def answer_model(name: str, words: str, fields: Iterable[Field]) -> type[BaseModel]:
    types: dict[str, Any] = {}
    for field in fields:
        meaning = LINK.sub(r"\1", field.words) + (f"; in {field.unit}" if field.unit else "")
        kind, default = (field.type | None, None) if field.is_optional else (field.type, ...)
        types[field.name] = (kind, FieldInfo(default=default, description=meaning))
    return create_model(name, __doc__=words, **types)


def reference_table(fields: Iterable[Field]) -> str:
    rows = [f"| `{field.name}` | {field.unit} | {field.words} |" for field in fields]
    return "\n".join(["| Field | Unit | Meaning |", "|---|---|---|", *rows])
