"""`python -m training calibrate`: a published model calibrated anew on other rows, not fitted anew.

Graphs and weights are the published ones, byte for byte. All rows of the source, its test rows too, are parts at
random to the two calibration splits, and the rest measure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from model_store.artifacts.manifest import Description, Manifest
from model_store.artifacts.store import Artifact, ModelStore
from model_store.errors import InvalidInput
from model_store.inference.model import CALIBRATION_FILE, Model
from training.data import Dataset, Rows, load, numbered_as
from training.recipe import override
from training.seeds import Stream, generator
from training.versions import recipe_of


@dataclass(frozen=True)
class Dealt:
    """What each row of a source is used for. No row is in two."""

    reference: Rows  # fits the detectors
    ranking: Rows  # ranks the flag's statistic
    test: Rows  # measures


def load_like(manifest: Manifest, root: Path, source: str, target: str | None) -> Dataset:
    """Read a source as rows of a published model: its columns, its classes in its order, its shape.

    Raises:
        InvalidInput: if the rows are not such, have labels that the model does not know, or are those of its fit.
    """
    recipe = override(recipe_of(manifest, "model"), source=source, target=target, leave_out=[])
    data = numbered_as(load(recipe, root, manifest.input.columns), manifest.classes or ())
    label = f"{manifest.name} version {manifest.version}"
    if data.shape != manifest.input.shape:
        raise InvalidInput(
            "data.source", f"rows of shape {manifest.input.shape}, as {label} takes them", f"{data.shape}"
        )
    if data.digest() == manifest.training.get("data_digest"):
        raise InvalidInput("data.source", f"rows that {label} was not fitted on", "the very rows of its fit")
    return data


def split_rows(data: Dataset, reference_rows: int, ranking_rows: int, seed: int) -> Dealt:
    """Deal all rows of a data set to the calibration splits and, those that are left, to the test rows.

    Raises:
        InvalidInput: if a split would have no row.
    """
    x, y = (np.concatenate([getattr(rows, part) for rows in (data.train, data.test)]) for part in ("x", "y"))
    rows = Rows(x, y)
    for field, number in (("--reference-rows", reference_rows), ("--ranking-rows", ranking_rows)):
        if number < 1:
            raise InvalidInput(field, "at least 1", f"{number}")
    if reference_rows + ranking_rows >= len(rows):
        expected = f"less than the {len(rows)} rows of the source, so that some are left to measure"
        raise InvalidInput("--reference-rows + --ranking-rows", expected, f"{reference_rows + ranking_rows}")
    order = generator(seed, Stream.SPLIT).permutation(len(rows))
    return Dealt(*(rows.take(part) for part in np.split(order, np.cumsum([reference_rows, ranking_rows]))))


def recalibrate(
    store: ModelStore,
    parent: Artifact,
    data: Dataset,
    parts: Dealt,
    seed: int,
    name: str,
    facts: dict[str, object],
    say: Callable[[str], None],
) -> Manifest:
    """Publish a version with its graphs and weights, calibrated and measured on other rows, as the next of `name`.

    `facts` are added to what the manifest says of where the calibration is from.

    Raises:
        InvalidInput: if the name is not fit for a model.
        BrokenArtifact: if the version cannot be run.
    """
    from training.calibration.calibrate import calibrate
    from training.publishing.publish import abstention_spec, measure
    from training.scoring import rows_per_draw_set

    manifest, runtime = parent.manifest, Model.load(parent).runtime
    detectors, abstention, counts = manifest.detectors, manifest.abstention, list(manifest.detectors.draw_counts)
    reference, ranking, test = parts.reference, parts.ranking, parts.test
    say(f"calibrating on {len(reference)} + {len(ranking)} rows")
    calibration = calibrate(runtime, reference, ranking, counts, detectors.names, manifest.num_labels, seed)
    say(f"measuring on {len(test)} test rows")
    quality = measure(runtime, calibration, detectors.density, test, (data.minimum, data.maximum), seed)
    share = rows_per_draw_set(runtime, min(len(reference), len(ranking)), counts[-1])
    recalibrated = {
        "name": manifest.name,
        "version": manifest.version,
        **facts,
        "rows": len(reference) + len(ranking) + len(test),
        "test_rows": len(test),
        "seed": seed,
        "data_digest": data.digest(),
    }
    made_of = {key: value for key, value in manifest.training.items() if key != "run"}
    description = Description(
        **{
            **{field: getattr(manifest, field) for field in Description.model_fields},
            "detectors": detectors.model_copy(
                update={
                    "reference_rows": len(reference),
                    "ranking_rows": len(ranking),
                    "smallest_fpr": calibration.smallest_fpr,
                    "rows_per_draw_set": share,
                }
            ),
            "training": {**made_of, "recalibrated": recalibrated},
            "abstention": abstention and abstention_spec(calibration, abstention.risk, say),
            "quality": quality,
        }
    )
    return store.publish(name, description, {**parent.files, CALIBRATION_FILE: save(calibration.tensors())})
