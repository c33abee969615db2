"""Response fields for explanations."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel

from model_store.artifacts.manifest import Manifest
from model_store.inference.explanation import Explanation
from model_store.scores.records import take as take_rows
from model_store.sources.columns import UnusualCells
from service.api.fields import Field, FieldTable, answer_model, list_fields

MAX_CHARACTERS = 100  # of an unseen category
# Reasons in `null_because`
NO_COLUMNS = "the model does not take rows of columns"
NOT_OBJECTS = "rows did not come as objects keyed by column"
BY_COLUMN = "see `columns`, because the model takes rows of columns"
NO_TERMS = (
    "the flag cannot be attributed to the numbers of a row: the version is old, its rows are too "
    "long, it has an encoder, or its flag combines no detector of the input"
)
IDS_UNSUPPORTED = "not available for rows of ids"
NO_SCOPE = "the key lacks the scope rows"
NO_ROWS = "the version has no training rows (set serving.nearest_rows in its recipe)"


@dataclass(frozen=True, eq=False)
class ExplainedRows:
    """The explanations of N rows. `cells` is None if the rows were not objects."""

    manifest: Manifest
    explanation: Explanation
    cells: list[UnusualCells] | None
    has_scope: bool = True  # the request's key can see training rows

    def __len__(self) -> int:
        return len(self.explanation.statistic)

    def take(self, rows: slice) -> "ExplainedRows":
        explanation = take_rows(self.explanation, rows)
        if explanation.nearest is not None:
            explanation = replace(explanation, nearest=explanation.nearest[rows])
        return replace(self, explanation=explanation, cells=self.cells and self.cells[rows])


class DetectorShareAnswer(BaseModel):
    """A detector's share of the flag statistic. `low` marks an unusually low score."""

    share: float
    low: bool


class ColumnFallAnswer(BaseModel):
    """The drop in the flag statistic, in nats, if a column had its usual value."""

    column: str
    fall: float


class UnseenAnswer(BaseModel):
    """A category unseen in training, truncated to 100 characters."""

    column: str
    value: str


class NearestAnswer(BaseModel):
    """A nearby training row and its root-mean-square distance."""

    id: str
    distance: float


def _columns(explained: ExplainedRows) -> list[str]:
    return [column.name for column in explained.manifest.input.columns]


def _detectors(explained: ExplainedRows) -> dict[str, dict[str, np.ndarray]]:
    explanation = explained.explanation
    shares, is_low = explanation.detector_shares, explanation.is_low
    return {name: {"share": share, "low": is_low[name]} for name, share in shares.items()}


def _falls(explained: ExplainedRows) -> list[Any] | None:
    """Return each row's columns, sorted by decreasing fall in the flag statistic."""
    names, falls = _columns(explained), explained.explanation.falls
    if falls is None:
        return None
    order = np.argsort(-falls, axis=1, kind="stable").tolist()
    return [
        [{"column": names[i], "fall": row[i]} for i in row_order]
        for row, row_order in zip(falls.tolist(), order, strict=True)
    ]


def _attributed(explained: ExplainedRows) -> np.ndarray | None:
    shares = explained.explanation.shares
    return None if shares is None else shares.sum(axis=1)


def _map(explained: ExplainedRows) -> np.ndarray | None:
    shares = explained.explanation.shares
    return None if shares is None else shares.reshape(-1, *explained.manifest.input.shape)


def _mark_columns(explained: ExplainedRows, kind: str) -> np.ndarray | None:
    """Return a mask of each row's `unseen` or `missing` columns."""
    if explained.cells is None:
        return None
    names = _columns(explained)
    return np.array([[name in getattr(cell, kind) for name in names] for cell in explained.cells])


def _unseen(explained: ExplainedRows) -> list[Any] | None:
    return explained.cells and [
        [{"column": name, "value": value[:MAX_CHARACTERS]} for name, value in cells.unseen.items()]
        for cells in explained.cells
    ]


def _missing(explained: ExplainedRows) -> list[Any] | None:
    return explained.cells and [cells.missing for cells in explained.cells]


def _nearest_arrays(explained: ExplainedRows) -> dict[str, np.ndarray] | None:
    nearest = explained.explanation.nearest
    if nearest is None:
        return None
    ids, distances = zip(*nearest, strict=True)
    return {"id": np.array(ids), "distance": np.array(distances)}


def _nearest(explained: ExplainedRows) -> list[Any] | None:
    nearest = explained.explanation.nearest
    if nearest is None:
        return None
    return [
        [{"id": i, "distance": d} for i, d in zip(ids, distances.tolist(), strict=True)]
        for ids, distances in nearest
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
    """for other models, except text and ids: each number's share of the statistic, in the shape of
    a row. Shares are not negative and sum to `attributed`. Strongly correlated numbers share a
    contradiction"""

    unseen: Annotated[
        list[UnseenAnswer] | None,
        Field(lambda explained: _mark_columns(explained, "unseen"), json=_unseen),
    ]
    """columns with an unknown category, and its first 100 characters"""

    missing: Annotated[
        list[str] | None,
        Field(lambda explained: _mark_columns(explained, "missing"), json=_missing),
    ]
    """columns whose value is `null`"""

    nearest: Annotated[list[NearestAnswer] | None, Field(_nearest_arrays, json=_nearest)]
    """the five nearest training rows [published with the
    model](detectors.md#training-rows-in-a-version). `id` is the value of the column `data.id`, a
    file name, or the row's index in its source. `distance` is the root-mean-square difference of
    encoded columns, of pixels, or of other numbers in units of their standard deviations. Needs a
    key with the scope `rows`"""

    null_because: Annotated[
        dict[str, str],
        Field(lambda _: None, json=lambda explained: [null_because(explained)] * len(explained)),
    ]
    """the reason for each `null` field, for example that rows were not objects"""


EXPLANATION = list_fields(ExplanationFields)
ExplanationAnswer = answer_model(
    "ExplanationAnswer",
    """The explanation of a flag. `null_because` explains null fields.""",
    EXPLANATION,
)


def null_because(explained: ExplainedRows) -> dict[str, str]:
    manifest, explanation = explained.manifest, explained.explanation
    reasons: dict[str, str] = {}
    if manifest.input.columns:
        reasons |= dict.fromkeys(("attributed", "map"), BY_COLUMN)
        if explained.cells is None:
            reasons |= dict.fromkeys(("unseen", "missing"), NOT_OBJECTS)
    else:
        reasons |= dict.fromkeys(("columns", "unseen", "missing"), NO_COLUMNS)
        if explanation.shares is None:
            no_shares = IDS_UNSUPPORTED if manifest.input.takes_ids else NO_TERMS
            reasons |= dict.fromkeys(("attributed", "map"), no_shares)
    if explanation.nearest is None:
        has_ids = manifest.input.takes_ids and manifest.encoder is None
        reasons["nearest"] = (
            IDS_UNSUPPORTED if has_ids else NO_ROWS if explained.has_scope else NO_SCOPE
        )
    return reasons


def explanation_bytes(manifest: Manifest, rows: int, as_arrays: bool) -> int:
    numbers = int(np.prod(manifest.input.shape))
    return rows * (2000 + numbers * (24 if as_arrays else 72))
