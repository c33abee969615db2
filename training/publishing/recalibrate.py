"""`python -m training calibrate`: a published model calibrated anew on other rows, not fitted anew.

Graphs and weights are the published ones, byte for byte. All rows of the source, its test rows too,
are split at random: into the two calibration splits, and the rest measure.
"""

from pathlib import Path

import numpy as np

from model_store.artifacts.manifest import TOKENIZER, Manifest
from model_store.artifacts.store import Artifact, ModelStore
from model_store.errors import InvalidInput
from training.calibration.categories import CategoriesWanted
from training.data import Dataset, Rows, load, numbered_as
from training.data.rows import class_shares
from training.facts import RecalibrationFacts, TrainingFacts
from training.publishing.quality import MeasuredRows
from training.publishing.stages import Exported, HeldOut, calibrate_exported, measure_calibrated
from training.publishing.trial import publish_draft
from training.recipe import override
from training.seeds import Stream, generator
from training.versions import check_ids_of, recipe_of


def load_like(parent: Artifact, root: Path, source: str, target: str | None) -> Dataset:
    """Read a source as rows of a published model: its columns or its tokens, its classes in its
    order, its shape.

    Raises:
        InvalidInput: if the rows are not such, have labels that the model does not know, or are
            those of its fit.
    """
    manifest = parent.manifest
    recipe = override(recipe_of(manifest, "model"), source=source, target=target, leave_out=[])
    loaded = load(recipe, root, manifest.input.columns, parent.files.get(TOKENIZER))
    data = numbered_as(loaded, manifest.classes or ())
    label = f"{manifest.name} version {manifest.version}"
    if data.shape != manifest.input.shape:
        raise InvalidInput(
            "data.source",
            f"rows of shape {manifest.input.shape}, as {label} takes them",
            f"{data.shape}",
        )
    check_ids_of(data, manifest, "data.source")
    if data.digest() == TrainingFacts.of(manifest).data_digest:
        raise InvalidInput(
            "data.source", f"rows that {label} was not fitted on", "the very rows of its fit"
        )
    return data


def split_rows(data: Dataset, reference_rows: int, ranking_rows: int, seed: int) -> HeldOut:
    """Split all rows of a data set into the calibration splits and, those that are left, to the
    test rows.

    Raises:
        InvalidInput: if a split would have no row.
    """
    x, y = (
        np.concatenate([getattr(rows, part) for rows in (data.train, data.test)])
        for part in ("x", "y")
    )
    groups = (
        None if data.train.groups is None else np.concatenate([data.train.groups, data.test.groups])
    )
    rows = Rows(x, y, groups=groups)
    for field, number in (("--reference-rows", reference_rows), ("--ranking-rows", ranking_rows)):
        if number < 1:
            raise InvalidInput(field, "at least 1", f"{number}")
    if reference_rows + ranking_rows >= len(rows):
        expected = f"less than the {len(rows)} rows of the source, so that some are left to measure"
        raise InvalidInput(
            "--reference-rows + --ranking-rows", expected, f"{reference_rows + ranking_rows}"
        )
    order = generator(seed, Stream.SPLIT).permutation(len(rows))
    parts = np.split(order, np.cumsum([reference_rows, ranking_rows]))
    reference, ranking, test = (rows.take(part) for part in parts)
    return HeldOut(
        reference, ranking, test, class_shares(y, len(data.classes)) if data.classes else None
    )


def recalibrate(
    store: ModelStore,
    parent: Artifact,
    data: Dataset,
    rows: HeldOut,
    seed: int,
    name: str,
    origin: dict[str, str],
) -> Manifest:
    """Publish a version with its graphs and weights, calibrated and measured on other rows, as the
    next of `name`.

    `origin` says where the rows are from: `source`, and `target` if one is named.

    Raises:
        InvalidInput: if the name is not fit for a model.
        BrokenArtifact: if the version cannot be run.
        TrialError: if the service could not load it; nothing is published.
    """
    manifest = parent.manifest
    risk = None if manifest.abstention is None else manifest.abstention.risk
    kind = "marginal" if manifest.categories is None else manifest.categories.kind
    column = None if manifest.categories is None else manifest.categories.column
    wanted = CategoriesWanted.by(kind, data, column)
    calibrated = calibrate_exported(Exported.of_version(parent), rows, seed, risk, wanted)
    extent, classes = (data.minimum, data.maximum), manifest.classes or ()
    measured_rows = MeasuredRows(rows.test, extent, classes, seed, data.group_names, data.input)
    measured = measure_calibrated(calibrated, measured_rows)
    recalibrated = RecalibrationFacts(
        name=manifest.name,
        version=manifest.version,
        **origin,
        rows=len(rows.reference) + len(rows.ranking) + len(rows.test),
        test_rows=len(rows.test),
        seed=seed,
        data_digest=data.digest(),
    )
    facts = TrainingFacts.of(manifest).derived(recalibrated=recalibrated)
    draft = measured.draft(manifest.method, manifest.input, manifest.output, facts)
    return publish_draft(store, name, draft)
