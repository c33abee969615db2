"""Loaders for a recipe's data, by kind of source.

| source | module |
|---|---|
| `digits`, `idx:DIR`, `npz:FILE` | `arrays` |
| `images:PATH` | `images` |
| `csv:FILE`, `parquet:FILE` | `tables` |
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from model_store.errors import InvalidInput
from model_store.sources.columns import Columns
from model_store.sources.npy import read_npz
from training import log
from training.data.arrays import digits, idx, make_array_dataset, resolve_path
from training.data.cells import RawTable, read_raw, typed_table
from training.data.images import images
from training.data.rows import Dataset, is_image, leave_out, row_digest
from training.data.tables import TextRows, make_table_dataset
from training.recipe import IMAGE_DENSITIES, Recipe

CLASS_SOURCES = ("digits", "idx", "images")
TABLES = ("csv", "parquet")
KINDS = ("idx", "images", "npz", *TABLES)
EXPECTED = "`digits`, `idx:DIR`, `images:PATH`, `npz:FILE`, `csv:FILE` or `parquet:FILE`"


def load(
    recipe: Recipe,
    root: Path,
    columns: Columns = (),
    tokenizer: bytes | None = None,
    raw: RawTable | None = None,
) -> Dataset:
    """Load a recipe's data, resolving relative paths against `root`.

    The encoding of columns is fitted on the training split, so split the result by the same
    recipe's `split_sizes`. A version's `columns` and `tokenizer` (the content of its file) replace
    that encoding. `raw` is the content of a table's file, if it was read before.
    """
    section = recipe.data
    kind, _, rest = section.source.partition(":")
    if section.source != "digits" and (kind not in KINDS or not rest):
        raise InvalidInput("data.source", EXPECTED, repr(section.source))
    _check_source_kind(recipe, kind)
    if columns and kind not in TABLES:
        expected = f"a table with the columns {[c.name for c in columns][:20]}"
        raise InvalidInput("data.source", expected, f"`{kind}`")
    texts = None if section.text is None else TextRows.load(section, root, tokenizer)
    if columns:
        kinds = section.columns | {column.name: column.kind for column in columns}
        section = section.model_copy(update={"columns": kinds})
        recipe = recipe.model_copy(update={"data": section})
    path = resolve_path(root, rest)
    if kind == "digits":
        data = digits()
    elif kind == "idx":
        data = idx(path, section)
    elif kind == "images":
        data = images(path, section)
    elif kind == "npz":
        data = make_array_dataset(read_npz(path), recipe.task, section)
    else:
        table = typed_table(raw or read_raw(kind, path, section), recipe.task, section, columns)
        data = make_table_dataset(table, recipe, columns, texts)
    image_densities = [name for name in recipe.combined if name in IMAGE_DENSITIES]
    if image_densities and not is_image(data.shape):
        expected = f"detectors without {image_densities[0]}, which needs images"
        raise InvalidInput("serving.combined", expected, f"rows of shape {data.shape}")
    if data.train.ids is None:
        data = replace(data, train=replace(data.train, ids=np.arange(len(data.train))))
    # Tables leave classes out before they encode columns.
    data = data if data.columns or data.text else leave_out(data, section.leave_out)
    return data if section.trained_on is None else _remove_seen_rows(data, recipe, root)


def _remove_seen_rows(data: Dataset, recipe: Recipe, root: Path) -> Dataset:
    source = recipe.data.trained_on
    section = recipe.data.model_copy(update={"source": source, "trained_on": None, "leave_out": []})
    recipe = recipe.model_copy(update={"data": section})
    try:
        known_data = load(recipe, root, data.columns, data.tokenizer)
    except InvalidInput as error:
        field, is_of_source = error.field, error.field.startswith("data.source")
        rest = field.removeprefix("data.source") if is_of_source else f": {field}"
        raise InvalidInput(f"data.trained_on{rest}", error.expected, error.received) from None
    if known_data.shape != data.shape:
        expected = f"rows of shape {data.shape} as in data.source"
        raise InvalidInput("data.trained_on", expected, f"{known_data.shape}")
    digests = {row_digest(row) for row in known_data.rows.x}
    is_seen, is_test_seen = (
        np.array([row_digest(row) in digests for row in rows.x], dtype=bool)
        for rows in (data.train, data.test)
    )
    message = "%d of %d rows are also in %s and are used only for training"
    log.info(message, is_seen.sum() + is_test_seen.sum(), len(data.rows), source)
    if is_test_seen.all():
        expected = "test rows that the network was not trained on"
        raise InvalidInput("data.trained_on", expected, "none")
    return replace(data, is_seen=is_seen, test=data.test.take(np.flatnonzero(~is_test_seen)))


def _check_source_kind(recipe: Recipe, kind: str) -> None:
    section = recipe.data
    if recipe.task == "regression" and kind in CLASS_SOURCES:
        raise InvalidInput("task", f"classification, because `{kind}` has classes", "regression")
    no_columns = f"no value, because `{kind}` has no named columns"
    for key in ("target", "group", "calibration_group", "time", "id", "weight", "text"):
        if getattr(section, key) is not None and kind not in TABLES:
            raise InvalidInput(f"data.{key}", no_columns, repr(getattr(section, key))[:100])
    if section.vocabulary is not None and kind != "npz":
        raise InvalidInput("data.vocabulary", "an `npz:` source", f"`{kind}`")
    if section.image_size is not None and kind != "images":
        raise InvalidInput("data.image_size", "an `images:` source", f"`{kind}`")
