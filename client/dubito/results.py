"""What else the service answered, as frozen records: rankings, jobs, models and labels."""

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
    """What has a column for each number of a row, and so is a DataFrame."""

    def table(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def to_pandas(self, index: "pandas.Index | Sequence[Any] | None" = None) -> "pandas.DataFrame":
        """Return the table as a DataFrame of pandas; with the `index` of the frame that was sent it
        can be joined."""
        import pandas

        return pandas.DataFrame(self.table(), index=index)

    def to_polars(self) -> "polars.DataFrame":
        import polars

        return polars.DataFrame(self.table())


@dataclass(frozen=True, eq=False)
class Ranking(Tabular):
    """Rows of a pool, those first whose labels would teach the model most.

    Attributes:
        model, version: what ranked them.
        acquisition: the score that they are ranked by.
        num_samples, seed: the draws that all rows were scored under.
        pool_size: rows of the pool.
        excluded: rows that were left out, since they are labelled; None where the service keeps no
            labels.
        index: (k,) integers, each row's place in the pool.
        id: (k,) strings, each row's name.
        score: (k,); NaN of control rows.
        control: (k,) boolean, rows that no score chose: set aside at random to judge the model by.
        race: the `race` that was asked for, if one was.
        beta: of `power_bald`, the power of BALD that rows were taken by chance with.
        finalists: of a race, the rows that took all draws.
        unknown_categories: by column, scored rows whose category the model does not tell apart, or
            that have none.
        priors: shares of the classes that the scores are for, if not those of the training data.
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
    """How far work on a pool is. Times are in UTC (RFC 3339), `progress` goes from 0 to 1.

    Attributes:
        raw: all that the service said.
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
    """A published model. All but its name and versions are None where none of them can be served.

    Attributes:
        name: what requests call it.
        serving: the version behind `latest`.
        versions, aliases: all versions, and version by alias.
        broken: what cannot be served, and why.
        method, task: how it was fitted, and whether to `classification` or `regression`.
        input_shape: of a row.
        columns: of rows of columns, each with its `name` and `kind`; empty for other rows.
        classes, target: of a classification, and of a regression.
        quality: measured on test rows when it was published.
        raw: all that the service said; of `model(name)` also the manifest and the drift.
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
    """What became of labels: how many were new, were known, or took another's place, and how many
    there are."""

    model: str
    accepted: int
    known: int
    replaced: int
    labels: int


@dataclass(frozen=True)
class KeptLabel:
    """A label that is kept.

    Attributes:
        id: of the row.
        label, target: a class, or of a regression a number; the other is None.
        annotator: the name of the key that it came with; None where the service has no keys.
        time: in UTC, as RFC 3339 has it.
        control: whether the row was set aside to judge the model by.
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
    """How many rows of a model were acquired and labelled, and what the labels say of it.

    Attributes:
        raw: all that the service said: figures by version as `live`, and `candidates`.
    """

    model: str
    acquired: int
    waiting: int
    labels: int
    control_labels: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def record(kind: type[Record], content: Mapping[str, Any]) -> Record:
    """Return a record of the fields that it has, and all of the answer as `raw`, if it has that.

    A later service may say more.
    """
    names = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    said = {**content, "raw": content}
    return kind(**{name: value for name, value in said.items() if name in names})
