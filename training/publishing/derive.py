"""Pruning and recalibration of published versions."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from model_store.artifacts.manifest import GRAPHS, TOKENIZER, Manifest
from model_store.artifacts.store import Artifact, ModelStore
from model_store.errors import InvalidInput
from training import log
from training.calibration.calibrate import CategoryChoice
from training.data import Dataset, split, split_sizes
from training.data.rows import class_shares
from training.data.targets import transform_splits
from training.evaluation import figures
from training.evaluation.quality import MeasuredRows
from training.fit import Fitted, temper
from training.provenance import Provenance, Pruning, Recalibration
from training.publishing.baselines import CLEAR_ERRORS, LOG_LIKELIHOOD, check_constant
from training.publishing.draft import Draft, Exported, HeldOut, draft_version, publish_draft
from training.publishing.pruning import is_weight, prune, select_strongest
from training.publishing.publish import assemble
from training.recipe import override
from training.seeds import Stream, generator
from training.versions import (
    WEIGHTS,
    Parent,
    load_unfitted,
    match_version,
    read_recipe,
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
    weights, mask = is_weight(model), select_strongest(model, fraction)
    smaller = prune(model, mask)
    kept_weights = int(weights[smaller.state_dict()["network.kept"].long()].sum())
    log.info("%s of %s weights are left", f"{kept_weights:,}", f"{int(weights.sum()):,}")

    recipe, transform = parent.recipe, parent.manifest.transform
    splits = transform_splits(split(data, split_sizes(recipe)), transform)
    provenance = Provenance.of(parent.manifest).derived()
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
    provenance = Provenance.of(draft.description).derived(pruned=pruned)
    loss_warnings = warn_of_loss(parent, draft.figures[LOG_LIKELIHOOD])
    warnings = (*draft.description.warnings, *loss_warnings)
    update = {"training": provenance.content(), "warnings": warnings}
    description = draft.description.model_copy(update=update)
    return publish_draft(store, name, Draft(description, draft.files)), pruned


def warn_of_loss(parent: Parent, log_likelihood: figures.Figure) -> Iterator[str]:
    """Warn if the test log-likelihood is clearly below the parent's."""
    before, current = parent.manifest.quality[LOG_LIKELIHOOD], log_likelihood.value
    error = float(log_likelihood.row_values.std()) / math.sqrt(log_likelihood.rows)
    if before - current > CLEAR_ERRORS * error:
        warning = (
            f"a log-likelihood of {current:.4g} nats per test row, compared with {before:.4g} "
            "before pruning"
        )
        log.warning("%s", warning)
        yield warning


def load_for_version(parent: Artifact, root: Path, source: str, target: str | None) -> Dataset:
    """Load a source in the format of a published model.

    The model's columns, tokenizer, classes and input shape are used.
    """
    manifest = parent.manifest
    recipe = override(read_recipe(manifest, "model"), source=source, target=target, leave_out=[])
    loaded = load_unfitted(recipe, root, manifest.input.columns, parent.files.get(TOKENIZER))
    data = match_version(loaded, manifest, "data.source")
    if data.digest() == Provenance.of(manifest).data_digest:
        expected = f"rows that {manifest.label} was not fitted on"
        raise InvalidInput("data.source", expected, "the data of its fit")
    return data


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
    return HeldOut(reference, ranking, test, shares)


def recalibrate(
    store: ModelStore,
    parent: Artifact,
    data: Dataset,
    rows: HeldOut,
    seed: int,
    name: str,
    origin: dict[str, str],
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
        rows=len(data.rows),
        test_rows=len(rows.test),
        seed=seed,
        data_digest=data.digest(),
    )
    draft = draft_version(
        Exported.from_artifact(parent),
        rows,
        MeasuredRows(rows.test, manifest.classes or (), seed, data.group_names),
        None if manifest.abstention is None else manifest.abstention.risk,
        CategoryChoice.from_config(kind, data, column),
        manifest.method,
        manifest.input,
        manifest.output,
        Provenance.of(manifest).derived(recalibrated=recalibrated),
    )
    return publish_draft(store, name, draft)
