"""Pruning and recalibration of published versions.

Pruning removes weights by their signal-to-noise ratio |mu| / sigma (Blundell et al. 2015, "Weight
uncertainty in neural networks", sections 3.2 and 5.1). A removed weight is 0 in every draw. Noise
and theta then contain only the remaining weights, which the network inserts into matrices of zeros,
because ONNX has no sparse product. All biases remain.
"""

import copy
import math
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from model_store.artifacts.manifest import GRAPHS, Manifest
from model_store.artifacts.store import Artifact, ModelStore
from model_store.errors import InvalidInput
from training import log
from training.bayes.gaussian import GaussianPosterior
from training.bayes.layers import WeightLayer
from training.bayes.network import BayesianModel
from training.calibration.calibrate import CategoryChoice
from training.data.rows import Dataset, class_shares, split, split_sizes
from training.data.targets import transform_splits
from training.fit import Fitted, temper
from training.networks.networks import DrawnNetwork
from training.publishing.baselines import CLEAR_ERRORS, LOG_LIKELIHOOD, check_constant
from training.publishing.draft import Draft, Exported, HeldOut, draft_version, publish_draft
from training.publishing.publish import assemble
from training.recipe import override
from training.seeds import Stream, generator
from training.versions import (
    WEIGHTS,
    Parent,
    Provenance,
    Pruning,
    Recalibration,
    load_if_fitted,
    load_unfitted,
    match_version,
    refuse_derived,
)


def prune_version(
    store: ModelStore,
    parent: Parent,
    data: Dataset,
    fraction: float,
    name: str,
    anyway: bool = False,
) -> tuple[Manifest, Pruning]:
    """Prune the weights with the lowest |mu| / sigma, and publish the result.

    It becomes the next version of `name`. `data` must be the data of the parent's fit. Its splits
    calibrate and test the new version.
    """
    refuse_derived(parent.manifest, "recalibrated", "model")
    if parent.manifest.encoder is not None:
        expected = "a version without an encoder"
        raise InvalidInput("model", expected, f"{parent.label} with an encoder")
    model = parent.model().eval()
    mask, weights = select_strongest(model, fraction), is_weight(model)
    smaller = prune(model, mask)
    kept_weights = int(weights[smaller.state_dict()["network.kept"].long()].sum())
    log.info("%s of %s weights are left", f"{kept_weights:,}", f"{int(weights.sum()):,}")

    recipe, transform = parent.recipe, parent.manifest.transform
    splits = transform_splits(split(data, split_sizes(recipe)), transform)
    provenance = Provenance.of(parent.manifest)
    temperature = temper(smaller, recipe, splits.validation)
    if temperature is not None:
        provenance = provenance.model_copy(update={"temperature": temperature})
    draft = assemble(Fitted(smaller, recipe, data, splits, provenance, transform))
    if not anyway:
        check_constant(name, draft)
    files = {file: content for file, content in draft.files.items() if isinstance(content, bytes)}
    pruned = Pruning(
        **parent.provenance.content(),
        fraction=fraction,
        weights=int(weights.sum()),
        kept_weights=kept_weights,
        parent_bytes=sum(parent.manifest.files[file].size for file in (*GRAPHS, WEIGHTS)),
        bytes=sum(len(files[file]) for file in (*GRAPHS, WEIGHTS)),
    )
    provenance = Provenance.of(draft.description).model_copy(update={"pruned": pruned})
    figure, before = draft.figures[LOG_LIKELIHOOD], parent.manifest.quality[LOG_LIKELIHOOD]
    warnings = draft.description.warnings
    if before - figure.value > CLEAR_ERRORS * figure.row_values.std() / math.sqrt(figure.rows):
        loss = f"a log-likelihood of {figure.value:.4g} nats per test row, compared with"
        warnings += (f"{loss} {before:.4g} before pruning",)
        log.warning("%s", warnings[-1])
    update = {"training": provenance.content(), "warnings": warnings}
    description = draft.description.model_copy(update=update)
    return publish_draft(store, name, Draft(description, draft.files)), pruned


def load_for_version(parent: Parent, root: Path, source: str, target: str | None) -> Dataset:
    """Load a source, other than the fit's data, in the format of a published model."""
    recipe = override(parent.recipe, source=source, target=target, leave_out=[])
    loaded = load_unfitted(recipe, root, parent.manifest.input.columns, parent.tokenizer)
    if load_if_fitted(parent, root, source) is not None:
        expected = f"rows that {parent.label} was not fitted on"
        raise InvalidInput("data.source", expected, "the data of its fit")
    return match_version(loaded, parent.manifest, "data.source")


def split_rows(data: Dataset, reference_rows: int, ranking_rows: int, seed: int) -> HeldOut:
    """Split rows at random into calibration and test rows."""
    rows = data.rows
    for field, number in (("--reference-rows", reference_rows), ("--ranking-rows", ranking_rows)):
        if number < 1:
            raise InvalidInput(field, "at least 1", f"{number}")
    held_out = reference_rows + ranking_rows
    if held_out >= len(rows):
        expected = f"fewer than the {len(rows)} rows of the source, because some must test"
        field = "--reference-rows + --ranking-rows"
        raise InvalidInput(field, expected, f"{held_out}")
    order = generator(seed, Stream.SPLIT).permutation(len(rows))
    parts = np.split(order, np.cumsum([reference_rows, ranking_rows]))
    shares = class_shares(rows.y, len(data.classes)) if data.classes else None
    reference, ranking, test = (rows.take(part) for part in parts)
    return HeldOut(data, seed, test, reference, ranking, shares)


def recalibrate(
    store: ModelStore, parent: Artifact, rows: HeldOut, name: str, origin: dict[str, str]
) -> Manifest:
    """Calibrate and test a version on other rows, and publish the result.

    It becomes the next version of `name`. Graphs and weights do not change. `origin` contains the
    rows' `source`, and the `target` if it is set.
    """
    manifest, categories = parent.manifest, parent.manifest.categories
    kind = "marginal" if categories is None else categories.kind
    column = None if categories is None else categories.column
    recalibrated = Recalibration(
        name=manifest.name,
        version=manifest.version,
        **origin,
        rows=len(rows.data.rows),
        test_rows=len(rows.test),
        seed=rows.seed,
        data_digest=rows.data.digest(),
    )
    draft = draft_version(
        Exported.from_artifact(parent),
        rows,
        None if manifest.abstention is None else manifest.abstention.risk,
        CategoryChoice.from_config(kind, rows.data, column),
        Provenance.of(manifest).model_copy(update={"recalibrated": recalibrated}),
    )
    return publish_draft(store, name, draft)


def signal_to_noise(model: BayesianModel) -> Float[Tensor, "D"]:
    """Compute |mu| / sigma for every weight and bias, in the order of theta."""
    posterior = model.posterior
    if not isinstance(posterior, GaussianPosterior):
        expected = "bbb-gaussian or bbb-mixture, whose weights have a mu and a sigma"
        raise InvalidInput("method", expected, "another method")
    return (posterior.mu.abs() / posterior.sigma).detach()


def is_weight(model: BayesianModel) -> Bool[Tensor, "D"]:
    parts = []
    for layer in _layers(model):
        part = torch.ones(layer.context.slot.shape, dtype=torch.bool)
        part[layer.shape[0] :] = False
        parts.append(part.flatten())
    return torch.cat(parts)


def select_strongest(model: BayesianModel, fraction: float) -> Bool[Tensor, "D"]:
    """Mark the biases, and the weights that remain after the weakest fraction is removed."""
    if not 0 <= fraction < 1:
        raise InvalidInput("--fraction", "at least 0 and less than 1", f"{fraction}")
    ratio, weights = signal_to_noise(model), is_weight(model)
    removed = round(fraction * int(weights.sum()))
    order = ratio.masked_fill(~weights, torch.inf).argsort(stable=True)
    mask = torch.ones_like(weights)
    mask[order[:removed]] = False
    for layer, part in zip(_layers(model), _matrices(model, mask), strict=True):
        if not part.any():
            expected = "a fraction that leaves weights in every layer"
            received = f"{fraction}, which leaves none in {layer.context.slot.name}"
            raise InvalidInput("--fraction", expected, received)
    return mask


def prune(model: BayesianModel, mask: Bool[Tensor, "D"]) -> BayesianModel:
    """Remove the weights that are not in `mask`.

    The buffer `network.kept` contains the indices of the remaining parameters in the old theta.
    """
    pruned = copy.deepcopy(model)
    network, posterior = pruned.network, pruned.posterior
    assert isinstance(network, DrawnNetwork)
    assert isinstance(posterior, GaussianPosterior)
    layers = _layers(pruned)
    for layer, matrix in zip(layers, _matrices(model, mask), strict=True):
        layer.keep(matrix)
    index = mask.nonzero()[:, 0]
    network.slots = [layer.context.slot for layer in layers]
    network.theta_dimension = len(index)
    network.initial = {}
    network.register_buffer("kept", index.int())
    posterior.mu = nn.Parameter(posterior.mu.detach()[index])
    posterior.rho = nn.Parameter(posterior.rho.detach()[index])
    posterior.noise_dimension = posterior.theta_dimension = len(index)
    assert sum(slot.size for slot in network.slots) == len(index)
    return pruned


def _layers(model: BayesianModel) -> list[WeightLayer]:
    assert isinstance(model.network, DrawnNetwork)
    return model.network.get_layers(WeightLayer)


def _matrices(model: BayesianModel, mask: Bool[Tensor, "D"]) -> list[Tensor]:
    parts = mask.split([layer.context.slot.size for layer in _layers(model)])
    pairs = zip(parts, _layers(model), strict=True)
    return [part.unflatten(0, layer.context.slot.shape)[: layer.shape[0]] for part, layer in pairs]
