"""`GET /predict/examples`: example rows for a version."""

from math import floor, log10
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Response
from jaxtyping import Float32

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    InputSpec,
    TimeColumn,
    column_width,
)
from service.api.dependencies import CurrentContext, CurrentRequest
from service.api.openapi import ROW_ERRORS
from service.api.responses import format_column_time, json_response
from service.api.schemas import ExamplesAnswer, ModelQuery
from service.auth.scopes import needs
from service.models.models import ServedModel

MAX_ROWS = 32
MAX_NUMBERS = 1 << 16  # in all rows
DIGITS = 5  # significant digits of a standard deviation in float32

router = APIRouter(tags=["Predict"])


@router.get(
    "/predict/examples",
    response_model=ExamplesAnswer,
    responses=ROW_ERRORS,
    dependencies=[needs("rows")],
)
async def get_examples(
    context: CurrentContext, call: CurrentRequest, query: Annotated[ModelQuery, Query()]
) -> Response:
    """Return training rows that were published with a version."""
    loaded = await context.find_model(call, query)
    rows = await context.threads.files(lambda: example_rows(loaded, query.encoded))
    return json_response({"model": loaded.name, "version": loaded.version, "inputs": rows})


def example_rows(loaded: ServedModel, encoded: bool) -> list[Any]:
    """Return evenly spaced training rows, in the form that /predict takes.

    The list is empty if the version has an encoder or no stored training rows.
    """
    model = loaded.model
    if model.training_rows is None or model.manifest.encoder is not None:
        return []
    x, spec = model.training_rows.x, model.manifest.input
    count = min(len(x), MAX_ROWS, MAX_NUMBERS // x.shape[1])
    rows = x[np.arange(count) * len(x) // max(count, 1)]
    if spec.columns and not encoded:
        return [row for row in map(_decoder(spec), rows) if row is not None]
    nested: list[Any] = rows.reshape(-1, *spec.shape).tolist()
    return nested


def _decoder(spec: InputSpec) -> Any:
    """Build a function that decodes a row to an object, or None for an unknown category."""
    ends = np.cumsum([column_width(column) for column in spec.columns]).tolist()
    places = list(zip(spec.columns, [0, *ends], ends, strict=False))
    unknown = [e - 1 - c.indicator for c, _, e in places if isinstance(c, CategoricalColumn)]

    def decode(row: Float32[np.ndarray, "I"]) -> dict[str, Any] | None:
        is_known = not any(row[i] for i in unknown)
        cells = {column.name: _cell(column, row[start:end]) for column, start, end in places}
        return cells if is_known else None

    return decode


def _cell(column: AnyColumn, numbers: Float32[np.ndarray, "J"]) -> float | str | None:
    if isinstance(column, CategoricalColumn):
        return (*column.categories, None, None)[int(numbers.argmax())]
    if column.indicator and numbers[-1]:
        return None
    value = column.mean + column.std * float(numbers[0])
    value = round(value, DIGITS - floor(log10(column.std))) + 0.0  # turns -0.0 into 0.0
    return format_column_time(column, value) if isinstance(column, TimeColumn) else value
