"""Published versions that training goes on from."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from model_store.artifacts.manifest import TOKENIZER, ClassSpec, Manifest
from model_store.artifacts.store import LATEST, Artifact, ModelStore
from model_store.errors import InvalidInput, one_line
from training.data import Dataset, load, with_classes_of
from training.facts import TrainingFacts, VersionFacts
from training.recipe import Recipe, override

if TYPE_CHECKING:
    from torch import Tensor

    from training.model import BayesianModel

WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Parent:
    """A published version: its manifest, the recipe that it was fitted by, its weights' file, and
    its tokenizer's."""

    manifest: Manifest
    recipe: Recipe
    weights: bytes
    tokenizer: bytes | None = None

    @property
    def label(self) -> str:
        """Its name and version."""
        return f"{self.manifest.name} version {self.manifest.version}"

    @property
    def facts(self) -> VersionFacts:
        """What the manifest of a version made from it says of it."""
        return VersionFacts(name=self.manifest.name, version=self.manifest.version)

    @property
    def classes(self) -> tuple[str, ...]:
        """Its classes, in the order of its outputs; a regression has none."""
        output = self.manifest.output
        return output.classes if isinstance(output, ClassSpec) else ()

    def model(self) -> "BayesianModel":
        """Return the fitted model.

        Raises:
            InvalidInput: if the recipe's network is not any more what it was, as of a factory that
                has changed.
        """
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
        """Return the `state_dict` of an mle version's network."""
        from training.networks.networks import MemberNetwork

        network = self.model().network
        assert isinstance(network, MemberNetwork)
        return network.members[0].state_dict()


def open_parent(store: ModelStore, text: str, field: str) -> Parent:
    """Return the version that NAME[:VERSION] names; VERSION is a number or an alias, by default
    `latest`.

    Raises:
        NotFound: if there is none.
        BrokenArtifact: if it is damaged.
        InvalidInput: if it is pruned, or by a recipe that is not understood any more.
    """
    artifact = open_version(store, text, (WEIGHTS, TOKENIZER))
    refuse_made_by(artifact.manifest, "pruned", field)
    return parent_of(artifact, field)


def parent_of(artifact: Artifact, field: str) -> Parent:
    """Return an opened version.

    Raises:
        InvalidInput: if it is by a recipe that is not understood any more.
    """
    recipe, files = recipe_of(artifact.manifest, field), artifact.files
    return Parent(artifact.manifest, recipe, files[WEIGHTS], files.get(TOKENIZER))


def open_version(store: ModelStore, text: str, wanted: tuple[str, ...]) -> Artifact:
    """Return a version as `open_parent` finds it, with the bytes of `wanted`, whatever it was made
    by."""
    name, _, version = text.partition(":")
    return store.open(name, store.resolve(name, version or LATEST), wanted)


def recipe_of(manifest: Manifest, field: str) -> Recipe:
    """Return the recipe that a version was fitted by.

    Raises:
        InvalidInput: if it is not understood any more.
    """
    try:
        return Recipe.model_validate(TrainingFacts.of(manifest).recipe)
    except ValidationError:
        label = f"{manifest.name} version {manifest.version}"
        raise InvalidInput(field, "a version with a recipe of today's keys", label) from None


def refuse_made_by(
    manifest: Manifest, derivation: Literal["pruned", "recalibrated"], field: str
) -> None:
    """Raise InvalidInput for a version that was pruned or recalibrated, naming what it was made
    from."""
    facts = TrainingFacts.of(manifest)
    parent = facts.pruned if derivation == "pruned" else facts.recalibrated
    if parent is not None:
        label, made_of = (
            f"{n} version {v}"
            for n, v in ((manifest.name, manifest.version), (parent.name, parent.version))
        )
        raise InvalidInput(
            field, f"a version that is not {derivation}", f"{label}, which is, from {made_of}"
        )


def check_ids_of(data: Dataset, manifest: Manifest, field: str) -> None:
    """Raise InvalidInput if rows of ids have larger ones than a version takes."""
    if manifest.input.takes_ids and data.maximum > manifest.input.maximum:
        label = f"{manifest.name} version {manifest.version}"
        expected = f"ids up to {manifest.input.maximum:.0f}, as {label} takes them"
        raise InvalidInput(field, expected, f"{data.maximum:.0f}")


def fitted_data(parent: Parent, root: Path, source: str | None = None) -> Dataset:
    """Return the data that a version was fitted on, from its recipe's source or another place.

    Raises:
        InvalidInput: if they are not there, or are others: their splits would mix what the model
            was fitted on with what judges it.
    """
    recipe = parent.recipe if source is None else override(parent.recipe, source=source)
    data = with_classes_of(
        load(recipe, root, parent.manifest.input.columns, parent.tokenizer), parent.classes
    )
    digest = TrainingFacts.of(parent.manifest).data_digest
    if data.digest() != digest:
        expected = f"the rows that {parent.label} was fitted on, with SHA-256 {str(digest)[:12]}..."
        raise InvalidInput(
            "data.source", expected, f"others, {data.digest()[:12]}..., in {recipe.data.source}"
        )
    return data
