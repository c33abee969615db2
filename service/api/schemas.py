"""Models of requests and answers, for validation and the OpenAPI document.

Pydantic does not validate rows, which would take longer than the model does; `rows.py` checks them.
"""

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from model_store.acquisition.choice import ACQUISITIONS, MAX_BETA, MIN_BETA
from model_store.errors import MAX_ERRORS
from model_store.inference.noise import MAX_SEED

Probability = Annotated[float, Field(gt=0, lt=1)]
Acquisition = Literal[*dict.fromkeys(name for names in ACQUISITIONS.values() for name in names)]

Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"})]  # RFC 3339, in UTC

AT_LEAST_ONE: dict[str, Any] = {"minItems": 1}  # row; other code validates rows

# A three of scikit-learn's digits, so that the examples work with the digits model.
EXAMPLE_ROW: list[Any] = [
    int(pixel, 16) for pixel in "007fd10008d6f400021dd000002fb1000001cc1000001a8000845e90007dd900"
]
EXAMPLE_NOISE: list[Any] = [(i * 7 + (i * i) % 11) % 17 for i in range(64)]


def _first_wrong(values: Any) -> Any:
    """Keep only the first wrong value of a mapping to numbers, for a single error."""
    if isinstance(values, dict):
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                return {name: value}
    return values


Priors = Annotated[dict[str, float], BeforeValidator(_first_wrong)]


def drop_extra_unknown(kind: type[BaseModel], content: dict[str, Any]) -> dict[str, Any]:
    """Keep only the first unknown fields: pydantic creates an error of a kilobyte for each."""
    known = {name: content[name] for name in kind.model_fields if name in content}
    unknown = (name for name in content if name not in kind.model_fields)
    return known | {name: content[name] for name in islice(unknown, MAX_ERRORS)}


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelRequest(RequestModel):
    """Fields of every request to a model."""

    model: str | None = None
    """a published model; optional if there is only one"""

    version: str = "latest"
    """a version number or an alias"""

    deadline_s: float | None = Field(default=None, gt=0, le=86_400)
    """seconds after which the answer is 504"""

    encoded: bool = False
    """for models of columns: rows are encoded numbers instead of objects"""


class QueryModel(BaseModel):
    """Parameters of a query. Unknown ones are rejected."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ModelQuery(ModelRequest):
    """A model, named in the query."""

    model_config = ConfigDict(strict=False)


class Envelope(ModelRequest):
    """Common fields of /predict and /acquire requests."""

    num_samples: int | None = Field(default=None, ge=1)
    """posterior draws; the model's own number by default"""

    priors: Priors | None = None
    """shares of all classes among the rows, which sum to 1, if they differ from the training data:
    Bayes' rule then corrects the probabilities. Classification only"""

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """replay the draws of this seed; fresh draws by default"""


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
    """rows in the units of the training data, flat or in the model's input shape; objects keyed by
    column for models of columns; also base64 of PNG, JPEG, WebP or BMP files for models of images,
    and strings for models of text"""

    fpr: Probability | None = None
    """false-positive rate of the flag; 0.05 by default"""

    fdr: Probability | None = None
    """instead of `fpr`: false discovery rate of the flags of all rows together"""

    coverage: Probability = 0.95
    """probability that a row's prediction set or interval contains the truth"""

    confidence: Probability | None = None
    """probability, over the choice of calibration rows, that `coverage` holds; by default it holds
    on average over that choice"""

    risk: Probability | None = None
    """abstain if the probability of a wrong label would otherwise exceed this; by default the level
    that the model was published with, if any. Classification only"""

    groups: Annotated[list[str], Field(fail_fast=True)] | None = None
    """the group of each row, for models calibrated by group; rows of unknown groups, and all rows
    by default, are judged by the most cautious group"""

    return_samples: bool = False
    """also return each draw's probabilities, or its mean and standard deviation"""

    explain: bool = False
    """also explain each row's flag: shares of detectors and of columns or pixels in its statistic,
    unseen categories, missing values, and the nearest training rows"""


class PredictJobRequest(PredictRequest):
    """A request to predict the rows of a file of any size in the background."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": [EXAMPLE_ROW, EXAMPLE_NOISE], "format": "npz"}]}
    )

    inputs: list[Any] = []
    """rows, as in /predict, unless there is an `inputs_file`"""

    inputs_file: str | None = None
    """a file in the operator's folder of pools: npy, npz, parquet, csv, or a zip of files"""

    ids: Annotated[list[str], Field(fail_fast=True)] | None = None
    """unique names of the rows, repeated in the result"""

    format: Literal["npz", "parquet"] = "npz"
    """format of the result"""


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
    """rows, as `inputs` in /predict, unless there is a `pool_file`"""

    pool_file: str | None = None
    """a file in the operator's folder of pools: npy, npz, parquet, csv, or a zip of files"""

    ids: Annotated[list[str], Field(fail_fast=True)] | None = None
    """unique names of the rows, their indices by default. Ties and randomness depend on them"""

    k: int = Field(default=10, ge=1)
    """number of rows to rank; a smaller pool is ranked completely"""

    race: float | None = Field(default=None, ge=1e-6, lt=1)
    """probability of missing one of the k best rows, in exchange for fewer draws: rows that are
    unlikely to be among them take a tenth or a quarter. By default all rows take all draws"""

    beta: float | None = Field(default=None, ge=MIN_BETA, le=MAX_BETA)
    """for `power_bald`: rows are drawn at random, weighted by BALD to this power; 1 by default.
    Larger values follow BALD more closely"""

    exclude_labelled: bool = True
    """leave out rows whose id has a label already; needs `ids`"""

    keep: bool = False
    """store the ranked rows, so that their labels need only the id; needs `ids`"""

    control: Annotated[float, Field(ge=0, le=1)] = 0.0
    """share of the k rows that is drawn at random, to measure the model on live data; needs `keep`.
    Use one share for a model"""

    acquisition: Acquisition = Field(
        default="bald",
        description="the score that ranks rows; `epistemic_variance` by default for regression. "
        + "; ".join(f"for {task}: {', '.join(names)}" for task, names in ACQUISITIONS.items()),
    )


class PreviewRequest(ModelRequest):
    """A request to show rows of a file."""

    rows: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] = Field(
        default=list(range(10)), max_length=1000
    )
    """indices of the rows to show; unknown ones are left out"""


LabelText = Annotated[str, Field(min_length=1, max_length=1000)]


class LabelEntry(RequestModel):
    """A label, or a target for regression, and the row unless it was kept by /acquire."""

    @model_validator(mode="before")
    @classmethod
    def _leave_few_unknown(cls, content: Any) -> Any:
        has_more = isinstance(content, dict) and len(content) > len(cls.model_fields)
        return drop_extra_unknown(cls, content) if has_more else content

    id: str
    """id of the row"""

    label: LabelText | None = None
    """one of the model's classes"""

    target: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """for regression"""

    input: Any = None
    """the row, as in `inputs` of /predict, if it was not kept"""


EXAMPLE_LABEL: dict[str, Any] = {"id": "a three", "label": "3", "input": EXAMPLE_ROW}


class LabelsRequest(RequestModel):
    """A request to keep labels, all or none."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "digits", "labels": [EXAMPLE_LABEL]}]}
    )

    model: str | None = None
    """a published model; optional if there is only one"""

    labels: Annotated[list[LabelEntry], Field(fail_fast=True)] = Field(min_length=1)
    """labels of rows with different ids"""

    replace: bool = False
    """whether labels may replace earlier ones"""

    encoded: bool = False
    """whether rows are encoded numbers, as in /predict"""


class LabelsAnswer(BaseModel):
    """The answer of POST /labels: the numbers of new, known, replaced and all labels."""

    model: str
    accepted: int
    known: int
    replaced: int
    labels: int


class LabelsQuery(QueryModel):
    """Which labels to list."""

    model: str | None = None
    """a published model; optional if there is only one"""

    annotator: str | None = None
    """only labels sent with the key of this name"""

    after: int = Field(default=0, ge=0, lt=1 << 63)
    """`next` of the previous answer"""

    limit: int = Field(default=1000, ge=1, le=10_000)
    """maximum number"""


class KeptLabel(BaseModel):
    """A stored label; `annotator` is the name of its key."""

    id: str
    label: str | None
    target: float | None
    annotator: str | None
    time: Moment
    control: bool


class LabelListAnswer(BaseModel):
    """The answer of GET /labels; `next` is null if these are the last."""

    model: str
    labels: list[KeptLabel]
    next: int | None


class LabelsDeletion(RequestModel):
    """A request to delete labels."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "digits", "ids": ["mine"]}]}
    )

    model: str | None = None
    """a published model; optional if there is only one"""

    ids: Annotated[list[str], Field(fail_fast=True)] = Field(min_length=1)
    """ids of the rows"""


class LabelsDeletedAnswer(BaseModel):
    """The answer of POST /labels/delete: the numbers of deleted and remaining labels."""

    model: str
    deleted: int
    labels: int


class FigureAnswer(BaseModel):
    """A figure and its 95 % interval."""

    value: float
    interval: Annotated[list[float], Field(min_length=2, max_length=2)]


class LiveAnswer(BaseModel):
    """Figures of a version on its control rows; null if there are too few rows."""

    version: str
    serving: bool
    control_labels: int
    figures: dict[str, FigureAnswer] | None


class CandidateAnswer(BaseModel):
    """The fate of a candidate; `control` has its figures and those of the compared version."""

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
    """A row of the pool; a control row has no score."""

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
    """A row of a file: an object for columns, the beginning of a text, base64 of an image file, or
    numbers."""

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
    """The answer of /predict/examples: rows for /predict."""

    model: str
    version: str
    inputs: list[dict[str, Any] | list[Any]]


class ListQuery(QueryModel):
    limit: int | None = Field(default=None, ge=1, le=10_000)
    """maximum number"""


class JobsQuery(ListQuery):
    """Which jobs to list."""

    after: int | None = Field(default=None, ge=0, lt=1 << 63)
    """`next` of the previous answer"""


class ModelsQuery(ListQuery):
    """Which models to list."""

    after: str | None = None
    """`next` of the previous answer"""


class JobAnswer(BaseModel):
    """A job: work on a pool in the background."""

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
    """The jobs of a key, the latest first. With a `limit` also `next`: null if these are the
    last."""

    jobs: list[JobAnswer]
    next: int | None = None


class FieldProblem(BaseModel):
    """An invalid field; `detail` has the expected and the received value."""

    field: str
    detail: str


class Problem(BaseModel):
    """An error (RFC 9457). `type` links to the meaning of `code`; `field` is null if no field is
    wrong, and `errors` lists up to ten wrong fields."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    field: str | None
    errors: list[FieldProblem]
