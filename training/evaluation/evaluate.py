"""Evaluation of a published version (`dubito evaluate`)."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from model_store.artifacts.manifest import Manifest
from model_store.artifacts.report import EvaluationReport, publish_report
from model_store.artifacts.store import ModelStore
from model_store.errors import InvalidInput
from model_store.inference.model import NEEDED, Model
from model_store.inference.noise import MAX_SEED
from training import log, silence
from training.data.findings import describe_duplicates
from training.data.rows import Dataset, Rows, leave_out, split, split_sizes
from training.evaluation.metrics import LEVEL, RESAMPLES, Ends, Record
from training.evaluation.outliers import OPTION, OutlierSource, generated_sets, sample_rows
from training.evaluation.quality import (
    PART_COVERAGE,
    REQUEST_ROWS,
    ServedPrediction,
    ServedPredictor,
    measure_parts,
    measure_set,
    measure_shift,
    measure_test,
)
from training.folders import data_root
from training.methods import AnchoredEnsemble, MaximumLikelihood
from training.progress import Bar
from training.recipe import override
from training.seeds import EvaluationStream, generator, hash_key
from training.versions import (
    WEIGHTS,
    Parent,
    Provenance,
    fitted_data,
    load_if_fitted,
    load_parent,
    load_unfitted,
    match_version,
)

MAX_DRAWS = 1000
SUMMARY = ("accuracy", "rmse", "crps", "log_likelihood", "brier", "expected_calibration_error")
LEFT_OUT = "left-out"  # test rows of classes that are not the model's


@dataclass(frozen=True)
class EvaluationOptions:
    outliers: tuple[OutlierSource, ...] = ()
    rows: int = 1000  # maximum per set
    draws: int | None = None  # None is the version's default
    seed: int = 0
    source: str | None = None  # of the test rows; None is the fit's source
    has_unusual_sets: bool = True  # generated from the test rows


def evaluate_version(
    store: ModelStore,
    version: Parent,
    model: Model,
    options: EvaluationOptions,
    quiet: bool = False,
    fit_data: Dataset | None = None,
) -> EvaluationReport:
    """Evaluate a version and store its report.

    `fit_data` is the data that the version was fitted on, if it is already loaded.
    """
    manifest = version.manifest
    check_options(version, options)
    draws = options.draws or version.manifest.noise.default_draws
    data, is_fitted = fit_data, True
    if data is None:
        data, is_fitted = load_data(version, data_root(), options.source)
    source = options.source or version.recipe.data.source
    test = test_rows(data, is_fitted, options, source)
    sets = _sets(version, model, data, test, options) if options.has_unusual_sets else {}
    predictor = ServedPredictor(model, draws, options.seed)
    predicted, outliers = predictor("test", test, data.group_names), {}
    measures = measure_test(predicted, test, data.classes, options.seed)
    with Bar(len(sets), "set", quiet) as bar:
        for name, rows in sets.items():
            outliers[name] = measure_set(predicted, predictor(name, rows))
            bar.update()
            bar.report(f"measured {name}")
    shift = _measure_shift(version, data, predictor, predicted, test) if is_fitted else None
    figures, intervals = _summary(measures, outliers)
    report = {
        "model": manifest.name,
        "version": manifest.version,
        "task": manifest.task,
        "method": manifest.method,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": source,
        "seed": options.seed,
        "draws": draws,
        "judged_draws": predicted.prediction.rank_tables.num_draws,
        "rows_per_request": REQUEST_ROWS,
        "confidence_level": LEVEL,
        "resamples": RESAMPLES,
        "detectors": {
            "all": [*predicted.prediction.detected],
            "combined": [*manifest.detectors.combined],
        },
        "summary": figures,
        "summary_intervals": intervals,
        "test": measures,
        "parts": measure_parts(predicted, test, data.classes, data.group_names, options.seed),
        "shift": shift,
        "outliers": outliers,
    }
    page = report_page(report, manifest).encode()
    return publish_report(store, manifest.name, manifest.version, report, page)


def write_report(store: ModelStore, manifest: Manifest, data: Dataset) -> EvaluationReport:
    """Evaluate a new version on its fit's test rows, and store the report.

    Sets of unusual rows are left out, since they can take longer than a short fit.
    """
    artifact = store.open(manifest.name, manifest.version, (WEIGHTS, *NEEDED))
    version, model = load_parent(artifact, "version"), Model.load(artifact)
    with silence():
        options = EvaluationOptions(has_unusual_sets=False)
        return evaluate_version(store, version, model, options, True, data)


def _sets(
    version: Parent, model: Model, data: Dataset, test: Rows, options: EvaluationOptions
) -> dict[str, np.ndarray]:
    spec, seed = version.manifest.input, hash_key(options.seed, EvaluationStream.OUTLIER_ROWS)
    sets = generated_sets(spec, test.x, test.y, bool(data.classes), options.seed)
    if data.left_out is not None:
        sets[LEFT_OUT] = sample_rows(data.left_out, options.rows, seed)
    for source in options.outliers:
        if source.name in sets:
            raise InvalidInput(OPTION, f"names other than {[*sets]}", repr(source.name))
        sets[source.name] = source.rows(spec, options.rows, seed, model.text_encoder)
    return {name: rows.astype(np.float32) for name, rows in sets.items() if len(rows)}


def check_options(version: Parent, options: EvaluationOptions) -> None:
    manifest = version.manifest
    max_draws = min(manifest.noise.max_draws or MAX_DRAWS, MAX_DRAWS)
    if options.draws is not None and not 1 <= options.draws <= max_draws:
        raise InvalidInput("--draws", f"1 to {max_draws}", str(options.draws))
    if options.rows < 2:
        raise InvalidInput("--rows", "at least 2", str(options.rows))
    if not 0 <= options.seed <= MAX_SEED:
        raise InvalidInput("--seed", f"0 to {MAX_SEED}", str(options.seed))


def test_rows(
    data: Dataset, is_fitted: bool, options: EvaluationOptions, source: str | None = None
) -> Rows:
    """Select up to `options.rows` test rows, and log their number if `source` is set.

    All rows of a new source are test rows, unless the source defines a test split.
    """
    takes_all = data.is_held_out and not is_fitted
    rows = data.rows if takes_all else data.test
    order = generator(options.seed, EvaluationStream.TEST_ROWS).permutation(len(rows))
    test = rows.take(order[: options.rows])
    if source is not None:
        kind = "all" if takes_all else "the test"
        part = f"{len(test)} (--rows) of " if len(test) < len(rows) else ""
        log.info("measured on %s%s rows of %s (%d)", part, kind, source, len(rows))
    return test


def load_data(version: Parent, root: Path, source: str | None) -> tuple[Dataset, bool]:
    """Load a source for a version, and check whether the model was fitted on it."""
    if source is None:
        return fitted_data(version, root), True
    fit_data = load_if_fitted(version, root, source)
    if fit_data is not None:
        return fit_data, True
    recipe, fit_source = version.recipe, version.recipe.data.source
    recipe = override(recipe, source=source, leave_out=[])
    loaded = load_unfitted(recipe, root, version.manifest.input.columns, version.tokenizer)
    unknown = [name for name in loaded.classes if name not in version.classes]
    data = match_version(leave_out(loaded, unknown), version.manifest, "--data")
    if loaded.is_held_out and unknown:
        left_out = leave_out(replace(loaded, test=loaded.rows), unknown).left_out
        data = replace(data, left_out=left_out)
    recalibrated = Provenance.of(version.manifest).recalibrated
    if recalibrated is not None and data.digest() == recalibrated.data_digest:
        message = "%s was calibrated on some of these rows: flag rates on new rows may differ"
        log.info(message, version.label)
    if source == fit_source:
        message = "%s has changed since %s was fitted on it: some test rows may be training rows"
        log.info(message, source, version.label)
    elif data.columns and (fit_data := load_if_fitted(version, root, fit_source)) is not None:
        rows = data.rows if data.is_held_out else data.test
        counts = describe_duplicates(fit_data.train, {f"rows of {source}": rows})
        if counts:
            message = "%s are training rows of %s: quality may be overestimated"
            log.info(message, counts, version.label)
    return data, False


def _measure_shift(
    version: Parent,
    data: Dataset,
    predictor: ServedPredictor,
    predicted: ServedPrediction,
    test: Rows,
) -> Record | None:
    section = version.recipe.data
    column = section.time or section.group
    if column is None:
        return None
    rows = split(data, split_sizes(version.recipe)).ranking.x.astype(np.float32)
    seed = hash_key(predictor.seed, EvaluationStream.OUTLIER_ROWS)
    ranking = predictor("ranking", sample_rows(rows, len(test), seed))
    by = "group" if section.time is None else "time"
    return {**measure_shift(ranking, predicted, test.y), "by": by, "column": column}


def shift_lines(report: EvaluationReport) -> list[str]:
    """Describe how a version behaves on later rows or new groups."""
    shift = report.report.get("shift")
    if shift is None:
        return []
    rows = "later rows" if shift["by"] == "time" else "new groups"
    uncertainty = "bald" if "bald" in shift["scores"] else "epistemic_std"
    parts = [f"coverage {shift['covered']:.3f} (0.95 expected)"]
    if "0.05" in shift["flagged"]:
        parts.append(f"flag rate {shift['flagged']['0.05']:.3f} (0.05 expected)")
    auroc = shift["scores"][uncertainty]["auroc"]
    parts.append(f"AUROC of {uncertainty} {auroc:.2f} (0.5 without a shift)")
    line = f"{rows} by {shift['column']}: {', '.join(parts)}"
    if shift["confidence_intervals"]["covered"][1] >= PART_COVERAGE:
        return [line]
    return [line, f"! sets or intervals cover too few {rows}"]


def _summary(test: Record, outliers: dict[str, Record]) -> tuple[dict[str, float], dict[str, Ends]]:
    ends = test["confidence_intervals"]
    figures, intervals = {}, {}
    for key in SUMMARY:
        if key in ends:
            figures[f"test_{key}"], intervals[f"test_{key}"] = test[key], ends[key]
    for fpr, rate in test["flagged"].items():
        name = f"test_flagged_at_{fpr}"
        figures[name], intervals[name] = rate, ends[f"flagged.{fpr}"]
    for outlier_set, entry in outliers.items():
        name, flag = f"{outlier_set}_flag_auroc", entry["scores"]["flag"]
        figures[name], intervals[name] = flag["auroc"], flag["confidence_intervals"]["auroc"]
    return figures, intervals


def percent(share: float | None, ends: Ends | None = None) -> str:
    if share is None:
        return ""
    text = f"{100 * share:.2f}"
    return text if ends is None else f"{text} ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"


def number(value: float | None, ends: Ends | None = None) -> str:
    if value is None:
        return "infinite"
    return f"{value:.4g}" if ends is None else f"{value:.4g} ({ends[0]:.3g} to {ends[1]:.3g})"


_TEMPLATES = Environment(
    loader=PackageLoader("training.evaluation"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_TEMPLATES.filters["percent"] = percent
_TEMPLATES.globals.update(percent=percent, number=number)


def render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(template).render(values)


def report_page(report: Record, manifest: Manifest) -> str:
    has_gaps = manifest.method not in (AnchoredEnsemble.name, MaximumLikelihood.name)
    return render("report.html", report=report, manifest=manifest, has_gaps=has_gaps)
