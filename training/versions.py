"""Published versions as inputs to training, and their provenance.

The provenance is stored under `training` in `manifest.json`.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from model_store.artifacts.manifest import TOKENIZER, Description, Manifest
from model_store.artifacts.store import LATEST, Artifact, ModelStore
from model_store.errors import InvalidInput, StoreError
from model_store.sources.columns import Columns
from training import silence
from training.data import load
from training.data.cells import RawTable
from training.data.rows import Dataset, renumber
from training.recipe import Recipe, override

if TYPE_CHECKING:
    from torch import Tensor

    from training.bayes.network import BayesianModel

WEIGHTS = "weights.safetensors"


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


@dataclass(frozen=True)
class Parent:
    manifest: Manifest
    recipe: Recipe
    weights: bytes
    tokenizer: bytes | None = None

    @property
    def label(self) -> str:
        return self.manifest.label

    @property
    def provenance(self) -> ParentVersion:
        return ParentVersion(name=self.manifest.name, version=self.manifest.version)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.manifest.classes or ()

    def complete(self, recipe: Recipe) -> Recipe:
        """Fill in posterior keys that are missing from a recipe with the same method."""
        if recipe.method != self.recipe.method:
            return recipe
        explicit = recipe.posterior.model_fields_set
        inherited = self.recipe.posterior.model_dump(exclude=explicit)
        posterior = recipe.posterior.model_copy(update=inherited)
        return recipe.model_copy(update={"posterior": posterior})

    def model(self) -> "BayesianModel":
        from safetensors.torch import load

        from training.model import build
        from training.networks.architectures import load_state

        encoder = self.manifest.encoder
        encoded = None if encoder is None else encoder.outputs
        model = build(self.recipe, self.manifest.input.shape, len(self.classes), encoded=encoded)
        load_state(model, load(self.weights), "network", f"the network of {self.label}")
        return model

    def network_weights(self) -> "dict[str, Tensor]":
        from training.networks.networks import MemberNetwork

        network = self.model().network
        assert isinstance(network, MemberNetwork)
        return network.members[0].state_dict()


def open_parent(store: ModelStore, text: str, field: str) -> Parent:
    """Open a version given as NAME[:VERSION], where VERSION is a number or an alias."""
    artifact = open_version(store, text, (WEIGHTS, TOKENIZER))
    refuse_derived(artifact.manifest, "pruned", field)
    return load_parent(artifact, field)


def load_parent(artifact: Artifact, field: str) -> Parent:
    recipe, files = read_recipe(artifact.manifest, field), artifact.files
    return Parent(artifact.manifest, recipe, files[WEIGHTS], files.get(TOKENIZER))


def open_version(store: ModelStore, text: str, files: tuple[str, ...]) -> Artifact:
    name, _, version = text.partition(":")
    return store.open(name, store.resolve(name, version or LATEST), files)


def read_recipe(manifest: Manifest, field: str) -> Recipe:
    try:
        return Recipe.model_validate(Provenance.of(manifest).recipe)
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"]) or "no recipe"
        expected = "a version whose recipe has only current keys"
        raise InvalidInput(field, expected, f"{manifest.label}: {key}") from None


def refuse_derived(
    manifest: Manifest, derivation: Literal["pruned", "recalibrated"], field: str
) -> None:
    facts = Provenance.of(manifest)
    parent = facts.pruned if derivation == "pruned" else facts.recalibrated
    if parent is not None:
        expected = f"a version that was not {derivation}"
        actual = f"{manifest.label}, {derivation} from {parent.name} version {parent.version}"
        raise InvalidInput(field, expected, actual)


def match_version(data: Dataset, manifest: Manifest, field: str) -> Dataset:
    """Renumber classes to match a version, and check the input shape and the ids."""
    data, spec = renumber(data, manifest.classes or ()), manifest.input
    if data.shape != spec.shape:
        expected = f"rows of shape {spec.shape}, the input of {manifest.label}"
        raise InvalidInput(field, expected, f"{data.shape}")
    if spec.takes_ids and data.maximum > spec.maximum:
        expected = f"ids up to {spec.maximum:.0f}, the largest of {manifest.label}"
        raise InvalidInput(field, expected, f"{data.maximum:.0f}")
    return data


def load_for(
    recipe: Recipe, root: Path, start: Parent | None, raw: RawTable | None = None
) -> Dataset:
    if start is None:
        return load(recipe, root, raw=raw)
    if start.recipe.task != recipe.task:
        raise InvalidInput("task", f"{start.recipe.task}, the task of {start.label}", recipe.task)
    data = load(recipe, root, start.manifest.input.columns, start.tokenizer, raw)
    return renumber(data, start.classes)


def load_unfitted(recipe: Recipe, root: Path, columns: Columns, tokenizer: bytes | None) -> Dataset:
    """Load other data in the format that the model's recipe expects.

    The data are not split, so ids are optional and all rows can belong to one group.
    """
    section = recipe.data
    keys = section.id, section.group, section.weight
    ignored: dict[str, Any] = {name: "ignored" for name in keys if name}
    changes: dict[str, Any] = dict.fromkeys(("id", "group", "weight"))
    changes |= {"calibration_group": section.group_column, "columns": ignored | section.columns}
    recipe = recipe.model_copy(update={"data": section.model_copy(update=changes)})
    return load(recipe, root, columns, tokenizer)


def fitted_data(parent: Parent, root: Path, source: str | None = None) -> Dataset:
    """Load the data that a version was fitted on.

    Raises:
        InvalidInput: if the data are missing or have changed. Splits of changed data could mix the
            model's training and test rows.
    """
    recipe = parent.recipe if source is None else override(parent.recipe, source=source)
    data = load_for(recipe, root, parent)
    digest = Provenance.of(parent.manifest).data_digest
    if data.digest() != digest:
        expected = f"the rows that {parent.label} was fitted on, with SHA-256 {str(digest)[:12]}..."
        actual = f"{data.digest()[:12]}... in {recipe.data.source}"
        raise InvalidInput("data.source", expected, actual)
    return data


def load_if_fitted(parent: Parent, root: Path, source: str) -> Dataset | None:
    """Load a source, or return None if the version was fitted on other data."""
    with silence(), suppress(InvalidInput):
        return fitted_data(parent, root, source)
    return None


def manifests(store: ModelStore, name: str) -> Iterator[Manifest]:
    """Yield the manifests of a model's intact versions, newest first."""
    for version in reversed(store.versions(name)):
        try:
            yield store.manifest(name, version)
        except StoreError:
            continue
