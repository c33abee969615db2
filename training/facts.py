"""What a manifest says of how its version was made: `training` in `manifest.json`.

Facts that are not there are left out, so a manifest reads as it was written, whichever version of
the code wrote it.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from model_store.artifacts.manifest import Description


class Facts(BaseModel):
    """A frozen record, written without what was not given."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def content(self) -> dict[str, Any]:
        """Return the facts as the manifest holds them."""
        return self.model_dump(exclude_unset=True)


class VersionFacts(Facts):
    """A version that another was made from."""

    name: str
    version: str


class PruningFacts(VersionFacts):
    """What was pruned: how much is left, and what a request took before and after."""

    fraction: float
    weights: int
    kept_weights: int
    parent_bytes: int
    bytes: int
    parent_request_ms: float
    request_ms: float


class RecalibrationFacts(VersionFacts):
    """What was recalibrated, and the rows that did it."""

    source: str
    target: str | None = None
    rows: int
    test_rows: int
    seed: int
    data_digest: str


class TemperatureFacts(Facts):
    """`training.calibration.temperature.Temperature`."""

    value: float
    fitted: float
    gain: float
    standard_error: float


class TargetFacts(Facts):
    """What transforms of a target were tried: `training.fitting.target_choice`."""

    chosen: str
    log_likelihood: dict[
        str, float
    ]  # of validation rows, nats a row, of a density in the target's units


class LabelFacts(Facts):
    """Labels that came to the service, beside the data: how many were fitted, which, and how many
    were not."""

    rows: int
    digest: str  # of all labels of the model, control rows' too
    left_out: dict[str, int]  # by reason


class TrainingFacts(Facts):
    """How a version was fitted, and what was made of it since."""

    run: str | None = None  # of the run that published it: no other version has it
    recipe: dict[str, Any] | None = None
    rows: dict[str, int] | None = None
    epochs: int | None = None
    stopped: str | None = None  # why after so many epochs
    choose: str | None = None  # the checkpoint of the best bound, or of the best likelihood
    best_epoch: int | None = None
    steps: int | None = None
    seconds: float | None = None
    parameters: int | None = None
    torch: str | None = None
    device: str | None = None
    warm_start: VersionFacts | None = None
    labels: LabelFacts | None = None  # that came to the service: `training.publishing.candidate`
    validation_log_likelihood: float | None = None
    convergence: dict[str, Any] | None = (
        None  # of a variational fit: `training.fitting.convergence`
    )
    laplace: dict[str, Any] | None = None  # of such a posterior: `training.fitting.laplace`
    temperature: TemperatureFacts | None = None
    target_transform: TargetFacts | None = None
    data_digest: str | None = None
    python: str | None = None
    pruned: PruningFacts | None = None
    recalibrated: RecalibrationFacts | None = None

    @classmethod
    def of(cls, description: Description) -> "TrainingFacts":
        """Return what a manifest says."""
        return cls.model_validate(description.training)

    def derived(self, **facts: Any) -> "TrainingFacts":
        """Return the facts of a version made from this one, with more; but not of the run that
        published this one."""
        kept = {name: value for name, value in self.content().items() if name != "run"}
        return TrainingFacts.model_validate({**kept, **facts})
