"""Load the data of a recipe.

| source | module |
|---|---|
| `digits`, `idx:DIR`, `npz:FILE` | `arrays` |
| `images:PATH` | `images` |
| `csv:FILE`, `parquet:FILE`, `uci:DIR` | `tables` |
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from model_store.errors import InvalidInput
from model_store.sources.columns import Columns
from model_store.sources.npy import read_npz
from training import log
from training.data.arrays import dataset_of_arrays, digits, idx, path_below
from training.data.cells import csv_table, parquet_table
from training.data.images import images
from training.data.rows import (
    Dataset,
    Rows,
    Splits,
    is_image,
    leave_out,
    renumber,
    row_digest,
    split,
    with_classes_of,
)
from training.data.splitting import SplitSizes
from training.data.tables import MAX_GROUPS, dataset_of, id_lists, uci
from training.data.texts import TextRows
from training.recipe import IMAGE_DENSITIES, Recipe

__all__ = [
    "MAX_GROUPS",
    "Dataset",
    "Rows",
    "SplitSizes",
    "Splits",
    "is_image",
    "leave_out",
    "load",
    "renumber",
    "split",
    "split_sizes",
    "with_classes_of",
]

OF_CLASSES = ("digits", "idx", "images")
OF_TARGETS = ("uci",)
OF_COLUMNS = ("csv", "parquet", "uci")
KINDS = ("idx", "images", "npz", "csv", "parquet", "uci")
EXPECTED = "`digits`, `idx:DIR`, `images:PATH`, `npz:FILE`, `csv:FILE`, `parquet:FILE` or `uci:DIR`"


def load(
    recipe: Recipe, root: Path, columns: Columns = (), tokenizer: bytes | None = None
) -> Dataset:
    """Read the data of a recipe; relative paths are under `root`.

    The training split alone decides how the columns of a table are encoded, so split the result by
    `split_sizes` of the same recipe. `columns` and `tokenizer` (a file's content) of a version
    replace that encoding.
    """
    section = recipe.data
    kind, _, rest = section.source.partition(":")
    if section.source != "digits" and (kind not in KINDS or not rest):
        raise InvalidInput("data.source", EXPECTED, repr(section.source))
    _refuse_mismatched(recipe, kind)
    if columns and kind not in OF_COLUMNS:
        expected = f"a table with the columns {[c.name for c in columns][:20]}"
        raise InvalidInput("data.source", expected, f"`{kind}`")
    texts = None if section.text is None else TextRows.of(section, root, tokenizer)
    if columns and kind != "uci":
        kinds = section.columns | {column.name: column.kind for column in columns}
        section = section.model_copy(update={"columns": kinds})
        recipe = recipe.model_copy(update={"data": section})
    if section.source == "digits":
        data = digits()
    else:
        data = _read(kind, path_below(root, rest), recipe, columns, texts)
    of_images = [name for name in recipe.combined if name in IMAGE_DENSITIES]
    if of_images and not is_image(data.shape):
        expected = f"no {of_images[0]}: rows are no images"
        raise InvalidInput("serving.combined", expected, f"rows of {data.shape}")
    if data.train.ids is None:
        data = replace(data, train=replace(data.train, ids=np.arange(len(data.train))))
    # Tables leave classes out before they encode columns.
    data = data if data.columns or data.text else leave_out(data, section.leave_out)
    return data if section.trained_on is None else _without_seen(data, recipe, root)


def _without_seen(data: Dataset, recipe: Recipe, root: Path) -> Dataset:
    """Mark the training rows that the network has seen, and remove such test rows."""
    source = recipe.data.trained_on
    section = recipe.data.model_copy(update={"source": source, "trained_on": None, "leave_out": []})
    recipe = recipe.model_copy(update={"data": section})
    try:
        known = load(recipe, root, data.columns, data.tokenizer)
    except InvalidInput as error:
        field, is_of_source = error.field, error.field.startswith("data.source")
        rest = field.removeprefix("data.source") if is_of_source else f": {field}"
        raise InvalidInput(f"data.trained_on{rest}", error.expected, error.got) from None
    if known.shape != data.shape:
        expected = f"rows of shape {data.shape}, as the data have"
        raise InvalidInput("data.trained_on", expected, f"{known.shape}")
    digests = {row_digest(row) for row in known.rows.x}
    train, test = (
        replace(rows, seen=np.array([row_digest(row) in digests for row in rows.x], dtype=bool))
        for rows in (data.train, data.test)
    )
    unseen = len(train.unseen) + len(test.unseen)
    message = "%d of %d rows are rows of %s: they neither validate, calibrate nor test"
    log.info(message, len(data.rows) - unseen, len(data.rows), source)
    if not len(test.unseen):
        expected = "some test rows that the network was not trained on"
        raise InvalidInput("data.trained_on", expected, "none")
    return replace(data, train=train, test=replace(test.unseen, seen=None))


def _read(
    kind: str, path: Path, recipe: Recipe, columns: Columns, texts: TextRows | None
) -> Dataset:
    section, task, sizes = recipe.data, recipe.task, split_sizes(recipe)
    if kind == "idx":
        return idx(path)
    if kind == "images":
        return images(path, section)
    if kind == "npz":
        return dataset_of_arrays(read_npz(path), task, section)
    if kind == "uci":
        return uci(path, section.split, sizes, columns)
    if kind == "csv":
        table = csv_table(path, task, section, columns)
    else:
        table = parquet_table(path, task, section)
        if section.integers:
            return dataset_of_arrays(id_lists(table, task, section), task, section)
    return dataset_of(table, task, section, sizes, columns, texts)


def _refuse_mismatched(recipe: Recipe, kind: str) -> None:
    section = recipe.data
    if recipe.task == "regression" and kind in OF_CLASSES:
        raise InvalidInput("task", f"classification, since `{kind}` has classes", "regression")
    if recipe.task == "classification" and kind in OF_TARGETS:
        raise InvalidInput("task", f"regression, since `{kind}` has real targets", "classification")
    no_columns = f"none, since `{kind}` has no columns to choose from"
    for key in ("target", "group", "calibration_group", "time", "id"):
        if getattr(section, key) is not None and kind not in ("csv", "parquet"):
            raise InvalidInput(f"data.{key}", no_columns, "one")
    if section.integers and kind not in ("npz", "parquet"):
        expected = f"none, since rows of `{kind}` are no ids (`npz:` and `parquet:` may be)"
        raise InvalidInput("data.integers", expected, "true")
    if section.text is not None and kind not in ("csv", "parquet"):
        raise InvalidInput("data.text", no_columns, "one")
    if section.image_size is not None and kind != "images":
        expected = f"none, since rows of `{kind}` are not read from image files"
        raise InvalidInput("data.image_size", expected, "one")


def split_sizes(recipe: Recipe) -> SplitSizes:
    section = recipe.data
    sizes = {name: section.held_out(name) for name in ("validation", "reference", "ranking")}
    return SplitSizes(**sizes, seed=recipe.seed, is_stratified=section.is_stratified)
