"""`python -m training compare`: two published versions on the same test rows, compared in pairs.

The comparison is made in `training.evaluation.comparison`.
"""

import argparse

from model_store.inference.model import NEEDED, Model
from training.commands import folders
from training.versions import WEIGHTS, open_version, parent_of

HELP = "compare two published versions on the same test rows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "first", metavar="NAME[:VERSION]", help="VERSION is a number or an alias, by default latest"
    )
    parser.add_argument("second", metavar="NAME[:VERSION]", help="what is compared with it")
    parser.add_argument(
        "--data", metavar="SRC", help="test rows of other data than those of the first one's fit"
    )
    parser.add_argument(
        "--draws", type=int, help="of each row, by default each version's own number"
    )
    parser.add_argument("--rows", type=int, default=1000, help="at most")
    parser.add_argument("--seed", type=int, default=0, help="of which rows and draws")


def run(options: argparse.Namespace) -> None:
    """Compare, print a table, and keep it with a plot in a folder of the runs."""
    store = folders.store(writes=False)
    artifacts = [
        open_version(store, name, (WEIGHTS, *NEEDED)) for name in (options.first, options.second)
    ]
    versions = [parent_of(artifact, "model") for artifact in artifacts]

    from training.evaluation.comparison import compare_versions
    from training.evaluation.report import Wanted

    wanted = Wanted(rows=options.rows, draws=options.draws, seed=options.seed, source=options.data)
    models = [Model.load(artifact) for artifact in artifacts]
    comparison = compare_versions(versions, models, folders.data_root(), wanted)
    names = "-".join(f"{v.manifest.name}-{v.manifest.version}" for v in versions)
    folder = folders.runs() / f"{names}-compared"
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in comparison.files().items():
        (folder / file).write_bytes(content)
    print(comparison.text())
    print(f"comparison: {folder / 'comparison.md'}")
