"""Options of requests. The service chooses those that are left out; see its `docs/api.md`."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

URL = "http://127.0.0.1:8000"  # of the service, by default


class _Common(TypedDict, total=False):
    """Options of all requests with rows."""

    model: str
    """A published model; optional if the service has only one."""
    version: str
    """A version number or an alias; `latest` by default."""
    num_samples: int
    """Posterior draws; the model's own number by default."""
    seed: int
    """Replays the draws of that seed; fresh draws by default."""
    priors: Mapping[str, float]
    """Class shares among these rows, if they differ from the training data."""
    encoded: bool
    """For tables: whether rows are encoded numbers instead of objects."""


class PredictJobOptions(_Common, total=False):
    """Options of `predict_job`."""

    fpr: float
    """False-positive rate at which the flag fires; .05 by default."""
    fdr: float
    """Instead: false discovery rate for the flags of all rows together."""
    coverage: float
    """Probability with which a row's prediction set or interval holds the truth; .95 by default."""
    confidence: float
    """Probability with which `coverage` is kept by this model's calibration rows; on average by
    default."""
    risk: float
    """Largest share of wrong labels among the rows that are answered; others have `abstain`
    true."""
    groups: Sequence[str]
    """The group of each row, of a model that is calibrated by group."""


class PredictOptions(PredictJobOptions, total=False):
    """Options of `predict`."""

    return_samples: bool
    """Whether to return each draw: `samples`, for regression `samples.mean` and `samples.std`."""
    explain: bool
    """Whether to explain each row: the arrays `explanation.*`."""


Acquisition = Literal[
    "bald",
    "bald_corrected",
    "batchbald",
    "entropy",
    "epistemic_variance",
    "max_det",
    "mean_std",
    "power_bald",
    "random",
    "variance",
    "variation_ratio",
]


class AcquireOptions(_Common, total=False):
    """Options of `acquire` and `acquire_job`."""

    ids: Sequence[str]
    """A different name for each row; its index by default. In place of a file's own."""
    acquisition: Acquisition
    """What to choose by: `bald` by default, of a regression `epistemic_variance`."""
    race: float
    """Rows that cannot be among the best take fewer draws; the probability with which one that can
    is left out."""
    beta: float
    """Of `power_bald`: rows are taken by chance, with BALD to this power as their weights; 1 by
    default."""
    exclude_labelled: bool
    """Whether rows whose id has a label are left out; true by default."""
    keep: bool
    """Whether the service keeps the rows that it answers, so that a label needs their id alone.
    Needs ids."""
    control: float
    """The share of the k rows that are set aside at random, to judge the model by. Needs `keep`."""
