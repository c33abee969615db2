"""Standard splits of UCI regression data sets, by Hernandez-Lobato and Adams (2015).

A folder below DUBITO_DATA has the rows in `data.txt`. `index_features.txt` and `index_target.txt`
list columns, and `index_train_I.txt` and `index_test_I.txt` list the rows of split I.
"""

from dataclasses import replace

import numpy as np

from training.data import Dataset, split_sizes
from training.data.columns import Values
from training.data.tables import Targets, encode_table
from training.folders import data_root
from training.recipe import Recipe


def load_uci(recipe: Recipe) -> Dataset:
    """Load the data of a recipe with the source `uci:FOLDER/SPLIT`.

    Columns are named x0, x1, ...
    """
    name, _, split = recipe.data.source.removeprefix("uci:").rpartition("/")
    folder = data_root() / name
    data = np.loadtxt(folder / "data.txt", ndmin=2)
    features, target, train, test = (
        np.loadtxt(folder / f"index_{part}.txt", ndmin=1).astype(np.int64)
        for part in ("features", "target", f"train_{split}", f"test_{split}")
    )
    table = {f"x{i}": Values(data[:, column]) for i, column in enumerate(features.tolist())}
    y = data[:, target[0]].astype(np.float32)
    targets = Targets(y[train], y[test], (), train, test)
    encoded = encode_table(table, targets, split_sizes(recipe), ())
    return replace(encoded, train=replace(encoded.train, ids=np.arange(len(train))))
