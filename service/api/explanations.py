"""Why rows are strange: the fields of an explanation, in JSON and as arrays."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from pydantic import BaseModel

from model_store.artifacts.manifest import Manifest
from model_store.inference.explanation import DividedFlag, Explanation
from model_store.sources.columns import OddCells
from service.api.fields import Field, answer_model

SHOWN = 100  # characters of a category that was sent
NO_COLUMNS = "the model does not take rows of columns"
NO_USUAL = "this version was published before columns had usual values: fit the model again"
NOT_OBJECTS = "rows did not come as objects keyed by column"
BY_COLUMN = "the model takes rows of columns, which have `columns` in its place"
NO_TERMS = (
    "no detector of this version's flag is divided among the numbers of a row: it was published "
    "before that was possible, its flag combines no detector of the input, its rows are too long, "
    "or an encoder comes before it"
)
OF_IDS = (
    "the model takes rows of ids, which have no size: none has a share, and no training row is near"
)
NO_ROWS = (
    "this version was published without training rows (serving.nearest_rows of its recipe), or "
    "before there were"
)


@dataclass(frozen=True, eq=False)
class Explained:
    """N rows of a request explained; `cells` are None of rows that were not objects."""

    manifest: Manifest
    explanation: Explanation
    cells: list[OddCells] | None

    def __len__(self) -> int:
        return len(self.explanation.flag.statistic)

    def take(self, rows: slice) -> "Explained":
        whole, flag = self.explanation, self.explanation.flag

        def part(values: Any) -> Any:
            return None if values is None else values[rows]

        flag = DividedFlag(
            flag.statistic[rows],
            {name: share[rows] for name, share in flag.share.items()},
            {name: is_low[rows] for name, is_low in flag.is_low.items()},
        )
        explanation = Explanation(flag, part(whole.falls), part(whole.shares), part(whole.nearest))
        return Explained(self.manifest, explanation, part(self.cells))


class DetectorShareAnswer(BaseModel):
    """A combined detector's share of the flag's statistic, and whether its score is lower than
    usual."""

    share: float
    low: bool


class ColumnFallAnswer(BaseModel):
    """By how many nats the flag's statistic would fall, had a column its usual value."""

    column: str
    fall: float


class UnseenAnswer(BaseModel):
    """A category that was not seen in training, its name cut after 100 characters."""

    column: str
    value: str


class NearestAnswer(BaseModel):
    """A training row, by its id, and the root of its mean squared difference."""

    id: str
    distance: float


def _columns(explained: Explained) -> list[str]:
    return [column.name for column in explained.manifest.input.columns]


def _detectors(explained: Explained) -> dict[str, dict[str, np.ndarray]]:
    flag = explained.explanation.flag
    return {name: {"share": s, "low": flag.is_low[name]} for name, s in flag.share.items()}


def _falls(explained: Explained) -> list[Any] | None:
    """Return each row's columns, those first that add most to the statistic."""
    names, falls = _columns(explained), explained.explanation.falls
    if falls is None:
        return None
    order = np.argsort(-falls, axis=1, kind="stable").tolist()
    return [
        [{"column": names[i], "fall": of_row[i]} for i in by_fall]
        for of_row, by_fall in zip(falls.tolist(), order, strict=True)
    ]


def _attributed(explained: Explained) -> np.ndarray | None:
    shares = explained.explanation.shares
    return None if shares is None else shares.sum(axis=1)


def _map(explained: Explained) -> np.ndarray | None:
    shares = explained.explanation.shares
    return None if shares is None else shares.reshape(-1, *explained.manifest.input.shape)


def _odd_columns(explained: Explained, kind: str) -> np.ndarray | None:
    """Return which columns are `unseen` or `missing` in each row."""
    if explained.cells is None:
        return None
    names = _columns(explained)
    return np.array([[name in getattr(cell, kind) for name in names] for cell in explained.cells])


def _unseen(explained: Explained) -> list[Any] | None:
    return explained.cells and [
        [{"column": name, "value": value[:SHOWN]} for name, value in cells.unseen.items()]
        for cells in explained.cells
    ]


def _missing(explained: Explained) -> list[Any] | None:
    return explained.cells and [cells.missing for cells in explained.cells]


def _nearest_arrays(explained: Explained) -> dict[str, np.ndarray] | None:
    nearest = explained.explanation.nearest
    if nearest is None:
        return None
    ids, distances = zip(*nearest, strict=True)
    return {"id": np.array(ids), "distance": np.array(distances)}


def _nearest(explained: Explained) -> list[Any] | None:
    nearest = explained.explanation.nearest
    if nearest is None:
        return None
    return [
        [{"id": i, "distance": d} for i, d in zip(ids, distances.tolist(), strict=True)]
        for ids, distances in nearest
    ]


EXPLANATION = (
    Field(
        "statistic",
        float,
        "the flag's statistic: `p_value` is its rank among the calibration rows",
        attrgetter("explanation.flag.statistic"),
        unit="nats",
    ),
    Field(
        "detectors",
        dict[str, DetectorShareAnswer],
        "of each combined detector its `share` of the statistic, exactly: together they are 1, "
        "and the largest is that of the smallest tail probability. `low`: the detector judges "
        "from both sides, and its score is lower than usual: the row is smoother, or more "
        "average, than training rows are",
        _detectors,
    ),
    Field(
        "columns",
        list[ColumnFallAnswer] | None,
        "of a model of columns: by how much the statistic would fall, had that column alone its "
        "usual value (the median, or the most frequent category of the training rows), under the "
        "same draws, all of the request. Largest first. They do not add up: where two columns "
        "contradict each other, putting either right may do. Negative: the usual value would be "
        "stranger here",
        attrgetter("explanation.falls"),
        json=_falls,
        unit="nats",
    ),
    Field(
        "attributed",
        float | None,
        "the part of the statistic that is divided among the numbers: that of the detectors "
        "`residual`, `mahalanobis` and `input_neighbours`, but for those that are `low`. The rest "
        "is the model's own doubt or its features, which belong to no single number. Numbers that "
        "are strongly correlated share what they contradict",
        _attributed,
    ),
    Field(
        "map",
        list[Any] | None,
        "of other models, but for those of ids and text: each number's share of the statistic, in "
        "the shape of a row. None is negative, and together they are `attributed`",
        _map,
    ),
    Field(
        "unseen",
        list[UnseenAnswer] | None,
        "columns whose category is none of those that are told apart, and the first 100 characters "
        "of what was sent",
        lambda explained: _odd_columns(explained, "unseen"),
        json=_unseen,
    ),
    Field(
        "missing",
        list[str] | None,
        "columns whose value is `null`",
        lambda explained: _odd_columns(explained, "missing"),
        json=_missing,
    ),
    Field(
        "nearest",
        list[NearestAnswer] | None,
        "the five nearest of the training rows that were "
        "[published with the model](detectors.md#training-rows-that-explanations-name), by `id`: "
        "the value of the column `data.id`, a file's name, or the row's number in its source, from "
        "0. `distance` is the root of the mean squared difference: of columns as they are encoded "
        "(standard deviations), of pixels, of other rows in each number's standard deviation",
        _nearest_arrays,
        json=_nearest,
    ),
    Field(
        "null_because",
        dict[str, str],
        "why a field is `null`, by field: an older version, say, or rows that did not come as "
        "objects",
        lambda _: None,
        json=lambda explained: [null_because(explained)] * len(explained),
    ),
)
ExplanationAnswer = answer_model(
    "ExplanationAnswer",
    """What made a row strange. Shares of detectors add up to 1, those of the map to `attributed`.

`statistic` is the flag's, in nats. What is null is named in `null_because`, with the reason.""",
    EXPLANATION,
)


def null_because(explained: Explained) -> dict[str, str]:
    manifest, explanation = explained.manifest, explained.explanation
    why: dict[str, str] = {}
    if manifest.input.columns:
        why |= dict.fromkeys(("attributed", "map"), BY_COLUMN)
        why |= {"columns": NO_USUAL} if explanation.falls is None else {}
        why |= dict.fromkeys(("unseen", "missing"), NOT_OBJECTS) if explained.cells is None else {}
    else:
        why |= dict.fromkeys(("columns", "unseen", "missing"), NO_COLUMNS)
        no_terms = OF_IDS if manifest.input.takes_ids else NO_TERMS
        why |= dict.fromkeys(("attributed", "map"), no_terms) if explanation.shares is None else {}
    no_rows = OF_IDS if manifest.input.takes_ids and manifest.encoder is None else NO_ROWS
    return why | ({"nearest": no_rows} if explanation.nearest is None else {})


def explanation_bytes(manifest: Manifest, rows: int, as_arrays: bool) -> int:
    numbers = int(np.prod(manifest.input.shape))
    return rows * (2000 + numbers * (24 if as_arrays else 72))
