"""Declarations of response fields.

The JSON and npz responses, the OpenAPI document and the tables in docs/api.md are derived from
them. `python -m docs.reference` updates the tables.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, create_model
from pydantic.fields import FieldInfo

from model_store.types import Task

Values = np.ndarray | Mapping[str, Any] | None  # one array, or several by name
CLASSES, COLUMNS, DRAWS = "classes", "columns", "draws"  # axes of variable length

LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")  # Markdown


class FieldTable(BaseModel):
    """Base of classes that declare fields as `name: Annotated[type in JSON, Field(...)]`.

    Docstrings describe the fields in Markdown.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)


@dataclass(eq=False)
class Field:
    """A field of a response."""

    values: Any  # of all rows: a function of the results, or the path of an attribute
    json: Callable[[Any], list[Any] | None] | None = None  # if JSON differs from `values`
    unit: str = ""
    task: Task | None = None  # None for both tasks
    axes: tuple[str | tuple[str, ...], ...] = ()  # after the rows: names of the axis or its entries
    is_optional: bool = False  # only in the response if requested
    place: int = 1  # sort key of the arrays
    name: str = ""  # set by `list_fields`, like `info`
    info: FieldInfo | None = None

    def __post_init__(self) -> None:
        if isinstance(self.values, str):
            self.values = attrgetter(self.values)

    @property
    def description(self) -> str:
        assert self.info is not None
        return " ".join(str(self.info.description).split())


def list_fields(table: type[FieldTable]) -> list[Field]:
    fields = []
    for name, info in table.model_fields.items():
        field = next(part for part in info.metadata if isinstance(part, Field))
        field.name, field.info = name, info
        fields.append(field)
    return fields


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
        info = copy(field.info)
        assert info is not None
        unit = f"; in {field.unit}" if field.unit else ""
        info.description = LINK.sub(r"\1", field.description) + unit
        kind: Any = info.annotation
        if field.is_optional:
            kind, info.default = kind | None, None
        types[field.name] = (kind, info)
    return create_model(name, __doc__=docstring, **types)
