"""Data sources: one module a family, `rows` for what they give, and here the way from a recipe to its data.

| source | module |
|---|---|
| `digits` | `bundled` |
| `idx:DIR` | `idx` |
| `images:PATH` | `images` |
| `npz:FILE` | `arrays` |
| `csv:FILE`, `parquet:FILE`, `uci:DIR` | `tables` |
"""

from collections.abc import Callable
from pathlib import Path

from model_store.errors import InvalidInput
from training.data.arrays import npz
from training.data.bundled import digits
from training.data.idx import idx
from training.data.images import images
from training.data.rows import Dataset, Rows, Splits, SplitSizes, split
from training.data.tables import csv, parquet, uci
from training.recipe import Recipe

__all__ = ["Dataset", "Rows", "SplitSizes", "Splits", "load", "split", "split_sizes"]

OF_CLASSES = ("digits", "idx", "images")
OF_TARGETS = ("uci",)
FROM_FILES: dict[str, Callable[[Path, Recipe], Dataset]] = {
    "idx": lambda path, _: idx(path),
    "images": lambda path, recipe: images(path, recipe.data.test_fraction, recipe.data.image_size),
    "npz": lambda path, recipe: npz(path, recipe.task, recipe.data.test_fraction),
    "csv": lambda path, recipe: csv(path, recipe.task, recipe.data, split_sizes(recipe)),
    "parquet": lambda path, recipe: parquet(path, recipe.task, recipe.data, split_sizes(recipe)),
    "uci": lambda path, recipe: uci(path, recipe.data.split, split_sizes(recipe)),
}
EXPECTED = "`digits`, `idx:DIR`, `images:PATH`, `npz:FILE`, `csv:FILE`, `parquet:FILE` or `uci:DIR`"


def load(recipe: Recipe, root: Path) -> Dataset:
    """Read a recipe's data; relative paths are under `root`.

    Columns of tables are encoded by what the recipe's training split says of them, so nothing of the other splits is
    in the encoding: split by `split_sizes` of the same recipe.

    Raises:
        InvalidInput: if there is no such source, its files are not as they should be, or it is not of the recipe's
            task.
    """
    source = recipe.data.source
    kind, _, rest = source.partition(":")
    if source != "digits" and (kind not in FROM_FILES or not rest):
        raise InvalidInput("data.source", EXPECTED, repr(source))
    if recipe.task == "regression" and kind in OF_CLASSES:
        raise InvalidInput("task", f"classification, since `{kind}` has classes", "regression")
    if recipe.task == "classification" and kind in OF_TARGETS:
        raise InvalidInput("task", f"regression, since `{kind}` has real targets", "classification")
    if recipe.data.target is not None and kind not in ("csv", "parquet"):
        raise InvalidInput("data.target", f"none, since `{kind}` has no columns to choose from", "one")
    return digits() if source == "digits" else FROM_FILES[kind](root / rest, recipe)


def split_sizes(recipe: Recipe) -> SplitSizes:
    """Return how a recipe's training rows are split."""
    section = recipe.data
    return SplitSizes(section.validation_rows, section.reference_rows, section.ranking_rows, recipe.seed)
