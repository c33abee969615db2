"""Routes that return a version's training rows and unusual live rows."""

from collections.abc import Sequence
from datetime import UTC, datetime
from math import floor, log10
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Response
from jaxtyping import Float32
from pydantic import BaseModel, ConfigDict, Field

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    InputSpec,
    TimeColumn,
    column_width,
)
from model_store.sources.columns import unknown_cells
from model_store.types import JsonObject
from service.api.responses import json_response
from service.api.schemas import Envelope, ModelRequest
from service.auth.scopes import needs
from service.context import CurrentContext, CurrentRequest, ModelName
from service.models.drift import column_shifts
from service.models.models import ServedModel

MAX_ROWS = 32
MAX_UNUSUAL = 5  # live rows
MAX_NUMBERS = 1 << 16  # in all rows
DIGITS = 5  # significant digits of a standard deviation in float32


class UnusualRow(BaseModel):
    p_value: float
    input: Any


class DriftDetailsAnswer(BaseModel):
    """The shift of each column and the most unusual of the recent live rows.

    `rows` is the number of recent live rows. A shift above `limit` is significant.
    """

    model: str
    version: str
    rows: int
    columns: dict[str, float]
    limit: float | None
    unusual: list[UnusualRow]


class ExamplesQuery(ModelRequest):
    model_config = ConfigDict(strict=False)  # for a query

    id: list[str] = Field(default_factory=list, max_length=32)
    """ids of the rows to return, for example from `nearest` in an explanation"""


class ExamplesAnswer(BaseModel):
    """Training rows in the form that /predict accepts.

    `labels` are class names or targets, or null if the version does not have them.
    """

    model: str
    version: str
    inputs: list[JsonObject | list[Any]]
    ids: list[str]
    labels: list[str] | list[float] | None


router = APIRouter(tags=["Predict"])


@router.get("/predict/examples", response_model=ExamplesAnswer, dependencies=[needs("rows")])
async def get_examples(
    context: CurrentContext, call: CurrentRequest, query: Annotated[ExamplesQuery, Query()]
) -> Response:
    """Return training rows that were published with a version."""
    loaded = await context.find_model(call, query)
    rows = await context.threads.files(lambda: example_rows(loaded, query.id))
    return json_response({"model": loaded.name, "version": loaded.version, **rows})


def example_rows(loaded: ServedModel, ids: Sequence[str] = ()) -> JsonObject:
    """Return the training rows with the given ids, or rows spread evenly over the labels.

    The rows have the form that /predict accepts. The result is empty if the version has an encoder
    or no stored training rows.
    """
    model = loaded.model
    stored, spec, classes = model.training_rows, model.manifest.input, model.manifest.classes
    if stored is None or model.manifest.encoder is not None:
        return {"inputs": [], "ids": [], "labels": None}
    order = np.argsort(stored.labels, kind="stable")
    if ids:
        order = np.array([stored.ids.index(name) for name in ids if name in stored.ids], dtype=int)
    count = min(len(order), MAX_ROWS, MAX_NUMBERS // stored.x.shape[1])
    index = order[np.arange(count) * len(order) // max(count, 1)]
    rows = _decode(stored.x[index], spec)
    valid = [n for n, row in enumerate(rows) if row is not None]
    values = stored.labels[index[valid]].tolist()
    labels = [classes[int(value)] for value in values] if classes else values
    names = [stored.ids[i] for i in index[valid].tolist()]
    return {"inputs": [rows[n] for n in valid], "ids": names, "labels": labels}


@router.get(
    "/models/{name}/drift",
    response_model=DriftDetailsAnswer,
    dependencies=[needs("rows")],
    tags=["Models"],
)
async def get_drift(context: CurrentContext, call: CurrentRequest, name: ModelName) -> Response:
    """Return each column's shift from the training rows, with unusual live rows."""
    loaded = await context.find_model(call, Envelope(model=name))
    return json_response(await context.threads.files(lambda: describe_drift(loaded)))


def describe_drift(loaded: ServedModel) -> JsonObject:
    """Describe the drift in this process's recent live rows."""
    model, recent = loaded.model, loaded.drift.recent_rows()
    spec, shifts, limit = model.manifest.input, dict[str, float](), None
    if recent and spec.columns and model.training_rows is not None:
        live = np.stack([x for _, x in recent])
        shifts, limit = column_shifts(spec.columns, model.training_rows.x, live)
    count = min(MAX_UNUSUAL, MAX_NUMBERS // model.row_size)
    inputs = [(p, _decode(x[None], spec)) for p, x in recent[:count]]
    return {
        "model": loaded.name,
        "version": loaded.version,
        "rows": len(recent),
        "columns": shifts,
        "limit": limit,
        "unusual": [{"p_value": p, "input": row[0]} for p, row in inputs if row[0] is not None],
    }


def _decode(rows: Float32[np.ndarray, "N I"], spec: InputSpec) -> list[Any]:
    """Convert rows to the form of /predict. A row with an unknown category becomes None."""
    if not spec.columns:
        return rows.reshape(-1, *spec.shape).tolist()
    ends = np.cumsum([column_width(column) for column in spec.columns]).tolist()
    places = list(zip(spec.columns, [0, *ends[:-1]], ends, strict=True))
    is_known: list[bool] = np.logical_not(unknown_cells(rows, spec.columns).any(axis=1)).tolist()
    cells = [{c.name: _cell(c, row[start:end]) for c, start, end in places} for row in rows]
    return [row if known else None for row, known in zip(cells, is_known, strict=True)]


def _cell(column: AnyColumn, numbers: Float32[np.ndarray, "J"]) -> float | str | None:
    if isinstance(column, CategoricalColumn):
        return (*column.categories, None, None)[int(numbers.argmax())]
    if column.indicator and numbers[-1]:
        return None
    value = column.mean + column.std * float(numbers[0])
    value = round(value, DIGITS - floor(log10(column.std))) + 0.0  # turns -0.0 into 0.0
    if not isinstance(column, TimeColumn):
        return value
    time = datetime.fromtimestamp(value, UTC)
    return f"{time:%Y-%m-%dT%H:%M}" if "day" in column.cycles else f"{time:%Y-%m-%d}"
