"""`GET /predict/examples`: some rows that a version was fitted on, to try it with; and examples for
the OpenAPI document, made of the models that are served."""

import base64
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from math import floor, log10
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from jaxtyping import Float32
from PIL import Image

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    InputSpec,
    Manifest,
    TimeColumn,
    column_width,
)
from model_store.conformal.calibration import DEFAULT_FPR
from service.api.media_types import JSON
from service.api.openapi import ERRORS, answers, query_of
from service.api.requests import query_fields
from service.api.responses import json_response
from service.api.schemas import EXAMPLE_ROW, ExamplesAnswer, ModelRequest
from service.context import context_of
from service.models.models import Served

MOST_ROWS = 32
MOST_NUMBERS = 1 << 16  # of all rows
DIGITS = 5  # of a standard deviation that float32 keeps
# Of the document
MOST_MODELS = 20
MOST_EXAMPLE_NUMBERS = 4096  # of a row that is written out
MOST_PIXELS = 1 << 20  # of an image that is made

router = APIRouter(tags=["Predict"])


@router.get(
    "/predict/examples",
    responses=answers(ExamplesAnswer, *ERRORS),
    openapi_extra={"parameters": query_of(ModelRequest)},
)
async def get_examples(request: Request) -> Response:
    """Give some rows of those that were published with a version, as `/predict` takes them."""
    context = context_of(request)
    asked = query_fields(request, ModelRequest)
    served = await context.find_model(context.begin(request), asked)
    rows = await context.threads.files(lambda: example_rows(served, asked.encoded))
    return json_response({"model": served.name, "version": served.version, "inputs": rows})


def example_rows(served: Served, encoded: bool) -> list[Any]:
    """Return rows in their order; none of a version without training rows, or whose encoder they
    have passed."""
    model = served.model
    if model.training_rows is None or model.manifest.encoder is not None:
        return []
    kept, spec = model.training_rows.x, model.manifest.input
    count = min(len(kept), MOST_ROWS, MOST_NUMBERS // kept.shape[1])
    rows = kept[np.arange(count) * len(kept) // max(count, 1)]
    if spec.columns and not encoded:
        return [row for row in map(_decoder(spec), rows) if row is not None]
    found: list[Any] = rows.reshape(-1, *spec.shape).tolist()
    return found


def _decoder(spec: InputSpec) -> Any:
    """Return what makes objects of encoded rows; None of those with an unknown category."""
    ends = np.cumsum([column_width(column) for column in spec.columns]).tolist()
    places = list(zip(spec.columns, [0, *ends], ends, strict=False))

    def decode(row: Float32[np.ndarray, "I"]) -> dict[str, Any] | None:
        is_known = not any(row[end - 1] for c, _, end in places if isinstance(c, CategoricalColumn))
        cells = {column.name: _cell(column, row[start:end]) for column, start, end in places}
        return cells if is_known else None

    return decode


def _cell(column: AnyColumn, numbers: Float32[np.ndarray, "J"]) -> float | str | None:
    if isinstance(column, CategoricalColumn):
        return (*column.categories, None)[int(numbers.argmax())]
    if column.indicator and numbers[-1]:
        return None
    value = column.mean + column.std * float(numbers[0])
    if not isinstance(column, TimeColumn):
        return round(value, DIGITS - floor(log10(column.std))) + 0.0  # never -0.0
    time = datetime.fromtimestamp(round(value, DIGITS - floor(log10(column.std))), UTC)
    return f"{time:%Y-%m-%dT%H:%M}" if "day" in column.cycles else f"{time:%Y-%m-%d}"


def with_examples(document: dict[str, Any], manifests: Sequence[Manifest]) -> dict[str, Any]:
    rows = [(manifest, example_row(manifest.input)) for manifest in manifests]
    rows = [(manifest, row) for manifest, row in rows if row is not None]
    paths = dict(document["paths"])
    for path, make in (("/predict", _predict), ("/acquire", _acquire), ("/labels", _labels)):
        made: dict[str, Any] = {}
        for manifest, row in rows[:MOST_MODELS]:
            made |= {title: {"value": value} for title, value in make(manifest, row).items()}
        if made and path in paths:
            post = paths[path]["post"]
            content = post["requestBody"]["content"]
            content = {**content, JSON: {**content[JSON], "examples": made}}
            post = {**post, "requestBody": {**post["requestBody"], "content": content}}
            paths[path] = {**paths[path], "post": post}
    return {**document, "paths": paths}


def example_row(spec: InputSpec) -> Any:
    """Return a row that a model takes: average columns, or the middle of the data's range; None
    where it is long."""
    if spec.text is not None:
        return "a text"
    if spec.columns:
        return {column.name: _value(column) for column in spec.columns}
    if (spec.shape, spec.minimum, spec.maximum) == ((8, 8), 0.0, 16.0):  # scikit-learn's digits
        return EXAMPLE_ROW
    if np.prod(spec.shape) <= MOST_EXAMPLE_NUMBERS:
        middle = spec.minimum / 2 + spec.maximum / 2
        return np.full(spec.shape, int(middle) if spec.takes_ids else middle).tolist()
    if spec.image is None or np.prod(spec.shape[-2:]) > MOST_PIXELS:
        return None
    file = io.BytesIO()
    height, width = spec.shape[-2:]
    grey = 128 if spec.image.mode == "L" else (128, 128, 128)
    Image.new(spec.image.mode, (width, height), grey).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _value(column: AnyColumn) -> float | str:
    if isinstance(column, CategoricalColumn):
        return column.categories[0]
    if isinstance(column, TimeColumn):
        time = datetime.fromtimestamp(column.mean, UTC)
        return f"{time:%Y-%m-%dT%H:%M}" if "day" in column.cycles else f"{time:%Y-%m-%d}"
    return float(f"{column.mean:.4g}")


def _predict(manifest: Manifest, row: Any) -> dict[str, Any]:
    name, smallest = manifest.name, manifest.detectors.smallest_fpr
    plain = {"model": name, "inputs": [row]}
    if smallest > DEFAULT_FPR:
        return {name: {**plain, "fpr": smallest}}
    draws = {"num_samples": manifest.noise.default_draws, "seed": 7}
    options = {**draws, "fpr": DEFAULT_FPR, "coverage": 0.95}
    return {
        name: plain,
        f"{name}, with options": {**plain, "version": "latest", **options},
        f"{name}, two rows, a false discovery rate": {**plain, "inputs": [row, row], "fdr": 0.1},
    }


def _acquire(manifest: Manifest, row: Any) -> dict[str, Any]:
    pool = {"pool": [row, row], "ids": ["one", "another"]}
    return {manifest.name: {"model": manifest.name, **pool, "k": 1, "seed": 7}}


def _labels(manifest: Manifest, row: Any) -> dict[str, Any]:
    value = {"target": 0.0} if manifest.classes is None else {"label": manifest.classes[0]}
    label = {"id": "one", **value, "input": row}
    return {manifest.name: {"model": manifest.name, "labels": [label]}}
