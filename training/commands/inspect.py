"""`python -m training inspect`: say what data are taken for, before anything is fitted.

What is found is in `training.planning`.
"""

import argparse
from pathlib import Path

from training.commands import folders
from training.planning.findings import findings_of
from training.planning.picture import draw
from training.planning.plan import name_of
from training.planning.text import report

HELP = "say what data are taken for, before anything is fitted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--data", metavar="SRC", required=True, help="csv:FILE, parquet:FILE, npz:FILE, images:FOLDER"
    )
    folders.add_data(parser)
    parser.add_argument("--picture", type=Path, help="where its PNG is written, by default NAME-inspect.png in runs")


def run(options: argparse.Namespace) -> None:
    """Print what was found, and draw it."""
    found = findings_of(folders.data_section(options), folders.data_root(), options.task)
    print("\n".join(report(found)))
    if found.columns or found.classes or found.targets is not None:
        path = options.picture or folders.runs() / f"{name_of(found.source)}-inspect.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(found, path)
        print(f"picture: {path}")
