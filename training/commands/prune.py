"""`python -m training prune`: publish a Bayes by Backprop model without its least certain weights.

What is done to the model is in `training.publishing.prune`, and which weights go in
`training.publishing.pruning`.
"""

import argparse

from training.commands import folders
from training.versions import fitted_data, open_parent

HELP = "publish a Bayes by Backprop model without its least certain weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    folders.add_version(parser)
    parser.add_argument(
        "--fraction",
        type=float,
        required=True,
        help="of all weights, how many are removed, such as .75",
    )
    folders.add_new_name(parser)
    parser.add_argument(
        "--data",
        metavar="SRC",
        help="where the data of its fit are now, if no longer where they were",
    )


def run(options: argparse.Namespace) -> None:
    """Prune, publish, and print what changed."""
    store = folders.store()
    parent = open_parent(store, options.model, "model")
    data = fitted_data(parent, folders.data_root(), options.data)

    from training.publishing.prune import (
        prune_version,
    )  # what is wrong so far is answered before torch is there

    name = options.name or parent.manifest.name
    pruned = prune_version(store, parent, data, options.fraction, name, folders.runs())
    facts, manifest = pruned.facts, pruned.manifest
    for key, before, after in (
        ("weights", facts.weights, facts.kept_weights),
        ("bytes of graphs and weights", facts.parent_bytes, facts.bytes),
        ("ms a request, one row, fresh draws", facts.parent_request_ms, facts.request_ms),
        *((key, parent.manifest.quality[key], manifest.quality[key]) for key in manifest.quality),
    ):
        print(f"  {key:36} {before:>12,.6g} -> {after:,.6g}")
    print(f"published {manifest.name} version {manifest.version}; plot: {pruned.plot}")
