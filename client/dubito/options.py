"""Options for requests. See `docs/api.md` for their default values."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

URL = "http://127.0.0.1:8000"


class _Common(TypedDict, total=False):
    """Options shared by all requests with rows."""

    model: str
    """Name of a model; optional if the service has only one."""
    version: str
    """A version number or an alias; `latest` by default."""
    num_samples: int
    """Posterior draws; the default depends on the model."""
    seed: int
    """Seed of the draws, for repeatable answers; random by default."""
    priors: Mapping[str, float]
    """Class shares among these rows, if they differ from the training data."""
    missing: Literal["flag", "reject"]
    """For missing values in columns that were complete in training: use the usual value and flag
    the row (the default), or raise an error."""


class PredictJobOptions(_Common, total=False):
    """Options for `predict_job`."""

    fpr: float
    """False-positive rate of the flag; .05 by default."""
    fdr: float
    """False discovery rate of the flags of all rows together, instead of `fpr`."""
    coverage: float
    """Probability that a prediction set or interval contains the truth; .95 by default."""
    confidence: float
    """Probability that the calibration achieves `coverage`. By default, the average coverage is
    `coverage`."""
    risk: float
    """Maximum share of wrong labels among answered rows. The other rows have `abstain=True`."""
    groups: Sequence[str]
    """Group of each row, if the model is calibrated by group; by default from the row's column."""


class PredictOptions(PredictJobOptions, total=False):
    """Options for `predict`."""

    return_samples: bool
    """Whether to return each draw as `samples`, or `samples.mean` and `samples.std` for
    regression."""
    explain: bool
    """Whether to explain each row in the arrays `explanation.*`."""


Acquisition = Literal[
    "bald",
    "bald_corrected",
    "batchbald",
    "entropy",
    "epistemic_variance",
    "mean_std",
    "power_bald",
    "random",
    "variance",
    "variation_ratio",
]


class AcquireOptions(_Common, total=False):
    """Options for `acquire` and `acquire_job`."""

    ids: Sequence[str]
    """Unique name of each row; its index by default. Replaces the ids in a file."""
    acquisition: Acquisition
    """Score of the ranking: `bald` by default, and `epistemic_variance` for regression."""
    race: float
    """Probability of dropping a row that belongs to the best k. A race drops hopeless rows early,
    to save draws."""
    beta: float
    """For `power_bald`: the exponent of BALD in the sampling weights; 1 by default."""
    exclude_labelled: bool
    """Whether to exclude rows whose id has a label; true by default."""
    keep: bool
    """Whether the service stores the selected rows, so that labels need only their ids. Rows
    without `ids` get ids from their content."""
    control: float
    """Share of the k rows that are selected at random to measure the model. Requires `keep`."""
