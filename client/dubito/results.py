"""Frozen records of rankings, jobs, models and labels."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import pandas
    import polars

Record = TypeVar("Record")


class Tabular:
    """A result with a table, which converts to DataFrames."""

    def table(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def to_pandas(self, index: "pandas.Index | Sequence[Any] | None" = None) -> "pandas.DataFrame":
        """Return the table as a pandas DataFrame. Pass the `index` of the frame that was sent to
        join both."""
        import pandas

        return pandas.DataFrame(self.table(), index=index)

    def to_polars(self) -> "polars.DataFrame":
        import polars

        return polars.DataFrame(self.table())


@dataclass(frozen=True, eq=False)
class Ranking(Tabular):
    """Rows of a pool; the first ones have the most useful labels.

    Attributes:
        model, version: what ranked them.
        acquisition: the score that they are ranked by.
        num_samples, seed: the draws that all rows were scored under.
        pool_size: rows of the pool.
        excluded: labelled rows that were left out; None if the service stores no labels.
        index: (k,) integers, each row's place in the pool.
        id: (k,) strings, each row's name.
        score: (k,); NaN of control rows.
        control: (k,) boolean, rows that were set aside at random to measure the model.
        race: the request's `race`, if any.
        beta: of `power_bald`, the power of BALD in the sampling weights.
        finalists: in a race, how many rows used all draws.
        unknown_categories: by column, scored rows with a missing or unknown category.
        priors: class shares that the scores assume, if they differ from the training data.
    """

    model: str
    version: str
    acquisition: str
    num_samples: int
    seed: int
    pool_size: int
    excluded: int | None
    index: np.ndarray
    id: np.ndarray
    score: np.ndarray
    control: np.ndarray
    race: float | None = None
    beta: float | None = None
    finalists: int | None = None
    unknown_categories: Mapping[str, int] = field(default_factory=dict)
    priors: Mapping[str, float] | None = None

    def __len__(self) -> int:
        return len(self.index)

    def table(self) -> dict[str, np.ndarray]:
        """Return the ranking's columns: `rank` from 1 on, `index`, `id`, `score` and `control`."""
        of_rows = {name: getattr(self, name) for name in ("index", "id", "score", "control")}
        return {"rank": np.arange(1, len(self) + 1), **of_rows}


def ranking_of(content: Mapping[str, Any]) -> Ranking:
    rows = content["ranking"]
    arrays = {
        "index": np.array([row["index"] for row in rows], dtype=np.int64),
        "id": np.array([row["id"] for row in rows], dtype=np.str_),
        "score": np.array([row["score"] for row in rows], dtype=np.float64),
        "control": np.array([row["control"] for row in rows], dtype=np.bool_),
    }
    for array in arrays.values():
        array.flags.writeable = False
    return record(Ranking, {**content, **arrays})


@dataclass(frozen=True)
class Job:
    """The state of a job. Times are in UTC (RFC 3339); `progress` is between 0 and 1.

    Attributes:
        raw: the whole answer.
    """

    id: str
    kind: str
    state: str
    model: str
    version: str
    rows: int
    num_samples: int
    seed: int
    read_as: str
    ignored_columns: Sequence[str]
    progress: float
    seconds_left: float | None
    created: str
    ended: str | None
    expires: str | None
    error: str | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def is_over(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.state in ("done", "failed", "cancelled")


@dataclass(frozen=True)
class Model:
    """A published model. If no version can be served, only its name and versions are set.

    Attributes:
        name: what requests call it.
        serving: the version behind `latest`.
        versions, aliases: all versions, and version by alias.
        broken: versions that cannot be served, with the reason.
        method, task: the method, and `classification` or `regression`.
        input_shape: the shape of a row.
        columns: `name` and `kind` of each column of a table; else empty.
        classes, target: of a classification, and of a regression.
        quality: measured on test rows when it was published.
        raw: the whole answer; for `model(name)` with the manifest and the drift.
    """

    name: str
    serving: str | None
    versions: Sequence[str]
    aliases: Mapping[str, str]
    broken: Mapping[str, str]
    method: str | None
    task: str | None
    input_shape: Sequence[int] | None
    columns: Sequence[Mapping[str, Any]] | None
    classes: Sequence[str] | None
    target: str | None
    quality: Mapping[str, float] | None
    smallest_fpr: float | None
    smallest_risk: float | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class LabelsKept:
    """How many labels were new, known or replaced, and how many there are."""

    model: str
    accepted: int
    known: int
    replaced: int
    labels: int


@dataclass(frozen=True)
class KeptLabel:
    """A stored label.

    Attributes:
        id: of the row.
        label, target: a class, or a number for regression; the other is None.
        annotator: the name of the key that sent it; None if the service has no keys.
        time: in UTC (RFC 3339).
        control: whether the row was set aside to measure the model.
    """

    id: str
    label: str | None
    target: float | None
    annotator: str | None
    time: str
    control: bool


@dataclass(frozen=True)
class LabelsDeleted:
    """How many labels were deleted, and how many are left."""

    model: str
    deleted: int
    labels: int


@dataclass(frozen=True)
class LabelFigures:
    """How many rows of a model were acquired and labelled, and its quality on them.

    Attributes:
        raw: the whole answer, with figures by version as `live`, and `candidates`.
    """

    model: str
    acquired: int
    waiting: int
    labels: int
    control_labels: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def record(kind: type[Record], content: Mapping[str, Any]) -> Record:
    """Make a record from an answer, and ignore unknown fields of later services.

    A field `raw` gets the whole answer.
    """
    names = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {**content, "raw": content}
    return kind(**{name: value for name, value in values.items() if name in names})
