"""`python -m training inspect`: say what data are taken for, before anything is fitted.

What is found is in `training.data`.
"""

import argparse
from pathlib import Path

from model_store.errors import InvalidInput
from training.commands import folders
from training.data import load, split, split_sizes
from training.data.description import draw, report
from training.data.findings import Findings, findings_of, near_duplicate_lines
from training.data.plan import name_of, plan_of
from training.messages import unsaid
from training.recipe import DataSection

HELP = "say what data are taken for, before anything is fitted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--data",
        metavar="SRC",
        required=True,
        help="csv:FILE, parquet:FILE, npz:FILE, images:FOLDER",
    )
    folders.add_data(parser)
    parser.add_argument(
        "--picture", type=Path, help="where its PNG is written, by default NAME-inspect.png in runs"
    )


def run(options: argparse.Namespace) -> None:
    """Print what was found, and draw it."""
    section = folders.data_section(options)
    found = findings_of(section, folders.data_root(), options.task)
    print("\n".join([*report(found), *(f"! {line}" for line in _across_splits(found, section))]))
    if found.columns or found.classes or found.targets is not None:
        path = options.picture or folders.runs() / f"{name_of(found.source)}-inspect.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(found, path)
        print(f"picture: {path}")


def _across_splits(found: Findings, section: DataSection) -> list[str]:
    """Return what to say of rows that a fit by default has seen nearly the same; nothing of what
    bears no fit."""
    if found.task is None:
        return []
    try:
        recipe = plan_of(found, section, None, None).recipe
        with unsaid():  # the data are read once more
            return near_duplicate_lines(
                split(load(recipe, folders.data_root()), split_sizes(recipe))
            )
    except InvalidInput:
        return []
