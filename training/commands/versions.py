"""The `prune`, `calibrate`, `evaluate`, `compare` and `candidate` commands."""

import argparse
import json
import logging
import os
import time
from contextlib import closing
from itertools import count
from pathlib import Path

from model_store.artifacts.manifest import ALL_FILES
from model_store.errors import DubitoError, InvalidInput
from model_store.inference.model import NEEDED, Model
from model_store.state.database import Database
from model_store.state.labels import has_state
from training import log
from training.folders import data_root, open_store
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

    data = load_for_version(parent, data_root(), options.data, options.target)
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
    manifest = recalibrate(store, parent, data, rows, name, origin)
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
    if not options.interval_s > 0:
        raise InvalidInput("--interval-s", "more than 0", str(options.interval_s))
    state = options.state or Path(os.environ.get("DUBITO_STATE", "state"))
    if not options.watch:
        _try_candidate(options, state)
        return
    for poll in count(1):
        try:
            _try_candidate(options, state)
        except DubitoError as error:  # it may be fixed before the next poll
            log.error("%s", error)
        try:
            if poll == 1:
                log.info("repeating every %g s", options.interval_s)
            time.sleep(options.interval_s)
        except KeyboardInterrupt:  # no fit is running, so this is not an error
            return


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
