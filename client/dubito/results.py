"""Result types for rankings, jobs, models and labels."""

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
    """Base class for results that can be converted to DataFrames."""

    def table(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def to_pandas(self, index: "pandas.Index | Sequence[Any] | None" = None) -> "pandas.DataFrame":
        """Convert the results to a pandas DataFrame."""
        import pandas

        return pandas.DataFrame(self.table(), index=index)

    def to_polars(self) -> "polars.DataFrame":
        import polars

        return polars.DataFrame(self.table())


@dataclass(frozen=True, eq=False)
class Ranking(Tabular):
    """The k rows selected from a pool, most useful first.

    Attributes:
        model, version: the model that ranked the rows.
        acquisition: the score of the ranking.
        num_samples, seed: number and seed of the draws.
        pool_size: number of rows in the pool.
        excluded: number of excluded labelled rows; None if the service stores no labels.
        index: (k,) integers, positions in the pool.
        id: (k,) strings.
        score: (k,); NaN for control rows.
        control: (k,) boolean, whether the row was selected at random to measure the model.
        race: the request's `race`, if any.
        beta: for `power_bald`, the exponent of BALD in the sampling weights.
        finalists: in a race, the number of rows that used all draws.
        unknown_categories: number of rows with a missing or unknown category, by column.
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
        """Return a table with columns `rank` (from 1), `index`, `id`, `score` and `control`."""
        columns = {name: getattr(self, name) for name in ("index", "id", "score", "control")}
        return {"rank": np.arange(1, len(self) + 1), **columns}


def read_ranking(content: Mapping[str, Any]) -> Ranking:
    rows = content["ranking"]
    arrays: dict[str, np.ndarray] = {}
    for name, kind in {"index": int, "id": str, "score": float, "control": bool}.items():
        arrays[name] = np.array([row[name] for row in rows], dtype=kind)
        arrays[name].flags.writeable = False
    return record(Ranking, {**content, **arrays})


@dataclass(frozen=True)
class Job:
    """The state of a job. Times are in UTC (RFC 3339), and `progress` is between 0 and 1.

    Attributes:
        raw: the JSON response.
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
        """True if the job is done, failed or cancelled."""
        return self.state in ("done", "failed", "cancelled")


@dataclass(frozen=True)
class Model:
    """A published model. If no version can be served, only its name and versions are set.

    Attributes:
        name: name of the model.
        serving: the version behind `latest`.
        versions: all versions.
        aliases: version by alias.
        broken: reason by version, for versions that cannot be served.
        method: method of the posterior.
        task: `classification` or `regression`.
        input_shape: shape of a row.
        columns: `name` and `kind` of each column, for tables.
        classes: class names, for classification.
        target: name of the target, for regression.
        quality: metrics on test rows at publication.
        raw: the JSON response. `model(name)` adds the manifest and drift.
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
    """The number of new, known, replaced and stored labels."""

    model: str
    accepted: int
    known: int
    replaced: int
    labels: int


@dataclass(frozen=True)
class KeptLabel:
    """A stored label.

    Attributes:
        id: id of the row.
        label: class; None for regression.
        target: target value; None for classification.
        annotator: name of the API key that sent the label, if any.
        time: UTC time (RFC 3339).
        control: whether the row was selected at random to measure the model.
        comment: remark of the annotator, if any.
        ended: UTC time at which the label was replaced or deleted, if it was.
        ended_by: name of the API key that replaced or deleted it, if any.
    """

    id: str
    label: str | None
    target: float | None
    annotator: str | None
    time: str
    control: bool
    comment: str | None = None
    ended: str | None = None
    ended_by: str | None = None


@dataclass(frozen=True)
class LabelsDeleted:
    """The number of deleted labels and the number of remaining labels."""

    model: str
    deleted: int
    labels: int


@dataclass(frozen=True)
class LabelFigures:
    """A model's label counts and its quality on labelled rows.

    Attributes:
        raw: the JSON response, including `live` (metrics by version) and `candidates`.
    """

    model: str
    acquired: int
    waiting: int
    labels: int
    control_labels: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def record(kind: type[Record], content: Mapping[str, Any]) -> Record:
    names = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {**content, "raw": content}
    return kind(**{name: value for name, value in values.items() if name in names})
