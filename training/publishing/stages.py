"""From exported graphs to a published version: calibrated, measured, tried by the service's own
loading, published.

`training.publishing.publish` and `prune` come here with graphs that they export, and `recalibrate`
with published ones.
"""

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from jaxtyping import Float64
from safetensors.numpy import save

from model_store.artifacts.manifest import (
    ENCODER,
    AbstentionSpec,
    CategorySpec,
    ClassSpec,
    Description,
    DetectorSpec,
    EncoderSpec,
    InputSpec,
    Manifest,
    NoiseSpec,
    TargetSpec,
)
from model_store.artifacts.store import LATEST, Artifact, ModelStore
from model_store.artifacts.summary import too_few_rows
from model_store.conformal.abstention import CONFIDENCE
from model_store.conformal.calibration import DEFAULT_FPR, Calibration
from model_store.conformal.label_shift import LabelShift
from model_store.errors import DubitoError
from model_store.inference.model import CALIBRATION_FILE, Model
from model_store.inference.preflight_process import PreflightProcess
from model_store.inference.runtime import Runtime
from model_store.scores.transforms import Transform
from model_store.types import DetectorNames
from training import log
from training.calibration.calibrate import CategoriesWanted, calibrate
from training.data import Rows
from training.evaluation.figures import Figure, values
from training.methods import METHODS, Laplace, Method
from training.provenance import Provenance
from training.publishing.quality import Measurable, Measured, MeasuredRows
from training.scoring import rows_per_draw_set

PREFLIGHT_S = 120.0  # in which a version must be loaded and predict
ABANDONED_S = 3600.0  # after which a preflight's files are those of a process that was killed
EXACT = 0.02  # by which a posterior's temperature may be off 1 and go unsaid
SOUND_TEMPERATURE = 2.0  # that of a fit that went well is at most this
AGREED = 0.001  # of the uncertainty, up to which draws' disagreement is none
PREFIX = ".trial-"  # not a model's name: stores pass such folders over


class PreflightError(DubitoError):
    """A version that the service could not load or predict with; nothing is published."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows that the model was not fitted on, by what each is used for. No row is in two."""

    reference: Rows  # what the detectors' scores are usually like
    ranking: Rows  # ranks the flag's statistic
    test: Rows  # measures
    shares: Float64[np.ndarray, "C"] | None = (
        None  # of classes, where the calibration rows are from
    )
    validation: Rows | None = None  # fits the temperature again


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
        manifest, detectors = artifact.manifest, artifact.manifest.detectors
        encoder = {} if manifest.encoder is None else {ENCODER: artifact.folder / ENCODER}
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
class Draft:
    """A version that is ready to be published."""

    description: Description
    files: dict[str, bytes | Path]
    figures: dict[str, Figure] = field(default_factory=dict)  # of its quality, row by row
    # Of a table, by name: what it must be better than
    baselines: dict[str, dict[str, Figure]] = field(default_factory=dict)


def draft_version(
    exported: Exported,
    rows: HeldOut,
    measured: MeasuredRows,
    seed: int,
    risk: float | None,
    wanted: CategoriesWanted | None,
    method: str,
    inputs: InputSpec,
    output: ClassSpec | TargetSpec,
    provenance: Provenance,
) -> Draft:
    """Calibrate exported graphs, by category where that is wanted, measure what is served, and
    return the version; `risk` is that of requests that name none."""
    runtime, names, counts = exported.runtime, exported.detectors, list(exported.draw_counts)
    splits = rows.reference, rows.ranking
    log.info("calibrating on %d + %d rows", *map(len, splits))
    calibration = calibrate(
        runtime, *splits, counts, names, exported.num_labels, seed, exported.transform, wanted
    )
    detectors = DetectorSpec(
        density=names.density,
        two_sided=names.two_sided,
        attributed=names.attributed,
        combined=names.combined,
        draw_counts=exported.draw_counts,
        reference_rows=len(rows.reference),
        ranking_rows=len(rows.ranking),
        smallest_fpr=calibration.smallest_fpr,
        rows_per_draw_set=rows_per_draw_set(runtime, min(map(len, splits)), counts[-1]),
    )
    categories = None if wanted is None else _category_spec(calibration, wanted.column)
    too_few = too_few_rows(detectors, categories)
    if too_few is not None:
        log.warning("%s", too_few)
    abstention = None if runtime.task == "regression" else _abstention_spec(calibration, risk)
    log.info("measuring on %d test rows", len(measured.test))
    found = Measurable(
        runtime, calibration, names.density, measured.classes, exported.transform
    ).measure(measured)
    warnings = (
        *fit_warnings(provenance),
        *_agreement(found, METHODS[method], exported.noise.max_draws),
    )
    for warning in warnings:
        log.warning("%s", warning)
    description = Description(
        method=method,
        task=runtime.task,
        input=inputs,
        output=output,
        noise=exported.noise,
        encoder=exported.encoder,
        detectors=detectors,
        abstention=abstention,
        categories=categories,
        too_few_rows=too_few,
        training=provenance.content(),
        precision=exported.precision,
        quality=values(found.figures),
        warnings=warnings,
        parity=exported.parity,
    )
    tensors = calibration.tensors()
    if rows.shares is not None:
        tensors |= LabelShift(rows.ranking.y, rows.shares).tensors()
    return Draft(description, {**exported.files, CALIBRATION_FILE: save(tensors)}, found.figures)


def fit_warnings(provenance: Provenance) -> Iterator[str]:
    """Say it of a posterior whose KL did not have its full weight, 1 / (training rows), of a
    network that is too sure by itself, and of draws that know no more than a guess."""
    recipe, rows, found = provenance.recipe, provenance.rows, provenance.temperature
    if recipe is not None and rows is not None and recipe["training"].get("kl_weight") is not None:
        temperature = recipe["training"]["kl_weight"] * rows["train"]
        has_prior = recipe["posterior"].get("prior_std") is not None
        has_kl = METHODS[recipe["method"]].is_variational or has_prior
        if has_kl and abs(temperature - 1.0) > EXACT:
            why = recipe["training"].get("kl_weight_reason") or "its recipe does not say why"
            said = f"a tempered posterior, of temperature {temperature:.2g} (training.kl_weight)"
            yield f"{said}: {why}"
    if found is not None and found.value > SOUND_TEMPERATURE:
        why = "training went wrong: " if provenance.recalibrated is None else ""
        yield f"{why}by itself the network is too sure (temperature {found.value:.4g})"
    facts = provenance.convergence or {}
    if facts.get("nll", -math.inf) >= facts.get("guess_nll", math.inf):
        figures = f"{facts['nll']:.3g} nats a row, of a guess {facts['guess_nll']:.3g}"
        yield (
            f"a draw says no more of training rows than a guess does ({figures}): its posterior "
            "has collapsed onto the prior, unless training went wrong; a smaller network, another "
            "prior or a smaller training.kl_weight may change it"
        )


def _agreement(found: Measured, method: type[Method], max_draws: int | None) -> Iterator[str]:
    """Say it of draws that agree about test rows and about noise, so that the model never
    doubts."""
    shares = found.disagreement, found.disagreement_on_noise
    if max_draws == 1 or max(shares) > AGREED:
        return
    change = "members that are trained for longer"
    if method.is_variational:
        change = "more epochs, or a larger posterior.initial_log_std to start from,"
    elif method is Laplace:
        change = "a larger posterior.prior_std"
    elif method.groups_rows:
        change = "a larger posterior.rate"
    of_rows, of_noise = (f"{100 * share:.2g} %" for share in shares)
    yield (
        f"its draws agree, so it never doubts: their disagreement is {of_rows} of its uncertainty "
        f"about test rows and {of_noise} about noise; {change} may change it"
    )


def publish_draft(store: ModelStore, name: str, draft: Draft, alias: str = LATEST) -> Manifest:
    """Publish a version as the next of `name`, if a fresh process can load it and predict with
    it."""
    scratch = store.storage.scratch  # where there is room for the version, as in no /tmp
    scratch.mkdir(parents=True, exist_ok=True)
    for left in scratch.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another publication's, and over
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=PREFIX, dir=scratch) as folder:
        drafted = ModelStore(Path(folder)).publish(name, draft.description, draft.files)
        with closing(PreflightProcess()) as process:
            failure = process.run(Path(folder), name, drafted.version, PREFLIGHT_S)
    if failure is not None:
        raise PreflightError(
            f"model {name} is not published, since the service could not load it: {failure}"
        )
    return store.publish(name, draft.description, draft.files, alias)


def _category_spec(calibration: Calibration, column: str | None) -> CategorySpec:
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
    draws = int(calibration.draw_counts[-1])
    smallest = calibration.rank_tables(draws).smallest_risk(DEFAULT_FPR)
    if risk is not None and risk < smallest:
        certain = f"serving.risk {risk:g} cannot be certified, only {smallest:g}"
        log.info("%s: every row will be left undecided", certain)
    return AbstentionSpec(confidence=CONFIDENCE, smallest_risk=smallest, risk=risk)
