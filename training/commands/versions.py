"""The commands `prune`, `calibrate`, `evaluate` and `compare`."""

import argparse
import json
from contextlib import nullcontext

from model_store.artifacts.manifest import ALL_FILES
from model_store.errors import InvalidInput
from model_store.inference.model import NEEDED, Model
from training import silence
from training.commands.common import format_figure, open_store, print_quality
from training.folders import data_root
from training.versions import WEIGHTS, fitted_data, load_parent, open_parent, open_version

# Functions import modules that need torch only after they have checked their options.


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
        ("ms per request, one row, new draws", facts.parent_request_ms, facts.request_ms),
        *((key, parent.manifest.quality[key], manifest.quality[key]) for key in manifest.quality),
    ):
        print(f"  {key:36} {before:>12,.6g} -> {after:,.6g}")
    print(f"published {manifest.label}")


def calibrate(options: argparse.Namespace) -> None:
    with silence() if options.quiet else nullcontext():
        _calibrate(options)


def _calibrate(options: argparse.Namespace) -> None:
    store = open_store()
    parent = open_version(store, options.model, ALL_FILES)
    if options.seed < 0:
        raise InvalidInput("--seed", "0 or more", f"{options.seed}")

    from training.publishing.derive import load_for_version, recalibrate, split_rows

    data = load_for_version(parent, data_root(), options.data, options.target)
    share = len(data.rows) // (4 if options.temperature else 3)
    detectors = parent.manifest.detectors
    reference, ranking = options.reference_rows, options.ranking_rows
    if reference is None:
        reference = min(detectors.reference_rows, share)
    if ranking is None:
        ranking = min(detectors.ranking_rows, share)
    validation = reference if options.temperature else 0
    rows = split_rows(data, reference, ranking, options.seed, validation)
    origin = {"source": options.data}
    if options.target is not None:
        origin["target"] = options.target
    name = options.name or parent.manifest.name
    manifest = recalibrate(store, parent, data, rows, options.seed, name, origin)
    print_quality(manifest.quality)
    print(f"published {manifest.label}")


def evaluate(options: argparse.Namespace) -> None:
    store = open_store()
    artifact = open_version(store, options.model, (WEIGHTS, *NEEDED))
    version = load_parent(artifact, "model")

    from training.evaluation.evaluate import EvaluationOptions, evaluate_version, shift_lines
    from training.evaluation.outliers import OutlierSource

    sources = tuple(OutlierSource.parse(text, data_root()) for text in options.outliers)
    rows, draws, seed, data = options.rows, options.draws, options.seed, options.data
    evaluation = EvaluationOptions(sources, options.attacks, rows, draws, seed, data)
    model, root = Model.load(artifact), data_root()
    result = evaluate_version(store, version, model, root, evaluation, options.quiet)
    if options.json:
        print(json.dumps(result.report))
        return
    intervals = result.report["summary_intervals"]
    for key, value in result.report["summary"].items():
        low, high = intervals[key]
        print(f"  {key:40} {format_figure(value)} ({format_figure(low)} to {format_figure(high)})")
    for line in shift_lines(result):
        print(f"  {line}")
    print(f"report of {version.label}: {result.locate('report.html')}")


def compare(options: argparse.Namespace) -> None:
    store = open_store(writes=False)
    names, files = (options.first, options.second), (WEIGHTS, *NEEDED)
    artifacts = [open_version(store, name, files) for name in names]
    versions = [load_parent(artifact, "model") for artifact in artifacts]

    from training.evaluation.comparison import compare_versions
    from training.evaluation.evaluate import EvaluationOptions

    evaluation = EvaluationOptions(
        rows=options.rows, draws=options.draws, seed=options.seed, source=options.data
    )
    models = [Model.load(artifact) for artifact in artifacts]
    comparison = compare_versions(versions, models, data_root(), evaluation)
    if options.json:
        print(json.dumps(comparison.content(), indent=1, allow_nan=False))
    else:
        print(comparison.text())
