"""The stages of a publication. Each is a record that the next is made from:

    Exported      graphs, of a model that was fitted, pruned, or published before; checked, and
    ready to run Calibrated    the detectors, on two splits that the model was not fitted on
    Measured      the quality of what is served, on rows of neither

`python -m training fit` and `prune` come here with graphs that `training.publishing.publish`
exports, and `calibrate` with published ones.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float64
from safetensors.numpy import save

from model_store.artifacts.limits import too_few_rows
from model_store.artifacts.manifest import (
    ENCODER,
    SCORES_VERSION,
    AbstentionSpec,
    CategorySpec,
    ClassSpec,
    Description,
    DetectorSpec,
    EncoderSpec,
    InputSpec,
    NoiseSpec,
    TargetSpec,
)
from model_store.artifacts.store import Artifact
from model_store.conformal.abstention import CONFIDENCE
from model_store.conformal.calibration import DEFAULT_FPR, Calibration
from model_store.conformal.label_shift import LabelShift
from model_store.inference.model import CALIBRATION_FILE, Model
from model_store.inference.runtime import Runtime
from model_store.scores.transforms import Transform
from model_store.types import DetectorNames
from training.calibration.calibrate import calibrate
from training.calibration.categories import CategoriesWanted
from training.data import Rows
from training.evaluation.figures import Figure, values
from training.facts import TrainingFacts
from training.messages import log
from training.publishing.quality import Measurable, MeasuredRows
from training.scoring import rows_per_draw_set


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows that the model was not fitted on, by what each is used for. No row is in two."""

    reference: Rows  # fits the detectors
    ranking: Rows  # ranks the flag's statistic
    test: Rows  # measures
    shares: Float64[np.ndarray, "C"] | None = (
        None  # of classes, of those that the calibration rows are from
    )


@dataclass(frozen=True, eq=False)
class Exported:
    """Graphs and weights as files, what runs them, and what their manifest says of them."""

    files: dict[str, bytes | Path]
    runtime: Runtime
    noise: NoiseSpec
    detectors: DetectorNames
    draw_counts: tuple[int, ...]
    num_labels: int
    precision: Literal["float32", "int8"]
    parity: dict[str, float]
    transform: Transform | None = None  # of a regression's target
    encoder: EncoderSpec | None = None

    @classmethod
    def of_version(cls, artifact: Artifact) -> "Exported":
        """Return the graphs and weights of a published version, byte for byte.

        Raises:
            BrokenArtifact: if the version cannot be run.
        """
        manifest, detectors = artifact.manifest, artifact.manifest.detectors
        encoder: dict[str, Path] = (
            {} if manifest.encoder is None else {ENCODER: artifact.folder / ENCODER}
        )
        return cls(
            {**artifact.files, **encoder},
            Model.load(artifact).runtime,
            manifest.noise,
            detectors.names,
            detectors.draw_counts,
            manifest.num_labels,
            manifest.precision,
            manifest.parity,
            manifest.transform,
            manifest.encoder,
        )


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What was exported, with its calibration, and what the manifest says of that."""

    exported: Exported
    calibration: Calibration
    detectors: DetectorSpec
    abstention: AbstentionSpec | None
    label_shift: LabelShift | None = None
    categories: CategorySpec | None = None

    @property
    def num_draws(self) -> int:
        """The largest calibrated number of draws, the default of requests."""
        return int(self.calibration.draw_counts[-1])


@dataclass(frozen=True, eq=False)
class Measured:
    """What was calibrated, with its quality: all that a version is, but for what it was made of."""

    calibrated: Calibrated
    figures: dict[str, Figure]

    def draft(
        self, method: str, inputs: InputSpec, output: ClassSpec | TargetSpec, facts: TrainingFacts
    ) -> "Draft":
        """Return the version that takes such rows, says such things of them, and was made as
        `facts` say."""
        exported = self.calibrated.exported
        description = Description(
            method=method,
            task=exported.runtime.task,
            input=inputs,
            output=output,
            noise=exported.noise,
            encoder=exported.encoder,
            detectors=self.calibrated.detectors,
            abstention=self.calibrated.abstention,
            categories=self.calibrated.categories,
            too_few_rows=too_few_rows(self.calibrated.detectors, self.calibrated.categories),
            training=facts.content(),
            precision=exported.precision,
            quality=values(self.figures),
            parity=exported.parity,
        )
        label_shift = self.calibrated.label_shift
        tensors = self.calibrated.calibration.tensors() | (
            {} if label_shift is None else label_shift.tensors()
        )
        calibration = save(tensors)
        return Draft(description, {**exported.files, CALIBRATION_FILE: calibration}, self.figures)


@dataclass(frozen=True, eq=False)
class Draft:
    """A version that is ready to be published."""

    description: Description
    files: dict[str, bytes | Path]
    figures: dict[str, Figure] = field(default_factory=dict)  # of its quality, row by row


def calibrate_exported(
    exported: Exported,
    rows: HeldOut,
    seed: int,
    risk: float | None,
    wanted: CategoriesWanted | None = None,
) -> Calibrated:
    """Fit and rank the detectors, by category where that is wanted; `risk` is that of requests that
    name none."""
    runtime, names, counts = exported.runtime, exported.detectors, list(exported.draw_counts)
    log.info("calibrating on %d + %d rows", len(rows.reference), len(rows.ranking))
    splits = rows.reference, rows.ranking
    calibration = calibrate(
        runtime, *splits, counts, names, exported.num_labels, seed, exported.transform, wanted
    )
    spec = DetectorSpec(
        scores_version=SCORES_VERSION,
        tail=names.tail,
        density=names.density,
        two_sided=names.two_sided,
        attributed=names.attributed,
        combined=names.combined,
        draw_counts=exported.draw_counts,
        reference_rows=len(rows.reference),
        ranking_rows=len(rows.ranking),
        smallest_fpr=calibration.smallest_fpr,
        rows_per_draw_set=rows_per_draw_set(
            runtime, min(len(rows.reference), len(rows.ranking)), counts[-1]
        ),
    )
    abstention = None if runtime.task == "regression" else _abstention_spec(calibration, risk)
    label_shift = None if rows.shares is None else LabelShift(rows.ranking.y, rows.shares)
    categories = None if wanted is None else _category_spec(calibration, wanted.column)
    too_few = too_few_rows(spec, categories)
    if too_few is not None:
        log.warning("%s", too_few)
    return Calibrated(exported, calibration, spec, abstention, label_shift, categories)


def measure_calibrated(calibrated: Calibrated, rows: MeasuredRows) -> Measured:
    """Measure the quality of what is served: `training.publishing.quality` says of what."""
    log.info("measuring on %d test rows", len(rows.test))
    exported = calibrated.exported
    measurable = Measurable(
        exported.runtime,
        calibrated.calibration,
        calibrated.detectors.density,
        rows.classes,
        exported.transform,
    )
    return Measured(calibrated, measurable.figures(rows))


def _category_spec(calibration: Calibration, column: str | None) -> CategorySpec:
    """Return what the manifest says of the categories that guarantees hold of."""
    categories = calibration.categories
    assert categories is not None
    return CategorySpec(
        kind=categories.kind,
        names=categories.names,
        column=column,
        judged_rows=tuple(categories.judged_rows.tolist()),
        true_rows=tuple(categories.true_rows.tolist()),
    )


def _abstention_spec(calibration: Calibration, risk: float | None) -> AbstentionSpec:
    """Return what the manifest says of rows left undecided."""
    draws = int(calibration.draw_counts[-1])
    smallest = calibration.rank_tables(draws).smallest_risk(DEFAULT_FPR)
    if risk is not None and risk < smallest:
        log.info(
            "serving.risk %g cannot be certified, only %g: every row will be left undecided",
            risk,
            smallest,
        )
    return AbstentionSpec(confidence=CONFIDENCE, smallest_risk=smallest, risk=risk)
