"""A field of an answer, declared once: its forms in JSON, arrays, tensors and tables follow.

`predictions.py` and `explanations.py` declare the fields. The OpenAPI document follows from them,
and so do the tables in docs/api.md: `python -m service.api.reference` rewrites these.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from model_store.artifacts.manifest import Manifest
from model_store.types import Task

Datatype = Literal["FP64", "FP32", "INT64", "BOOL", "BYTES"]  # of the Open Inference Protocol
Values = np.ndarray | Mapping[str, Any] | None  # arrays with a row each, by name where several
CLASSES, DRAWS = "classes", "draws"  # axes whose length the model or the request decides

LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")  # of Markdown


@dataclass(frozen=True, eq=False)
class Field:
    """A field of an answer. What holds for most fields is the default."""

    name: str
    type: Any  # of its value in JSON
    words: str  # its meaning, in the reference
    values: str | Callable[[Any], Values]  # a row each, or where among the results these lie
    json: Callable[[Any], list[Any]] | None = None  # its values in JSON, where these are others
    unit: str = ""
    task: Task | None = None  # None: of both
    datatype: Datatype | None = "FP64"  # None: it is no tensor
    axes: tuple[str | tuple[str, ...], ...] = ()  # but for the rows: names of their parts, or whose
    parts: Callable[[Manifest], dict[str, Datatype]] | None = None  # where there are several arrays
    is_given: Callable[[Manifest], bool] = lambda _: True  # whether a model has it at all
    is_optional: bool = False  # left out unless asked for
    place: int = 1  # among arrays; JSON goes by the order of declaration

    def arrays(self, results: Any) -> Values:
        """Return the field's arrays."""
        if isinstance(self.values, str):
            found: Values = attrgetter(self.values)(results)
            return found
        return self.values(results)

    def shape(self, manifest: Manifest) -> list[int]:
        """Return the shape of a row's part of its arrays; -1 is any length."""
        lengths = {CLASSES: len(manifest.classes or ()), DRAWS: -1}
        return [lengths[axis] if isinstance(axis, str) else len(axis) for axis in self.axes]

    def tensors(self, manifest: Manifest) -> Iterator[tuple[str, Datatype, list[int]]]:
        """Yield the name, datatype and shape of each array that a model gives."""
        if self.datatype is None or not self.is_given(manifest):
            return
        parts = {"": self.datatype} if self.parts is None else self.parts(manifest)
        for part, datatype in parts.items():
            yield ".".join(filter(None, (self.name, part))), datatype, self.shape(manifest)


def of_task(fields: Iterable[Field], task: Task) -> list[Field]:
    """Return the fields that models of a task have."""
    return [field for field in fields if field.task in (None, task)]


def json_objects(fields: Sequence[Field], results: Any, count: int) -> list[dict[str, Any]]:
    """Return an object for each row, with the fields in their order; null is what there is not."""
    columns = [
        field.json(results) if field.json else json_values(field.arrays(results), count)
        for field in fields
    ]
    names = [field.name for field in fields]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def json_values(values: Values, count: int) -> list[Any]:
    """Return values as JSON has them, an item a row."""
    if values is None:
        return [None] * count
    if isinstance(values, np.ndarray):
        items: list[Any] = values.tolist()
        return items
    columns = {name: json_values(part, count) for name, part in values.items()}
    return [{name: column[n] for name, column in columns.items()} for n in range(count)]


def named_arrays(fields: Iterable[Field], results: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of fields by their names, such as `standard_error.bald`."""
    for field in sorted(fields, key=lambda field: field.place):
        yield from _arrays(field.name, field.arrays(results))


def _arrays(name: str, values: Values) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(values, np.ndarray):
        yield name, values
    elif values is not None:
        for part, of_part in values.items():
            yield from _arrays(f"{name}.{part}", of_part)


def answer_model(name: str, words: str, fields: Iterable[Field]) -> type[BaseModel]:
    """Return the model of an object with these fields, for the OpenAPI document."""
    types: dict[str, Any] = {}
    for field in fields:
        meaning = LINK.sub(r"\1", field.words) + (f"; in {field.unit}" if field.unit else "")
        kind, default = (field.type | None, None) if field.is_optional else (field.type, ...)
        types[field.name] = (kind, FieldInfo(default=default, description=meaning))
    return create_model(name, __doc__=words, **types)


def reference_table(fields: Iterable[Field]) -> str:
    """Return the table of the fields in Markdown."""
    rows = [f"| `{field.name}` | {field.unit} | {field.words} |" for field in fields]
    return "\n".join(["| Field | Unit | Meaning |", "|---|---|---|", *rows])
