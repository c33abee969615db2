"""Parts of /predict requests that other protocols send in another form."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from model_store.errors import InvalidInput, list_choices
from model_store.sources.row_file import Part
from service.api.requests import validate
from service.api.schemas import PredictRequest

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Fields of /predict that other protocols take as parameters
PREDICT_OPTIONS = tuple(
    name
    for name in PredictRequest.model_fields
    if name not in ("model", "version", "inputs", "groups", "explain")
)


@dataclass(frozen=True, eq=False)
class Cells:
    """Rows of a table, by column."""

    columns: dict[str, list[Any] | np.ndarray]
    count: int

    def __len__(self) -> int:
        return self.count

    def parts(self) -> Iterator[Part]:
        yield self.columns


def parse_options(
    parameters: dict[str, Any], prefix: str, extra: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Convert another protocol's parameters to fields of /predict.

    Strings are parsed as JSON.
    """
    fields: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in PREDICT_OPTIONS:
            place = f"{prefix}.{name}" if _NAME.fullmatch(name) else prefix
            expected = list_choices(sorted((*PREDICT_OPTIONS, *extra)))
            raise InvalidInput(place, expected, "an unknown parameter")
        if isinstance(value, str):
            try:
                value = orjson.loads(value.encode("utf-8", "replace"))
            except orjson.JSONDecodeError:
                expected = "a number, possibly as a string"
                raise InvalidInput(f"{prefix}.{name}", expected, "another string") from None
        fields[name] = value
    return fields


def build_envelope(fields: dict[str, Any], prefix: str) -> PredictRequest:
    """Build a request from the result of `parse_options`.

    In errors, the fields have the prefix `prefix`.
    """
    try:
        return validate(PredictRequest, {"inputs": [], **fields})
    except InvalidInput as error:
        raise error.rename_fields(lambda field: f"{prefix}.{field}") from None
