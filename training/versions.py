"""Published versions that training goes on from."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from model_store.artifacts.manifest import TOKENIZER, Manifest
from model_store.artifacts.store import LATEST, Artifact, ModelStore
from model_store.errors import InvalidInput, StoreError, one_line
from model_store.sources.columns import Columns
from training.data import Dataset, load, renumber, with_classes_of
from training.provenance import ParentVersion, Provenance
from training.recipe import Recipe, from_manifest, override

if TYPE_CHECKING:
    from torch import Tensor

    from training.bayes.network import BayesianModel

WEIGHTS = "weights.safetensors"


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

    def model(self) -> "BayesianModel":
        from safetensors.torch import load

        from training.model import build

        encoder = self.manifest.encoder
        encoded = None if encoder is None else encoder.outputs
        model = build(self.recipe, self.manifest.input.shape, len(self.classes), encoded=encoded)
        try:
            model.load_state_dict(load(self.weights))
        except RuntimeError as error:
            raise InvalidInput("network", f"the network of {self.label}", one_line(error)) from None
        return model

    def network_weights(self) -> "dict[str, Tensor]":
        from training.networks.networks import MemberNetwork

        network = self.model().network
        assert isinstance(network, MemberNetwork)
        return network.members[0].state_dict()


def open_parent(store: ModelStore, text: str, field: str) -> Parent:
    """Return the version that NAME[:VERSION] names; VERSION is a number or an alias, by default
    `latest`."""
    artifact = open_version(store, text, (WEIGHTS, TOKENIZER))
    refuse_made_by(artifact.manifest, "pruned", field)
    return parent_of(artifact, field)


def parent_of(artifact: Artifact, field: str) -> Parent:
    recipe, files = recipe_of(artifact.manifest, field), artifact.files
    return Parent(artifact.manifest, recipe, files[WEIGHTS], files.get(TOKENIZER))


def open_version(store: ModelStore, text: str, wanted: tuple[str, ...]) -> Artifact:
    name, _, version = text.partition(":")
    return store.open(name, store.resolve(name, version or LATEST), wanted)


def recipe_of(manifest: Manifest, field: str) -> Recipe:
    try:
        return from_manifest(Provenance.of(manifest).recipe)
    except (ValidationError, LookupError, TypeError):
        expected = "a version with a recipe of today's keys"
        raise InvalidInput(field, expected, manifest.label) from None


def refuse_made_by(
    manifest: Manifest, derivation: Literal["pruned", "recalibrated"], field: str
) -> None:
    facts = Provenance.of(manifest)
    parent = facts.pruned if derivation == "pruned" else facts.recalibrated
    if parent is not None:
        expected = f"a version that is not {derivation}"
        got = f"{manifest.label}, which is, from {parent.name} version {parent.version}"
        raise InvalidInput(field, expected, got)


def as_taken_by(data: Dataset, manifest: Manifest, field: str) -> Dataset:
    """Return data with the classes of a version, which must take such rows."""
    data, spec = renumber(data, manifest.classes or ()), manifest.input
    if data.shape != spec.shape:
        expected = f"rows of shape {spec.shape}, as {manifest.label} takes them"
        raise InvalidInput(field, expected, f"{data.shape}")
    if spec.takes_ids and data.maximum > spec.maximum:
        expected = f"ids up to {spec.maximum:.0f}, as {manifest.label} takes them"
        raise InvalidInput(field, expected, f"{data.maximum:.0f}")
    return data


def load_for(recipe: Recipe, root: Path, start: Parent | None) -> Dataset:
    if start is None:
        return load(recipe, root)
    if start.recipe.task != recipe.task:
        raise InvalidInput("task", f"{start.recipe.task}, as of {start.label}", recipe.task)
    data = load(recipe, root, start.manifest.input.columns, start.tokenizer)
    return with_classes_of(data, start.classes)


def load_other(recipe: Recipe, root: Path, columns: Columns, tokenizer: bytes | None) -> Dataset:
    """Read other data than those of a fit, all of whose rows are used: they need no ids, and may be
    of one group alone, which no fit could split."""

    def read(without: str | None, **changed: str | None) -> Dataset:
        section = recipe.data
        ignored: dict[str, Any] = {name: "ignored" for name in (section.id, without) if name}
        kinds = {"columns": ignored | section.columns}
        section = section.model_copy(update={"id": None} | changed | kinds)
        return load(recipe.model_copy(update={"data": section}), root, columns, tokenizer)

    try:
        return read(None)
    except InvalidInput as error:
        if error.field != "data.group":
            raise
    group, column = recipe.data.group, recipe.data.group_column
    return read(group, group=None, calibration_group=column)


def fitted_data(parent: Parent, root: Path, source: str | None = None) -> Dataset:
    """Return the data that a version was fitted on, from its recipe's source or another place.

    Raises:
        InvalidInput: if they are not there, or are others: their splits would mix what the model
            was fitted on with what judges it.
    """
    recipe = parent.recipe if source is None else override(parent.recipe, source=source)
    data = load_for(recipe, root, parent)
    digest = Provenance.of(parent.manifest).data_digest
    if data.digest() != digest:
        expected = f"the rows that {parent.label} was fitted on, with SHA-256 {str(digest)[:12]}..."
        got = f"others, {data.digest()[:12]}..., in {recipe.data.source}"
        raise InvalidInput("data.source", expected, got)
    return data


def manifests(store: ModelStore, name: str) -> Iterator[Manifest]:
    """Yield the manifests of a model's versions, the newest first, but for broken ones."""
    for version in reversed(store.versions(name)):
        try:
            yield store.manifest(name, version)
        except StoreError:
            continue


def find_fitted(
    store: ModelStore, recipe: Recipe, data: Dataset, start: Parent | None
) -> Manifest | None:
    """Return the latest whole version that was fitted by a recipe on such data, if there is one.

    None of a factory's network, or one of a file of weights: what these hold does not stand in the
    recipe.
    """
    network = recipe.network
    if network.factory is not None or network.weights is not None or network.encoder:
        return None
    origin = None if start is None else start.provenance
    for manifest in manifests(store, recipe.name):
        of = Provenance.of(manifest)
        is_derived = of.pruned or of.labels or of.recalibrated
        if (of.data_digest, of.warm_start) != (data.digest(), origin) or is_derived:
            continue
        with suppress(StoreError, InvalidInput):
            if recipe_of(manifest, "recipe").digest() == recipe.digest():
                return store.open(recipe.name, manifest.version, wanted=()).manifest
    return None
