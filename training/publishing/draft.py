"""Draft versions: their calibration, measurement, preflight and publication."""

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from jaxtyping import Float64
from safetensors.numpy import save

from model_store.artifacts.manifest import (
    ENCODER,
    AbstentionSpec,
    CategorySpec,
    ClassSpec,
    Description,
    DetectorNames,
    DetectorSpec,
    Manifest,
    TargetSpec,
)
from model_store.artifacts.store import LATEST, Artifact, ModelStore
from model_store.conformal.abstention import CONFIDENCE
from model_store.conformal.calibration import (
    DEFAULT_COVERAGE,
    DEFAULT_FPR,
    Calibration,
    few_rows_warning,
)
from model_store.conformal.label_shift import LabelShift
from model_store.conformal.mondrian import MIN_CAUTIOUS_ROWS
from model_store.errors import DubitoError
from model_store.inference.model import CALIBRATION_FILE, Model
from model_store.inference.preflight import PreflightProcess
from model_store.inference.runtime import Runtime
from training import log
from training.calibration.calibrate import CategoryChoice, calibrate
from training.data.rows import Dataset, Rows
from training.evaluation.metrics import Figure, values
from training.evaluation.quality import Quality, measure
from training.fitting.convergence import change_warning
from training.methods import METHODS, Laplace, Method
from training.scoring import draw_counts, rows_per_draw_set
from training.versions import Provenance

PREFLIGHT_S = 120.0  # to load a version and predict with it
ABANDONED_S = 3600.0  # age of a preflight's files after its process was killed
TEMPERATURE_TOLERANCE = 0.02  # a posterior this close to 1 is not tempered
MAX_TEMPERATURE = 2.0  # higher temperatures cause a warning
MIN_DISAGREEMENT = 0.001  # share of the total uncertainty
MAX_SHOWN = 10  # names of categories with too few rows
MODEL_FIELDS = ("method", "input", "output", "noise", "encoder", "precision", "parity")
PREFIX = ".trial-"  # stores skip folders with this prefix


class GateError(DubitoError):
    """Raised if a version is not good enough to be published."""


class PreflightError(DubitoError):
    """Raised if the service cannot load a version or predict with it."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Calibration and test rows, in disjoint sets."""

    data: Dataset
    seed: int
    test: Rows
    reference: Rows  # distribution of the detectors' scores
    ranking: Rows  # distribution of the flag's statistic
    shares: Float64[np.ndarray, "C"] | None = None  # of classes in the calibration rows' source


@dataclass(frozen=True, eq=False)
class Exported:
    """A model's exported files, with their runtime and manifest fields."""

    files: dict[str, bytes | Path]
    runtime: Runtime
    detectors: DetectorNames
    fields: dict[str, Any]  # `MODEL_FIELDS` of the manifest

    @classmethod
    def from_artifact(cls, artifact: Artifact) -> "Exported":
        manifest = artifact.manifest
        encoder = {} if manifest.encoder is None else {ENCODER: artifact.folder / ENCODER}
        fields = {name: getattr(manifest, name) for name in MODEL_FIELDS}
        runtime = Model.load(artifact).runtime
        return cls({**artifact.files, **encoder}, runtime, manifest.detectors, fields)


@dataclass(frozen=True, eq=False)
class Draft:
    """A version that is ready to be published."""

    description: Description
    files: dict[str, bytes | Path]
    figures: dict[str, Figure] = field(default_factory=dict)  # on test rows


def draft_version(
    exported: Exported,
    rows: HeldOut,
    risk: float | None,
    by_category: CategoryChoice | None,
    provenance: Provenance,
) -> Draft:
    """Calibrate exported graphs, and measure their quality as served."""
    runtime, names, splits = exported.runtime, exported.detectors, (rows.reference, rows.ranking)
    noise, output = exported.fields["noise"], exported.fields["output"]
    counts = draw_counts(noise.default_draws)
    log.info("calibrating on %d reference and %d ranking rows", *map(len, splits))
    num_labels = len(output.classes) if isinstance(output, ClassSpec) else 1
    transform = output.transform if isinstance(output, TargetSpec) else None
    calibration = calibrate(
        runtime, *splits, counts, names, num_labels, rows.seed, transform, by_category
    )
    detectors = DetectorSpec(
        **{name: getattr(names, name) for name in DetectorNames.model_fields},
        draw_counts=tuple(counts),
        reference_rows=len(rows.reference),
        ranking_rows=len(rows.ranking),
        ranking_copies=len(rows.ranking) - len({row.tobytes() for row in rows.ranking.x}),
        smallest_fpr=calibration.smallest_fpr,
        rows_per_draw_set=rows_per_draw_set(runtime, min(map(len, splits)), counts[-1]),
    )
    categories = None if by_category is None else _category_spec(calibration, by_category.column)
    too_few = _too_few_rows(detectors, categories)
    if too_few is not None:
        log.warning("%s", too_few)
    abstention = None if runtime.task == "regression" else _abstention_spec(calibration, risk)
    description = Description(
        **exported.fields,
        task=runtime.task,
        detectors=detectors,
        abstention=abstention,
        categories=categories,
        too_few_rows=too_few,
        training=provenance.content(),
        quality={},
    )
    log.info("measuring on %d test rows", len(rows.test))
    # Publishing adds the name, version and files
    manifest = Manifest.model_construct(**dict(description))
    quality = measure(Model(manifest, runtime, calibration), rows.test, rows.data, rows.seed)
    warnings = (
        *fit_warnings(provenance),
        *_agreement_warnings(quality, METHODS[description.method], noise.max_draws),
    )
    for warning in warnings:
        log.warning("%s", warning)
    changes = {"quality": values(quality.figures), "warnings": warnings}
    description = description.model_copy(update=changes)
    tensors = calibration.tensors()
    if rows.shares is not None:
        tensors |= LabelShift(rows.ranking.y, rows.shares).tensors()
    return Draft(description, {**exported.files, CALIBRATION_FILE: save(tensors)}, quality.figures)


def fit_warnings(provenance: Provenance) -> Iterator[str]:
    """Warn about a tempered or collapsed posterior, or an overconfident network."""
    recipe, rows, tempering = provenance.recipe, provenance.rows, provenance.temperature
    if recipe is not None and rows is not None and recipe["training"].get("kl_weight") is not None:
        temperature = recipe["training"]["kl_weight"] * rows["train"]
        has_prior = recipe["posterior"].get("prior_std") is not None
        has_kl = METHODS[recipe["method"]].is_variational or has_prior
        if has_kl and abs(temperature - 1.0) > TEMPERATURE_TOLERANCE:
            yield f"a tempered posterior with temperature {temperature:.2g} (training.kl_weight)"
    if tempering is not None and tempering.value > MAX_TEMPERATURE:
        cause = "training failed: " if provenance.recalibrated is None else ""
        yield f"{cause}the network alone is overconfident (temperature {tempering.value:.4g})"
    facts = provenance.convergence or {}
    warning = change_warning(facts) if facts else None
    # Early stopping ends a fit on purpose before it converges.
    if warning is not None and not (recipe and recipe["training"].get("early_stopping")):
        yield warning
    if facts.get("nll", -math.inf) >= facts.get("guess_nll", math.inf):
        figures = f"{facts['nll']:.3g} against {facts['guess_nll']:.3g} nats per row"
        yield (
            f"draws predict training rows no better than a guess ({figures}): training failed, or "
            "the posterior has collapsed to the prior; try a smaller network, another prior or a "
            "smaller training.kl_weight"
        )


def _agreement_warnings(
    quality: Quality, method: type[Method], max_draws: int | None
) -> Iterator[str]:
    shares = quality.disagreement, quality.disagreement_on_noise
    if max_draws == 1 or max(shares) > MIN_DISAGREEMENT:
        return
    remedy = "longer training of the members"
    if method.is_variational:
        remedy = "more epochs, or a larger posterior.initial_log_std"
    elif method is Laplace:
        remedy = "a larger posterior.prior_std"
    elif method.groups_rows:
        remedy = "a larger posterior.rate"
    on_test, on_noise = (f"{100 * share:.2g} %" for share in shares)
    yield (
        f"the draws agree, so the model has no epistemic uncertainty: their disagreement is "
        f"{on_test} of the total uncertainty on test rows and {on_noise} on noise; try {remedy}"
    )


def publish_draft(store: ModelStore, name: str, draft: Draft, alias: str = LATEST) -> Manifest:
    """Publish a draft as the next version of `name`, after a preflight in a new process."""
    scratch = store.storage.scratch  # /tmp may be too small for a version
    scratch.mkdir(parents=True, exist_ok=True)
    for trial in scratch.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another publication has just ended
            if time.time() - trial.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(trial, ignore_errors=True)
    with TemporaryDirectory(prefix=PREFIX, dir=scratch) as folder:
        manifest = ModelStore(Path(folder)).publish(name, draft.description, draft.files)
        with closing(PreflightProcess()) as process:
            failure = process.run(Path(folder), name, manifest.version, PREFLIGHT_S)
    if failure is not None:
        message = f"model {name} is not published, because the service could not load it"
        raise PreflightError(f"{message}: {failure}")
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


def _too_few_rows(detectors: DetectorSpec, categories: CategorySpec | None) -> str | None:
    if categories is None:
        return few_rows_warning(detectors.ranking_rows)
    rows = map(min, categories.judged_rows, categories.true_rows)
    sizes = zip(categories.names, rows, strict=True)
    small_categories = [f"{name[:40]} {n}" for name, n in sizes if n < MIN_CAUTIOUS_ROWS]
    if not small_categories:
        return None
    names = ", ".join(small_categories[:MAX_SHOWN])
    more = len(small_categories) - MAX_SHOWN
    suffix = f" and {more} more" if more > 0 else ""
    effect = "has sets and intervals that hold everything"
    if categories.kind == "class":
        effect = "is in every set"
    return (
        f"calibrated by {categories.kind}, and of {names}{suffix} there are fewer than "
        f"{MIN_CAUTIOUS_ROWS} ranking rows: "
        f"at fpr {DEFAULT_FPR:g} such a {categories.kind} is not flagged, at coverage "
        f"{DEFAULT_COVERAGE:g} it {effect}"
    )


def _abstention_spec(calibration: Calibration, risk: float | None) -> AbstentionSpec:
    draws = int(calibration.draw_counts[-1])
    smallest = calibration.rank_tables[draws].smallest_risk(DEFAULT_FPR)
    if risk is not None:
        rows = len(calibration.rank_tables[draws].statistic)
        message = "with %d ranking rows, the smallest risk is %.2g; it falls with more rows"
        log.info(message, rows, smallest)
        if risk < smallest:
            log.warning("the model never answers, because serving.risk is only %g", risk)
    return AbstentionSpec(confidence=CONFIDENCE, smallest_risk=smallest, risk=risk)
