"""Response fields for explanations."""

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel

from model_store.artifacts.manifest import Manifest
from model_store.inference.explanation import Explanation
from service.api.fields import Field, FieldTable, answer_model, list_fields

if TYPE_CHECKING:
    from service.api.predictions import Results


class DetectorShareAnswer(BaseModel):
    """A detector's share of the flag statistic. `low` marks an unusually low score."""

    share: float
    low: bool


class ColumnFallAnswer(BaseModel):
    """The drop in the flag statistic, in nats, if a column had its usual value."""

    column: str
    fall: float


class NearestAnswer(BaseModel):
    """A nearby training row and its root-mean-square distance."""

    id: str
    distance: float


def _explanation(results: "Results") -> Explanation:
    assert results.explanation is not None
    return results.explanation


def _detectors(results: "Results") -> dict[str, dict[str, np.ndarray]]:
    explanation = _explanation(results)
    shares, is_low = explanation.detector_shares, explanation.is_low
    return {name: {"share": share, "low": is_low[name]} for name, share in shares.items()}


def _falls(results: "Results") -> list[Any] | None:
    """Return each row's columns, sorted by decreasing fall in the flag statistic."""
    names, falls = results.column_names, _explanation(results).falls
    if falls is None:
        return None
    order = np.argsort(-falls, axis=1, kind="stable").tolist()
    return [
        [{"column": names[i], "fall": row[i]} for i in row_order]
        for row, row_order in zip(falls.tolist(), order, strict=True)
    ]


def _attributed(results: "Results") -> np.ndarray | None:
    shares = _explanation(results).shares
    return None if shares is None else shares.sum(axis=1)


def _map(results: "Results") -> np.ndarray | None:
    shares = _explanation(results).shares
    return None if shares is None else shares.reshape(-1, *results.manifest.input.shape)


def _nearest_arrays(results: "Results") -> dict[str, np.ndarray] | None:
    explanation = _explanation(results)
    if explanation.nearest_ids is None or explanation.nearest_distances is None:
        return None
    return {"id": explanation.nearest_ids, "distance": explanation.nearest_distances}


def _nearest(results: "Results") -> list[Any] | None:
    arrays = _nearest_arrays(results)
    if arrays is None:
        return None
    rows = zip(arrays["id"].tolist(), arrays["distance"].tolist(), strict=True)
    return [
        [{"id": name, "distance": distance} for name, distance in zip(*row, strict=True)]
        for row in rows
    ]


class ExplanationFields(FieldTable):
    """The fields that explain a flag."""

    statistic: Annotated[float, Field("explanation.statistic", unit="nats")]
    """the flag statistic; `p_value` is its rank among the calibration rows"""

    detectors: Annotated[dict[str, DetectorShareAnswer], Field(_detectors)]
    """each combined detector's `share` of the statistic. Shares sum to 1; the smallest tail
    probability has the largest share. `low` marks an unusually low score of `residual` or
    `mahalanobis`: the row is smoother or more average than training rows"""

    columns: Annotated[
        list[ColumnFallAnswer] | None, Field("explanation.falls", json=_falls, unit="nats")
    ]
    """for tabular models: the decrease of the statistic, under the same draws, if only this column
    had its usual value (median or most frequent category of the training rows). Largest first. The
    values do not add up. A negative value means that the usual value would be more unusual in this
    row"""

    attributed: Annotated[float | None, Field(_attributed)]
    """the part of the statistic that `map` attributes to the numbers of the row. It comes from the
    detectors `residual`, `mahalanobis` and `input_neighbours`, unless `low`. The rest depends on
    the model's uncertainty or features"""

    map: Annotated[list[Any] | None, Field(_map)]
    """each number's share of the statistic, in the shape of a row. Shares are not negative and sum
    to `attributed`. Strongly correlated numbers share a contradiction. `null` for tabular models,
    text, ids and encoders, and if no combined detector uses the input"""

    unseen: Annotated[
        list[str] | None,
        Field("explanation.unseen", json=lambda r: r.list_columns(r.explanation.unseen)),
    ]
    """for tabular models: columns with an unknown category"""

    missing: Annotated[
        list[str] | None,
        Field("explanation.missing", json=lambda r: r.list_columns(r.explanation.missing)),
    ]
    """for tabular models: columns whose value is `null`"""

    nearest: Annotated[list[NearestAnswer] | None, Field(_nearest_arrays, json=_nearest)]
    """the five nearest training rows [published with the
    model](detectors.md#training-rows-in-a-version). `id` is the value of the column `data.id`, a
    file name, or the row's index in its source. `distance` is the root-mean-square difference of
    encoded columns, of pixels, or of other numbers in units of their standard deviations. Needs a
    key with the scope `rows`"""


EXPLANATION = list_fields(ExplanationFields)
ExplanationAnswer = answer_model(
    "ExplanationAnswer",
    """The explanation of a flag. Fields that the version does not support are null.""",
    EXPLANATION,
)


def explanation_bytes(manifest: Manifest, rows: int, as_arrays: bool) -> int:
    numbers = int(np.prod(manifest.input.shape))
    return rows * (2000 + numbers * (24 if as_arrays else 72))
