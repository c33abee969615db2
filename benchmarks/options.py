"""What benchmarks of published models share: options, the model that they name, and its rows."""

import argparse
import os
from pathlib import Path

import numpy as np

from benchmarks.model import ROOT
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from training.data import Rows, Splits, load, split, split_sizes
from training.versions import recipe_of

RESULTS = ROOT / "docs" / "results"


def parser_of(
    description: str | None, written: str, name: str | None = "name"
) -> argparse.ArgumentParser:
    """Return a parser with the model that is measured, `--store`, and `--write`, which keeps
    results as `written`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if name is not None:
        parser.add_argument(name)
    parser.add_argument(
        "--store", type=Path, default=Path(os.environ.get("DUBITO_STORE", "models"))
    )
    parser.add_argument("--write", action="store_true", help=f"write docs/results/{written}")
    return parser


def add_splits(parser: argparse.ArgumentParser, splits: int = 200) -> None:
    """Add how many random splits of rows are counted over, and their seed."""
    parser.add_argument("--splits", type=int, default=splits)
    parser.add_argument("--seed", type=int, default=0)


def data_root() -> Path:
    """Return the folder of data, DUBITO_DATA."""
    return Path(os.environ.get("DUBITO_DATA", "data"))


def opened(options: argparse.Namespace) -> Model:
    """Return the newest version of the model that is named."""
    store = ModelStore(options.store)
    return Model.load(store.open(options.name, store.resolve(options.name), wanted=NEEDED))


def splits_of(model: Model) -> Splits:
    """Return the splits that a model was fitted and calibrated on."""
    recipe = recipe_of(model.manifest, "name")
    return split(load(recipe, data_root(), model.manifest.input.columns), split_sizes(recipe))


def unseen_rows(model: Model) -> Rows:
    """Return all rows that a model was not fitted on and that did not choose its checkpoint."""
    splits = splits_of(model)
    parts = (splits.reference, splits.ranking, splits.test)
    return Rows(
        np.concatenate([rows.x for rows in parts]), np.concatenate([rows.y for rows in parts])
    )
