"""Examples for the OpenAPI document, made of the models that are served."""

import base64
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from PIL import Image

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    InputSpec,
    Manifest,
    TimeColumn,
)
from model_store.conformal.calibration import DEFAULT_FPR
from service.api.schemas import EXAMPLE_ROW
from service.error_forms import JSON

MOST_MODELS = 20
MOST_NUMBERS = 4096  # of a row that is written out
MOST_PIXELS = 1 << 20  # of an image that is made


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
    if np.prod(spec.shape) <= MOST_NUMBERS:
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
