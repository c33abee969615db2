"""Standard splits of UCI regression data sets, by Hernandez-Lobato and Adams (2015).

A folder below DUBITO_DATA has the rows in `data.txt`. `index_features.txt` and `index_target.txt`
list columns, and `index_train_I.txt` and `index_test_I.txt` list the rows of split I.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64, Int64

from training.data.columns import Values
from training.data.rows import Dataset, split_sizes
from training.data.tables import Targets, encode_table
from training.folders import data_root
from training.recipe import Recipe


def load_uci(recipe: Recipe) -> Dataset:
    """Load the data of a recipe with the source `uci:FOLDER/SPLIT`."""
    name, _, split = recipe.data.source.removeprefix("uci:").rpartition("/")
    folder = data_root() / name
    train, test = (_read_index(folder, f"{part}_{split}") for part in ("train", "test"))
    return split_table(recipe, *read_table(folder), train, test)


def read_table(folder: Path) -> tuple[Float64[np.ndarray, "N I"], Float32[np.ndarray, "N"]]:
    """Read the input columns and the target."""
    data = np.loadtxt(folder / "data.txt", ndmin=2)
    features, target = (_read_index(folder, part) for part in ("features", "target"))
    return data[:, features], data[:, target[0]].astype(np.float32)


def split_table(
    recipe: Recipe,
    x: Float64[np.ndarray, "N I"],
    y: Float32[np.ndarray, "N"],
    train: Int64[np.ndarray, "R"],
    test: Int64[np.ndarray, "T"],
) -> Dataset:
    """Make a data set whose columns are named x0, x1, ..."""
    table = {f"x{i}": Values(column) for i, column in enumerate(x.T)}
    targets = Targets(y[train], y[test], (), train, test)
    encoded = encode_table(table, targets, split_sizes(recipe), ())
    return replace(encoded, train=replace(encoded.train, ids=np.arange(len(train))))


def _read_index(folder: Path, part: str) -> Int64[np.ndarray, "M"]:
    return np.loadtxt(folder / f"index_{part}.txt", ndmin=1).astype(np.int64)
