"""How a version was made: `training` in `manifest.json`.

What is not known is left out, so a manifest reads as it was written, whichever version of the code
wrote it.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from model_store.artifacts.manifest import Description


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")

    def content(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class ParentVersion(Record):
    name: str
    version: str


class Pruning(ParentVersion):
    """How much is left, and what a request took before and after."""

    fraction: float
    weights: int
    kept_weights: int
    parent_bytes: int
    bytes: int
    parent_request_ms: float
    request_ms: float


class Recalibration(ParentVersion):
    """The rows that a version was calibrated on, in place of those of its fit."""

    source: str
    target: str | None = None
    rows: int
    test_rows: int
    seed: int
    data_digest: str


class TemperatureChoice(Record):
    value: float  # that is used: `fitted`, or 1
    fitted: float  # that the rows ask for
    gain: float  # in log-likelihood on rows that it was not fitted on, nats a row
    standard_error: float


class TransformChoice(Record):
    chosen: str
    # of validation rows, nats a row, of a density in the target's units
    log_likelihood: dict[str, float]
    rmse: dict[str, float] | None = None


class AddedLabels(Record):
    rows: int
    digest: str  # of all labels of the model, control rows' too
    left_out: dict[str, int]  # by reason


class Provenance(Record):
    run: str | None = None  # that published it: no other version has it
    recipe: dict[str, Any] | None = None
    rows: dict[str, int] | None = None
    epochs: int | None = None
    stopped: str | None = None  # why after that many epochs
    choose: str | None = None  # the checkpoint of the best bound, or of the best likelihood
    best_epoch: int | None = None
    steps: int | None = None
    seconds: float | None = None
    parameters: int | None = None
    torch: str | None = None
    device: str | None = None
    warm_start: ParentVersion | None = None
    labels: AddedLabels | None = None
    validation_log_likelihood: float | None = None
    convergence: dict[str, Any] | None = None  # `training.fitting.convergence`
    laplace: dict[str, Any] | None = None  # `training.fitting.laplace`
    temperature: TemperatureChoice | None = None
    target_transform: TransformChoice | None = None
    data_digest: str | None = None
    python: str | None = None
    pruned: Pruning | None = None
    recalibrated: Recalibration | None = None

    @classmethod
    def of(cls, description: Description) -> "Provenance":
        return cls.model_validate(description.training)

    def derived(self, **more: Any) -> "Provenance":
        """Return that of a version made from this one, with more; but not the run that published
        this one."""
        kept = {name: value for name, value in self.content().items() if name != "run"}
        return Provenance.model_validate({**kept, **more})
