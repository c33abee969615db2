"""Pydantic request models that several routes share.

`rows.py` validates rows instead, because pydantic would take longer than the prediction.
"""

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from model_store.acquisition.choice import ACQUISITIONS, MAX_BETA, MIN_BETA
from model_store.errors import MAX_ERRORS
from model_store.inference.noise import MAX_SEED

Probability = Annotated[float, Field(gt=0, lt=1)]
Acquisition = Literal[*dict.fromkeys(name for names in ACQUISITIONS.values() for name in names)]

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]  # RFC 3339, in UTC

NOT_EMPTY: dict[str, Any] = {"minItems": 1}  # documented here, checked elsewhere

# The digit 3 from scikit-learn's digits
EXAMPLE_ROW: list[Any] = [
    int(pixel, 16) for pixel in "007fd10008d6f400021dd000002fb1000001cc1000001a8000845e90007dd900"
]


# `resolve_priors` checks the numbers, because pydantic would report an error for each.
Priors = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})
]


def drop_extra_unknown(kind: type[BaseModel], content: dict[str, Any]) -> dict[str, Any]:
    """Drop all but the first ten unknown fields. Each of them adds a kilobyte of errors."""
    known = {name: content[name] for name in kind.model_fields if name in content}
    unknown = (name for name in content if name not in kind.model_fields)
    return known | {name: content[name] for name in islice(unknown, MAX_ERRORS)}


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelNameRequest(RequestModel):
    model: str | None = None
    """name of a published model; optional if there is only one"""


class ModelRequest(ModelNameRequest):
    """The fields common to all requests to a model."""

    version: str = "latest"
    """version number or alias"""

    deadline_s: float | None = Field(default=None, gt=0, le=86_400)
    """time limit in seconds, after which the service responds with 504"""


class Envelope(ModelRequest):
    """The fields common to /predict and /acquire requests."""

    num_samples: int | None = Field(default=None, ge=1)
    """number of posterior draws; by default the number that the version was published with"""

    priors: Priors | None = None
    """share of each class among the rows, with a sum of 1. Use them if the shares differ from the
    training data, to correct the probabilities by Bayes' rule. Classification only"""

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """seed of the draws, to reproduce a response; random by default"""

    missing: Literal["flag", "reject"] = "flag"
    """missing values in columns that were complete in training: use the column's usual value and
    set `flag`, or reject the request"""


class PredictRequest(Envelope):
    """A request to predict rows."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": [EXAMPLE_ROW]},
                {"model": "digits", "inputs": [EXAMPLE_ROW], "num_samples": 100, "seed": 7},
            ]
        }
    )

    inputs: list[Any] = Field(json_schema_extra=NOT_EMPTY)
    """rows in the units of the training data, flat or in the model's input shape. Tabular models
    take objects keyed by column. Image models also take base64 PNG, JPEG, WebP or BMP files, and
    text models take strings"""

    fpr: Probability | None = None
    """false-positive rate of the flag; 0.05 by default"""

    fdr: Probability | None = None
    """false discovery rate of all flags in the response, instead of `fpr`"""

    coverage: Probability = 0.95
    """probability that a row's prediction set or interval contains the truth"""

    confidence: Probability | None = None
    """probability that `coverage` holds for the calibration rows in use; by default coverage holds
    on average over calibration splits"""

    risk: Probability | None = None
    """maximum probability of a wrong label among answered rows, enforced by abstention; by default
    the level that the version was published with, if any. Classification only"""

    groups: Annotated[list[str], Field(fail_fast=True)] | None = None
    """group of each row, for models calibrated by group; by default from the row's column. Unknown
    and missing groups use the calibration of the most cautious group"""

    return_samples: bool = False
    """also return the probabilities, or the mean and standard deviation, of each draw"""

    explain: bool = False
    """also explain each flag: contributions of detectors and of columns or pixels, unseen
    categories, missing values, and the nearest training rows"""


class PredictJobRequest(PredictRequest):
    """A request to predict a file of rows in the background."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": [EXAMPLE_ROW], "format": "npz"}]}
    )

    inputs: list[Any] = []
    """rows, as in /predict, unless `inputs_file` is set"""

    inputs_file: str | None = None
    """file in the folder `DUBITO_POOLS`: npy, npz, parquet, csv, or a zip of files"""

    ids: Annotated[list[str], Field(fail_fast=True)] | None = None
    """unique ids of the rows, copied to the result"""

    format: Literal["npz", "parquet"] = "npz"
    """file format of the result"""


class AcquireRequest(Envelope):
    """A request to rank an unlabelled pool."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"pool": [EXAMPLE_ROW], "ids": ["a"], "k": 1, "seed": 7}]}
    )

    pool: list[Any] = []
    """rows, like `inputs` in /predict, unless `pool_file` is set"""

    pool_file: str | None = None
    """file in the folder `DUBITO_POOLS`: npy, npz, parquet, csv, or a zip of files"""

    ids: Annotated[list[str], Field(fail_fast=True)] | None = None
    """unique ids of the rows, by default their indices. Ids break ties and seed random choices"""

    k: int = Field(default=10, ge=1)
    """number of rows to return"""

    race: float | None = Field(default=None, ge=1e-6, lt=1)
    """acceptable probability of missing one of the k best rows. Unlikely rows then use only a tenth
    or a quarter of the draws. By default all rows use all draws"""

    beta: float | None = Field(default=None, ge=MIN_BETA, le=MAX_BETA)
    """exponent of `power_bald`, which samples rows with weights BALD ** beta; 1 by default"""

    exclude_labelled: bool = True
    """skip rows whose id already has a label; needs `ids`"""

    keep: bool = False
    """store the ranked rows, so that labels can refer to them by id; needs `ids`"""

    control: Annotated[float, Field(ge=0, le=1)] = 0.0
    """share of the k rows that are selected at random, to measure live quality; needs `keep`. Use
    the same share in all requests to a model"""

    acquisition: Acquisition = Field(
        default="bald",
        description="ranking score; `epistemic_variance` by default for regression. "
        + "; ".join(f"for {task}: {', '.join(names)}" for task, names in ACQUISITIONS.items()),
    )


class LabelEntry(RequestModel):
    """A label or regression target, with its row unless /acquire has stored it."""

    @model_validator(mode="before")
    @classmethod
    def _drop_extra_unknown(cls, content: Any) -> Any:
        has_more = isinstance(content, dict) and len(content) > len(cls.model_fields)
        return drop_extra_unknown(cls, content) if has_more else content

    id: str
    """row id"""

    label: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """class name"""

    target: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """regression target"""

    input: Any = None
    """row, like an item of `inputs` in /predict, unless /acquire stored it"""

    comment: Annotated[str, Field(max_length=1000)] | None = None
    """remark of the annotator"""


class LabelsRequest(ModelNameRequest):
    """A request to store labels."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"labels": [{"id": "a", "label": "3", "input": EXAMPLE_ROW}]}]
        }
    )

    labels: Annotated[list[LabelEntry], Field(fail_fast=True)] = Field(min_length=1)
    """labels, with unique row ids"""

    replace: bool = False
    """replace earlier labels of the same rows"""


class LabelsDeletion(ModelNameRequest):
    """A request to delete labels."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": ["a"]}]})

    ids: Annotated[list[str], Field(fail_fast=True)] = Field(min_length=1)
    """row ids"""
