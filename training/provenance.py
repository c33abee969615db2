"""A version's provenance, stored under `training` in `manifest.json`."""

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
    """The number of weights and the size in bytes, before and after pruning."""

    fraction: float
    weights: int
    kept_weights: int
    parent_bytes: int
    bytes: int


class Recalibration(ParentVersion):
    """The rows that replaced the original calibration split."""

    source: str
    target: str | None = None
    rows: int
    test_rows: int
    seed: int
    data_digest: str


class TemperatureChoice(Record):
    value: float  # `fitted` or 1
    fitted: float  # optimum on validation rows
    gain: float  # of the cross-validated log-likelihood, in nats per row
    standard_error: float


class TransformChoice(Record):
    chosen: str
    log_likelihood: dict[str, float]  # of validation rows, in nats per row
    rmse: dict[str, float] | None = None


class AddedLabels(Record):
    rows: int
    digest: str  # of all labels, including control rows
    left_out: dict[str, int]  # row counts by reason


class Provenance(Record):
    run: str | None = None  # unique token of the run
    recipe: dict[str, Any] | None = None
    rows: dict[str, int] | None = None
    epochs: int | None = None
    stopped: str | None = None  # reason for the end of the fit
    choose: str | None = None  # criterion of the best checkpoint
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

    def derived(self, **facts: Any) -> "Provenance":
        """Return a derived version's provenance, excluding its parent's training run."""
        content = {name: value for name, value in self.content().items() if name != "run"}
        return Provenance.model_validate({**content, **facts})
