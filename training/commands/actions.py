"""The functions that implement the training commands.

They import modules that need torch only after they have checked their options.
"""

import argparse
import json
import logging
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from model_store.artifacts.manifest import ALL_FILES, Manifest
from model_store.commands import repeat
from model_store.errors import InvalidInput, expected_value
from model_store.inference.model import NEEDED, Model
from model_store.state.database import Database
from model_store.state.labels import has_state
from training import log, silence
from training import recipe as recipes
from training.commands import ROOT
from training.data import load
from training.data.cells import RawTable
from training.data.findings import (
    Findings,
    duplicate_warnings,
    inspect_source,
    similar_class_warnings,
)
from training.data.plan import Plan, make_plan, recipe_text, write_recipe
from training.data.rows import split, split_sizes
from training.folders import data_root, open_store
from training.recipe import Recipe
from training.sections import DataSection
from training.versions import WEIGHTS, fitted_data, load_for, load_parent, open_parent, open_version

# Fields of `--json`
FINDING_KEYS = ("source", "rows", "task", "reason", "target", "shape", "classes", "notes")
COLUMN_KEYS = ("name", "kind", "reason", "missing", "notes")
KINDS = ("numeric", "categorical", "time", "ignored")
# Keys of `[data]` that are also options
DATA_OPTIONS = ("group", "time", "weight", "test_fraction", "date_format", "decimal", "thousands")


def _data_section(options: argparse.Namespace) -> DataSection:
    keys: dict[str, Any] = {
        "source": options.data,
        "target": options.target,
        "missing_values": options.missing_value,
        "columns": _column_kinds(options),
        **{name: getattr(options, name) for name in DATA_OPTIONS},
    }
    try:
        return DataSection.model_validate({k: v for k, v in keys.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        expected = expected_value(first["msg"])
        option = f"--{first['loc'][0]}".replace("_", "-")
        raise InvalidInput(option, expected, repr(first["input"])) from None


def _column_kinds(options: argparse.Namespace) -> dict[str, str]:
    kinds = dict.fromkeys(options.ignore or (), "ignored")
    for text in options.column or ():
        name, _, kind = text.rpartition("=")
        if kind not in KINDS:
            raise InvalidInput("--column", f"NAME=KIND with one of {', '.join(KINDS)}", repr(text))
        kinds[name] = kind
    return kinds


def fit(options: argparse.Namespace) -> None:
    plan, raw = _plan(options) if options.recipe is None else (None, None)
    recipe = _read_recipe(options) if plan is None else plan.recipe
    store = open_store()
    start = options.warm_start and open_parent(store, options.warm_start, "--warm-start")
    data = load_for(recipe, data_root(), start, raw)
    del raw  # It may be large.
    splits = split(data, split_sizes(recipe))
    for line in similar_class_warnings(data.classes) + duplicate_warnings(splits):
        log.info("! %s", line)

    from training.evaluation.evaluate import shift_lines, write_report
    from training.fit import find_device, fit, publish
    from training.publishing.baselines import table

    device = find_device(options.device)
    if plan is not None:
        _write_recipe(plan, options.recipe_out or Path(f"{recipe.name}.toml"))
    result = fit(recipe, data, start=start, device=device, quiet=options.quiet)
    manifest = publish(result, store, anyway=options.anyway)
    log.info("writing the report")
    report = write_report(store, manifest, data)
    if options.json:
        keys = ("name", "version", "quality", "warnings")
        print(json.dumps(_select(manifest, keys)))
        return
    print("", *table(manifest), sep="\n")
    for line in _flag_lines(manifest, len(data.test.x)):
        print(line)
    for line in shift_lines(report):
        print(line)
    print(f"\npublished {manifest.label}; learning curves: {result.folder}/progress.png")
    print("to serve it, run `dubito serve`")


def _flag_lines(manifest: Manifest, test_rows: int) -> Iterator[str]:
    """Compare the share of flagged test rows with its range."""
    from training.evaluation.metrics import flag_range

    names = ("flag_rate", "uniform_noise_flagged")
    rate, noise = (manifest.quality[f"{name}_at_05"] for name in names)
    calibration_rows = manifest.detectors.ranking_rows
    low, high = flag_range(test_rows, calibration_rows, 0.05)
    expected = "up to 5 % on average"
    if manifest.categories is None:
        ends = f"{100 * low:.1f} to {100 * high:.1f} %"
        expected += f", {ends} with {calibration_rows} calibration rows"
    rates = f"{100 * rate:.1f} % of test rows (expected: {expected}), {100 * noise:.1f} % of noise"
    yield f"flagged: {rates}"
    if manifest.categories is None and rate > high:
        yield "! more test rows are flagged than expected: they may differ from calibration rows"


def _read_recipe(options: argparse.Namespace) -> Recipe:
    for name in ("task", *DATA_OPTIONS, "missing_value", "ignore", "column", "recipe_out"):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidInput(option, "no value, because the recipe sets it", "one")
    included = ROOT / options.recipe
    path = included if included.exists() and not options.recipe.exists() else options.recipe
    return recipes.override(
        recipes.load(path),
        name=options.name,
        seed=options.seed,
        source=options.data,
        target=options.target,
        leave_out=options.leave_out,
    )


def _plan(options: argparse.Namespace) -> tuple[Plan, RawTable | None]:
    if options.data is None:
        raise InvalidInput("recipe", "a recipe, or --data SRC to make one", "neither")
    section = _data_section(options)
    if options.leave_out:
        section = section.model_copy(update={"leave_out": options.leave_out})
    findings = inspect_source(section, data_root(), options.task)
    log.info("%s", "\n".join(findings.report()))
    plan = make_plan(findings, section, options.name, options.seed)
    log.info("%s", "\n".join([recipe_text(plan), *(f"! {text}" for text in plan.warnings)]))
    return plan, findings.raw


def _write_recipe(plan: Plan, path: Path) -> None:
    if write_recipe(plan, path) != plan.recipe:  # The recipe would read a file in its folder.
        expected = f"a folder without another {plan.recipe.data.source}"
        raise InvalidInput("--recipe-out", expected, str(path.parent))
    log.info("recipe: %s (to fit it again, run `dubito fit %s`)", path, path)


def inspect(options: argparse.Namespace) -> None:
    section = _data_section(options)
    findings = inspect_source(section, data_root(), options.task)
    lines = similar_class_warnings(findings.classes) + _warnings_before_fit(findings, section)
    if options.json:
        content = _select(findings, FINDING_KEYS)
        content["columns"] = [_select(column, COLUMN_KEYS) for column in findings.columns]
        content["warnings"] = [*findings.warnings, *lines]
        print(json.dumps(content))
        return
    print("\n".join([*findings.report(len(findings.columns)), *(f"! {line}" for line in lines)]))


def _select(record: object, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: getattr(record, key) for key in keys}


def _warnings_before_fit(findings: Findings, section: DataSection) -> list[str]:
    if findings.task is None:
        return []
    lines: list[str] = []
    try:
        with silence():
            plan = make_plan(findings, section, None, None)
            lines += plan.warnings
            data = load(plan.recipe, data_root(), raw=findings.raw)
            splits = split(data, split_sizes(plan.recipe))
        return lines + duplicate_warnings(splits)
    except InvalidInput as error:
        return [*lines, f"a fit would fail: {error}"]


def prune(options: argparse.Namespace) -> None:
    store = open_store()
    parent = open_parent(store, options.model, "model")
    data = fitted_data(parent, data_root(), options.data)

    from training.publishing.derive import prune_version

    name = options.name or parent.manifest.name
    manifest, facts = prune_version(store, parent, data, options.fraction, name, options.anyway)
    for key, before, after in (
        ("weights", facts.weights, facts.kept_weights),
        ("bytes of graphs and weights", facts.parent_bytes, facts.bytes),
        *((key, parent.manifest.quality[key], manifest.quality[key]) for key in manifest.quality),
    ):
        print(f"  {key:36} {before:>12,.6g} -> {after:,.6g}")
    print(f"published {manifest.label}")


def calibrate(options: argparse.Namespace) -> None:
    if options.quiet:
        log.setLevel(logging.WARNING)
    store = open_store()
    parent = open_version(store, options.model, ALL_FILES)
    if options.seed < 0:
        raise InvalidInput("--seed", "0 or more", f"{options.seed}")

    from training.publishing.derive import load_for_version, recalibrate, split_rows

    version = load_parent(parent, "model")
    data = load_for_version(version, data_root(), options.data, options.target)
    share = len(data.rows) // 3
    detectors = parent.manifest.detectors
    reference, ranking = options.reference_rows, options.ranking_rows
    if reference is None:
        reference = min(detectors.reference_rows, share)
    if ranking is None:
        ranking = min(detectors.ranking_rows, share)
    rows = split_rows(data, reference, ranking, options.seed)
    origin = {"source": options.data}
    if options.target is not None:
        origin["target"] = options.target
    name = options.name or parent.manifest.name
    manifest = recalibrate(store, parent, rows, name, origin)
    for key, value in manifest.quality.items():
        print(f"  {key:32} {_format(value)}")
    print(f"published {manifest.label}")


def evaluate(options: argparse.Namespace) -> None:
    store = open_store()
    artifact = open_version(store, options.model, (WEIGHTS, *NEEDED))
    version = load_parent(artifact, "model")

    from training.evaluation.evaluate import EvaluationOptions, evaluate_version, shift_lines
    from training.evaluation.outliers import OutlierSource

    sources = tuple(OutlierSource.parse(text, data_root()) for text in options.outliers)
    rows, draws, seed, data = options.rows, options.draws, options.seed, options.data
    evaluation = EvaluationOptions(sources, rows, draws, seed, data)
    model = Model.load(artifact)
    result = evaluate_version(store, version, model, evaluation, options.quiet)
    if options.json:
        print(json.dumps(result.report))
        return
    intervals = result.report["summary_intervals"]
    for key, value in result.report["summary"].items():
        low, high = intervals[key]
        print(f"  {key:40} {_format(value)} ({_format(low)} to {_format(high)})")
    for line in shift_lines(result):
        print(f"  {line}")
    print(f"report of {version.label}: {result.locate('report.html')}")


def compare(options: argparse.Namespace) -> None:
    store = open_store(writes=False)
    names, files = (options.first, options.second), (WEIGHTS, *NEEDED)
    artifacts = [open_version(store, name, files) for name in names]
    versions = [load_parent(artifact, "model") for artifact in artifacts]

    from training.evaluation.evaluate import EvaluationOptions
    from training.evaluation.pairs import compare_versions, comparison_lines

    evaluation = EvaluationOptions(
        rows=options.rows, draws=options.draws, seed=options.seed, source=options.data
    )
    models = [Model.load(artifact) for artifact in artifacts]
    comparison = compare_versions(versions, models, evaluation)
    if options.json:
        print(json.dumps(comparison, indent=1, allow_nan=False))
    else:
        print(*comparison_lines(comparison), sep="\n")


def candidate(options: argparse.Namespace) -> None:
    if options.min_labels < 1:
        raise InvalidInput("--min-labels", "1 or more", str(options.min_labels))
    state = options.state or Path(os.environ.get("DUBITO_STATE", "state"))
    if options.watch:
        repeat(lambda: _try_candidate(options, state), log.info, log.error)
    else:
        _try_candidate(options, state)


def _try_candidate(options: argparse.Namespace, state: Path) -> None:
    if not has_state(state):
        log.info("no labels yet: %s does not contain a state", state)
        return
    from training.candidate import count_labels, count_tried_labels, gather_labels, make_candidate
    from training.fit import find_device

    store, name = open_store(), options.model
    with closing(Database(state)) as database:
        sources = gather_labels(store, database, name, data_root(), options.data)
        for reason, count in sources.provenance.left_out.items():
            log.info("! leaving out %d labels: %s", count, reason)
        if options.watch:
            before = count_tried_labels(store, database, name, options.promote)
        else:
            before = count_labels(store, name, sources.parent.manifest.version)
        new = sources.provenance.rows - before
        if new < options.min_labels:
            log.info("%d of %d required new labels", max(new, 0), options.min_labels)
            return
        make_candidate(store, database, sources, find_device(options.device), options.promote)


def _format(value: float) -> str:
    """Format a number with four decimals, or four significant digits if it is small."""
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.4g}"
