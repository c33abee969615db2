"""`python -m training calibrate`: publish a model anew, calibrated on other data.

Rows are read and split in `training.publishing.recalibrate`, and go through
`training.publishing.stages`; the calibration itself is `training.calibration.calibrate`.
"""

import argparse

from model_store.artifacts.manifest import ALL_FILES
from model_store.errors import InvalidInput
from training.commands import folders
from training.publishing.recalibrate import load_like, recalibrate, split_rows
from training.versions import open_version

HELP = "publish a model anew, calibrated on other data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    folders.add_version(parser)
    parser.add_argument(
        "--data",
        metavar="SRC",
        required=True,
        help="rows that the model was not fitted on, with labels or targets",
    )
    parser.add_argument(
        "--target", metavar="COLUMN", help="what is predicted, of csv: and parquet: data"
    )
    folders.add_new_name(parser)
    for split in ("reference", "ranking"):
        parser.add_argument(
            f"--{split}-rows",
            type=int,
            metavar="N",
            help="by default as many as now, at most a third of the rows",
        )
    parser.add_argument(
        "--seed", type=int, default=0, help="of how the rows are split, and of the draws"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only what was published")


def run(options: argparse.Namespace) -> None:
    """Calibrate, publish, and print the quality of what was published."""
    store = folders.store()
    parent = open_version(store, options.model, ALL_FILES)
    if options.seed < 0:
        raise InvalidInput("--seed", "0 or more", f"{options.seed}")
    data = load_like(parent, folders.data_root(), options.data, options.target)
    third = (len(data.train) + len(data.test)) // 3
    now = parent.manifest.detectors
    reference_rows = (
        min(now.reference_rows, third) if options.reference_rows is None else options.reference_rows
    )
    ranking_rows = (
        min(now.ranking_rows, third) if options.ranking_rows is None else options.ranking_rows
    )
    rows = split_rows(data, reference_rows, ranking_rows, options.seed)
    origin = {
        "source": options.data,
        **({} if options.target is None else {"target": options.target}),
    }
    name = options.name or parent.manifest.name
    manifest = recalibrate(store, parent, data, rows, options.seed, name, origin)
    for key, value in manifest.quality.items():
        print(f"  {key:32} {value:.4f}")
    print(f"published {manifest.name} version {manifest.version}")
