"""Commands about published versions: `prune` and `calibrate` make others of them, `evaluate` and
`compare` measure them."""

import argparse
import json

from model_store.artifacts.manifest import ALL_FILES
from model_store.errors import InvalidInput
from model_store.inference.model import NEEDED, Model
from training.command_names import COMMANDS
from training.commands import (
    Commands,
    add_anyway,
    add_json,
    add_target,
    add_version,
    open_store,
    print_quality,
    show_figure,
)
from training.folders import data_root, runs_folder
from training.versions import WEIGHTS, fitted_data, open_parent, open_version, parent_of

# Each imports what needs torch when what is wrong with its options has been answered.


def add_prune(commands: Commands) -> None:
    parser = commands.add_parser("prune", help=COMMANDS["prune"])
    parser.set_defaults(run=_prune)
    add_version(parser)
    parser.add_argument(
        "--fraction",
        type=float,
        required=True,
        help="of all weights, how many are removed, such as .75",
    )
    _add_new_name(parser)
    parser.add_argument(
        "--data",
        metavar="SRC",
        help="where the data of its fit are now, if no longer where they were",
    )
    add_anyway(parser)


def add_calibrate(commands: Commands) -> None:
    parser = commands.add_parser("calibrate", help=COMMANDS["calibrate"])
    parser.set_defaults(run=_calibrate)
    add_version(parser)
    add = parser.add_argument
    add(
        "--data",
        metavar="SRC",
        required=True,
        help="rows that the model was not fitted on, with labels or targets",
    )
    add_target(parser)
    _add_new_name(parser)
    for split in ("reference", "ranking"):
        add(
            f"--{split}-rows",
            type=int,
            metavar="N",
            help="by default as many as now, at most a third of the rows (or a quarter)",
        )
    add(
        "--temperature",
        action="store_true",
        help="fit the temperature again first, on as many other rows as there are reference rows",
    )
    add("--seed", type=int, default=0, help="of how the rows are split, and of the draws")
    add("--quiet", action="store_true", help="no progress, only what was published")


def add_evaluate(commands: Commands) -> None:
    parser = commands.add_parser("evaluate", help=COMMANDS["evaluate"])
    parser.set_defaults(run=_evaluate)
    add_version(parser)
    add = parser.add_argument
    add("--data", metavar="SRC", help="other rows than the test rows of its fit")
    add(
        "--outliers",
        metavar="NAME=SRC",
        action="append",
        default=[],
        help="rows unlike the data: images:PATH, npz:FILE, idx:DIR, of tables and text csv:FILE; "
        "may be given several times",
    )
    add("--attacks", action="store_true", help="attack the test rows of a classification")
    add("--draws", type=int, help="of each row, by default the version's own number")
    add("--rows", type=int, default=1000, help="of each set, at most")
    add("--seed", type=int, default=0, help="of which rows and draws")
    add("--quiet", action="store_true", help="no progress bar")
    add_json(parser)


def add_compare(commands: Commands) -> None:
    parser = commands.add_parser("compare", help=COMMANDS["compare"])
    parser.set_defaults(run=_compare)
    add_version(parser, "first")
    add = parser.add_argument
    add("second", metavar="NAME[:VERSION]", help="what is compared with it")
    add("--data", metavar="SRC", help="other rows than the test rows of the first one's fit")
    add("--draws", type=int, help="of each row, by default each version's own number")
    add("--rows", type=int, default=1000, help="at most")
    add("--seed", type=int, default=0, help="of which rows and draws")
    add_json(parser)


def _add_new_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--as", dest="name", metavar="NEWNAME", help="publish under this name in place of its own"
    )


def _prune(options: argparse.Namespace) -> None:
    store = open_store()
    parent = open_parent(store, options.model, "model")
    data = fitted_data(parent, data_root(), options.data)

    from training.publishing.derive import prune_version

    name = options.name or parent.manifest.name
    pruned = prune_version(
        store, parent, data, options.fraction, name, runs_folder(), options.anyway
    )
    facts, manifest = pruned.facts, pruned.manifest
    for key, before, after in (
        ("weights", facts.weights, facts.kept_weights),
        ("bytes of graphs and weights", facts.parent_bytes, facts.bytes),
        ("ms a request, one row, fresh draws", facts.parent_request_ms, facts.request_ms),
        *((key, parent.manifest.quality[key], manifest.quality[key]) for key in manifest.quality),
    ):
        print(f"  {key:36} {before:>12,.6g} -> {after:,.6g}")
    print(f"published {manifest.label}; plot: {pruned.plot}")


def _calibrate(options: argparse.Namespace) -> None:
    store = open_store()
    parent = open_version(store, options.model, ALL_FILES)
    if options.seed < 0:
        raise InvalidInput("--seed", "0 or more", f"{options.seed}")

    from training.publishing.derive import load_like, recalibrate, split_rows

    data = load_like(parent, data_root(), options.data, options.target)
    share = len(data.rows) // (4 if options.temperature else 3)
    now = parent.manifest.detectors
    reference, ranking = options.reference_rows, options.ranking_rows
    if reference is None:
        reference = min(now.reference_rows, share)
    if ranking is None:
        ranking = min(now.ranking_rows, share)
    validation = reference if options.temperature else 0
    rows = split_rows(data, reference, ranking, options.seed, validation)
    origin = {"source": options.data}
    if options.target is not None:
        origin["target"] = options.target
    name = options.name or parent.manifest.name
    manifest = recalibrate(store, parent, data, rows, options.seed, name, origin)
    print_quality(manifest.quality)
    print(f"published {manifest.label}")


def _evaluate(options: argparse.Namespace) -> None:
    store = open_store()
    artifact = open_version(store, options.model, (WEIGHTS, *NEEDED))
    version = parent_of(artifact, "model")

    from training.evaluation.evaluate import Wanted, evaluate_version
    from training.evaluation.outliers import OutlierSource

    sources = tuple(OutlierSource.parse(text, data_root()) for text in options.outliers)
    rows, draws, seed, data = options.rows, options.draws, options.seed, options.data
    wanted = Wanted(sources, options.attacks, rows, draws, seed, data)
    model, root = Model.load(artifact), data_root()
    found = evaluate_version(store, version, model, root, wanted, options.quiet)
    if options.json:
        print(json.dumps(found.report))
        return
    intervals = found.report["summary_intervals"]
    for key, value in found.report["summary"].items():
        low, high = intervals[key]
        print(f"  {key:40} {show_figure(value)} ({show_figure(low)} to {show_figure(high)})")
    print(f"report of {version.label}: {found.locate('report.html')}")


def _compare(options: argparse.Namespace) -> None:
    store = open_store(writes=False)
    names, files = (options.first, options.second), (WEIGHTS, *NEEDED)
    artifacts = [open_version(store, name, files) for name in names]
    versions = [parent_of(artifact, "model") for artifact in artifacts]

    from training.evaluation.comparison import compare_versions
    from training.evaluation.evaluate import Wanted

    wanted = Wanted(rows=options.rows, draws=options.draws, seed=options.seed, source=options.data)
    models = [Model.load(artifact) for artifact in artifacts]
    comparison = compare_versions(versions, models, data_root(), wanted)
    if options.json:
        print(json.dumps(comparison.content(), indent=1, allow_nan=False))
    else:
        print(comparison.text())
