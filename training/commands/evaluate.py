"""`python -m training evaluate`: measure a published version, and keep the report beside it in the
store.

The report is made in `training.evaluation.report`.
"""

import argparse

from model_store.inference.model import NEEDED, Model
from training.commands import folders
from training.versions import WEIGHTS, open_version, parent_of

HELP = "measure a published version, and keep the evidence beside it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    folders.add_version(parser)
    parser.add_argument(
        "--data", metavar="SRC", help="test rows of other data than those of its fit"
    )
    parser.add_argument(
        "--outliers",
        metavar="NAME=SRC",
        action="append",
        default=[],
        help="rows unlike the data: images:PATH, npz:FILE, idx:DIR, of text csv:FILE; may be given several times",
    )
    parser.add_argument(
        "--attacks", action="store_true", help="attack the test rows of a classification"
    )
    parser.add_argument(
        "--draws", type=int, help="of each row, by default the version's own number"
    )
    parser.add_argument("--rows", type=int, default=1000, help="of each set, at most")
    parser.add_argument("--seed", type=int, default=0, help="of which rows and draws")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> None:
    """Evaluate, keep the report, and print its summary."""
    store = folders.store()
    artifact = open_version(store, options.model, (WEIGHTS, *NEEDED))
    version = parent_of(artifact, "model")

    from training.evaluation.outliers import OutlierSource
    from training.evaluation.report import Wanted, evaluate_version

    sources = tuple(OutlierSource.parse(text, folders.data_root()) for text in options.outliers)
    wanted = Wanted(
        sources, options.attacks, options.rows, options.draws, options.seed, options.data
    )
    found = evaluate_version(
        store, version, Model.load(artifact), folders.data_root(), wanted, options.quiet
    )
    intervals = found.report["summary_intervals"]
    for key, value in found.report["summary"].items():
        low, high = intervals[key]
        print(f"  {key:40} {value:.4f} ({low:.4f} to {high:.4f})")
    print(f"evidence of {version.label}: {found.place('evidence.md')}")
