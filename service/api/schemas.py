"""What requests and answers look like: validation of the envelope, and the OpenAPI document.

Rows are left out of pydantic's sight when a request is read (`inputs` checks them): it would take
longer over their numbers than the model does.
"""

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from model_store.acquisition.choice import ACQUISITIONS, LEAST_BETA, MOST_BETA
from model_store.errors import MOST_ERRORS
from model_store.inference.noise import MAX_SEED

Probability = Annotated[float, Field(gt=0, lt=1)]
Acquisition = Literal[*dict.fromkeys(name for names in ACQUISITIONS.values() for name in names)]

Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"})]  # RFC 3339, in UTC

AT_LEAST_ONE: dict[str, Any] = {"minItems": 1}  # of rows, which are not looked at here

# A three of scikit-learn's digits, so that the examples work when pasted against the digits model.
EXAMPLE_ROW: list[Any] = [
    int(pixel, 16) for pixel in "007fd10008d6f400021dd000002fb1000001cc1000001a8000845e90007dd900"
]
EXAMPLE_NOISE: list[Any] = [(i * 7 + (i * i) % 11) % 17 for i in range(64)]


def _first_wrong(values: Any) -> Any:
    """Leave only the first wrong value of a mapping to numbers, so that one error is made of it."""
    if isinstance(values, dict):
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                return {name: value}
    return values


Priors = Annotated[dict[str, float], BeforeValidator(_first_wrong)]


def leave_few_unknown(kind: type[BaseModel], content: dict[str, Any]) -> dict[str, Any]:
    """Return content with the first of its unknown fields alone: pydantic makes an object of each,
    a kilobyte long, with the interpreter held."""
    known = {name: content[name] for name in kind.model_fields if name in content}
    unknown = (name for name in content if name not in kind.model_fields)
    return known | {name: content[name] for name in islice(unknown, MOST_ERRORS)}


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelRequest(RequestModel):
    """What every request to a model may say."""

    model: str | None = None
    """a published model; may be left out where there is one"""

    version: str = "latest"
    """a version number or an alias"""

    deadline_s: float | None = Field(default=None, gt=0, le=86_400)
    """answer 504 if there is no answer within this time"""

    encoded: bool = False
    """of a model of columns: rows are numbers as its columns are encoded, and no objects"""


class QueryModel(BaseModel):
    """The parameters of a query: unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ModelQuery(ModelRequest):
    """Which model a request is about, in its query."""

    model_config = ConfigDict(strict=False)


class Envelope(ModelRequest):
    """What /predict and /acquire requests share."""

    num_samples: int | None = Field(default=None, ge=1)
    """posterior draws; by default the model's own number"""

    priors: Priors | None = None
    """shares of all classes among the rows, which sum to 1, if they are not those of the training
    data: probabilities and all that follows from them are turned by Bayes' rule. Not of a
    regression"""

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """replays the draws of that seed; absent means fresh draws"""


class PredictRequest(Envelope):
    """A request to predict rows."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": [EXAMPLE_ROW]},
                {
                    "model": "digits",
                    "version": "latest",
                    "inputs": [EXAMPLE_ROW, EXAMPLE_NOISE],
                    "num_samples": 100,
                    "seed": 7,
                    "fpr": 0.05,
                    "coverage": 0.95,
                    "risk": 0.05,
                },
                {"inputs": [EXAMPLE_ROW, EXAMPLE_NOISE], "fdr": 0.1},
                {
                    "inputs": [EXAMPLE_ROW],
                    "priors": {str(digit): 0.55 if digit == 8 else 0.05 for digit in range(10)},
                },
                {"inputs": [EXAMPLE_ROW, EXAMPLE_NOISE], "coverage": 0.9, "confidence": 0.95},
                {"inputs": [EXAMPLE_NOISE], "explain": True},
            ]
        }
    )

    inputs: list[Any] = Field(json_schema_extra=AT_LEAST_ONE)
    """rows, flat or in the model's input shape, in the units of its data; for a model of columns
    objects keyed by column; for a model of images also base64 of PNG, JPEG, WebP or BMP files, for
    one of text also strings"""

    fpr: Probability | None = None
    """false-positive rate at which the flag fires; by default 0.05"""

    fdr: Probability | None = None
    """in place of `fpr`: false discovery rate at which the flags of all rows are decided
    together"""

    coverage: Probability = 0.95
    """probability with which a row's prediction set or interval holds the truth"""

    confidence: Probability | None = None
    """probability, over the choice of the calibration rows, with which `coverage` is kept; by
    default it is kept on average over that choice"""

    risk: Probability | None = None
    """abstain where the probability that a label is wrong would otherwise exceed this; by default
    the level that the model was published with, if any. Not of a regression"""

    groups: Annotated[list[str], Field(fail_fast=True)] | None = None
    """of a model that is calibrated by group: the group of each row; a row of an unknown one, and
    all rows where it is left out, are judged by the most cautious of all groups"""

    return_samples: bool = False
    """also each draw's probabilities, or its mean and standard deviation"""

    explain: bool = False
    """also what made each row strange: detectors, and columns or pixels, by what they add to the
    flag's statistic, unseen categories, missing values, and the nearest training rows"""


class PredictJobRequest(PredictRequest):
    """A request to predict the rows of a file of any size, in its own time."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": [EXAMPLE_ROW, EXAMPLE_NOISE], "format": "npz"}]}
    )

    inputs: list[Any] = []
    """rows, as of /predict, unless there is an `inputs_file`"""

    inputs_file: str | None = None
    """a file in the operator's folder of pools: npy, npz, parquet, csv, or a zip of files"""

    ids: Annotated[list[str], Field(fail_fast=True)] | None = None
    """a different name for each row, which the result repeats"""

    format: Literal["npz", "parquet"] = "npz"
    """of the result"""


class AcquireRequest(Envelope):
    """A request to rank an unlabelled pool."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "pool": [EXAMPLE_ROW, EXAMPLE_NOISE],
                    "ids": ["a three", "noise"],
                    "k": 1,
                    "seed": 7,
                }
            ]
        }
    )

    pool: list[Any] = []
    """rows, as `inputs` of /predict, unless there is a `pool_file`"""

    pool_file: str | None = None
    """a file in the operator's folder of pools: npy, npz, parquet, csv, or a zip of files"""

    ids: Annotated[list[str], Field(fail_fast=True)] | None = None
    """a different name for each row; by default its index. Decides ties and what is random"""

    k: int = Field(default=10, ge=1)
    """how many rows to rank; a smaller pool is ranked whole"""

    race: float | None = Field(default=None, ge=1e-6, lt=1)
    """rows that cannot be among the k best take a tenth or a quarter of the draws; the probability
    with which one that can be is left out. By default all rows take all draws"""

    beta: float | None = Field(default=None, ge=LEAST_BETA, le=MOST_BETA)
    """of `power_bald`: rows are taken by chance, with BALD to this power as their weights; 1 by
    default. The larger, the more BALD decides"""

    exclude_labelled: bool = True
    """leave out rows whose id has a label already; without `ids` there are none"""

    keep: bool = False
    """keep the rows that are answered on the service's disk, so that a label needs their id alone;
    needs `ids`"""

    control: Annotated[float, Field(ge=0, le=1)] = 0.0
    """the share of the k rows that are not chosen but set aside at random, to judge the model by on
    live data; needs `keep`. Keep to one share for a model"""

    acquisition: Acquisition = Field(
        default="bald",
        description="what to choose rows by; where it is left out, that of a regression is "
        "`epistemic_variance`. "
        + "; ".join(f"a model of {task} has {', '.join(of)}" for task, of in ACQUISITIONS.items()),
    )


class PreviewRequest(ModelRequest):
    """A request to show rows of a file."""

    rows: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] = Field(
        default=list(range(10)), max_length=1000
    )
    """which rows to show, by index; those that the file has not are left out"""


LabelText = Annotated[str, Field(min_length=1, max_length=1000)]


class LabelEntry(RequestModel):
    """A label, or of a regression a target, and the row where it was not kept when it was
    acquired."""

    @model_validator(mode="before")
    @classmethod
    def _leave_few_unknown(cls, content: Any) -> Any:
        has_more = isinstance(content, dict) and len(content) > len(cls.model_fields)
        return leave_few_unknown(cls, content) if has_more else content

    id: str
    """of the row"""

    label: LabelText | None = None
    """one of the model's classes"""

    target: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """of a regression"""

    input: Any = None
    """the row, as one of `inputs` of /predict, if it was not kept"""


EXAMPLE_LABEL: dict[str, Any] = {"id": "a three", "label": "3", "input": EXAMPLE_ROW}


class LabelsRequest(RequestModel):
    """A request to keep labels: all of them, or none."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "digits", "labels": [EXAMPLE_LABEL]}]}
    )

    model: str | None = None
    """a published model; may be left out where there is one"""

    labels: Annotated[list[LabelEntry], Field(fail_fast=True)] = Field(min_length=1)
    """of rows with different ids"""

    replace: bool = False
    """whether a label may take the place of another"""

    encoded: bool = False
    """whether rows are numbers as a model of columns encodes them, as of /predict"""


class LabelsAnswer(BaseModel):
    """The answer of POST /labels: how many were new, known, and in place of another; and how many
    there are."""

    model: str
    accepted: int
    known: int
    replaced: int
    labels: int


class LabelsQuery(QueryModel):
    """Which labels are listed."""

    model: str | None = None
    """a published model; may be left out where there is one"""

    annotator: str | None = None
    """only those that came with the key of this name"""

    after: int = Field(default=0, ge=0, lt=1 << 63)
    """`next` of the answer before"""

    limit: int = Field(default=1000, ge=1, le=10_000)
    """how many, at most"""


class KeptLabel(BaseModel):
    """A label that is kept; `annotator` is the name of the key that it came with."""

    id: str
    label: str | None
    target: float | None
    annotator: str | None
    time: Moment
    control: bool


class LabelListAnswer(BaseModel):
    """The answer of GET /labels; `next` is null where these are the last."""

    model: str
    labels: list[KeptLabel]
    next: int | None


class LabelsDeletion(RequestModel):
    """A request to delete labels: all that are there."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "digits", "ids": ["mine"]}]}
    )

    model: str | None = None
    """a published model; may be left out where there is one"""

    ids: Annotated[list[str], Field(fail_fast=True)] = Field(min_length=1)
    """of the rows"""


class LabelsDeletedAnswer(BaseModel):
    """The answer of POST /labels/delete: how many were there, and how many are left."""

    model: str
    deleted: int
    labels: int


class FigureAnswer(BaseModel):
    """A figure and its 95 % interval."""

    value: float
    interval: Annotated[list[float], Field(min_length=2, max_length=2)]


class LiveAnswer(BaseModel):
    """How good a version was on control rows that it set aside. Figures are null where there are
    too few of them."""

    version: str
    serving: bool
    control_labels: int
    figures: dict[str, FigureAnswer] | None


class CandidateAnswer(BaseModel):
    """What became of a candidate; `control` are figures of it and of the version it was compared
    with."""

    version: str
    against: str
    labels: int
    control_labels: int
    promoted: bool
    time: Moment
    why: str
    control: dict[str, Any] | None
    lost: dict[str, Any] | None = None


class LabelFiguresAnswer(BaseModel):
    """The answer of GET /models/{name}/labels. What is null is named in `null_because`, with the
    reason."""

    model: str
    acquired: int
    waiting: int
    labels: int
    control_labels: int
    live: list[LiveAnswer]
    candidates: list[CandidateAnswer]
    null_because: dict[str, str]


class RankedRow(BaseModel):
    """A row of the pool; one that is set aside as `control` has no score."""

    rank: int
    index: int
    id: str
    score: float | None
    control: bool


class AcquireAnswer(BaseModel):
    """The answer of /acquire."""

    model: str
    version: str
    acquisition: str
    num_samples: int
    seed: int
    pool_size: int
    excluded: int | None
    priors: dict[str, float] | None
    race: float | None
    beta: float | None
    finalists: int | None
    unknown_categories: dict[str, int]
    ranking: list[RankedRow]


class PreviewRow(BaseModel):
    """A row of a file: an object of a model of columns, a text of its beginning, an image file in
    base64, else numbers."""

    index: int
    id: str
    row: dict[str, Any] | list[float] | str


class PreviewAnswer(BaseModel):
    """The answer of /acquire/preview."""

    model: str
    version: str
    rows: int
    read_as: str
    ignored_columns: list[str]
    preview: list[PreviewRow]


class ExamplesAnswer(BaseModel):
    """The answer of /predict/examples: rows as /predict takes them."""

    model: str
    version: str
    inputs: list[dict[str, Any] | list[Any]]


class ListQuery(QueryModel):
    limit: int | None = Field(default=None, ge=1, le=10_000)
    """how many, at most"""


class JobsQuery(ListQuery):
    """Which jobs are listed."""

    after: int | None = Field(default=None, ge=0, lt=1 << 63)
    """`next` of the answer before"""


class ModelsQuery(ListQuery):
    """Which models are listed."""

    after: str | None = None
    """`next` of the answer before"""


class JobAnswer(BaseModel):
    """A job: work on a pool that goes on after the request for it."""

    id: str
    kind: Literal["acquire", "predict", "candidate"]
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    model: str
    version: str
    rows: int
    num_samples: int
    seed: int
    read_as: str
    ignored_columns: list[str]
    progress: float
    worked_s: float
    seconds_left: float | None
    created: Moment
    begun: Moment | None
    ended: Moment | None
    expires: Moment | None
    error: str | None
    result: str | None


class JobsAnswer(BaseModel):
    """The jobs that a key asked for, the latest first. With a `limit` also `next`: null where these
    are the last."""

    jobs: list[JobAnswer]
    next: int | None = None


class FieldProblem(BaseModel):
    """A field that is not as it should be: `detail` says what was expected and what came."""

    field: str
    detail: str


class Problem(BaseModel):
    """An error (RFC 9457). `type` leads to what its `code` means; `field` is null where it is about
    none, and `errors` are of all fields that were found wrong, at most ten."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    field: str | None
    errors: list[FieldProblem]
