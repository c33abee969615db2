"""Rows unlike the data, in a model's shape and range: noise, and other data sets, for evaluation.

| set | rows |
|---|---|
| `uniform` | every number uniform over the data's range |
| `gaussian` | every number minimum + range * N(0, 1), not clipped |
| `NAME=images:PATH` | images `test/CLASS/*` (or `train/CLASS/*`) of a folder or zip, made grey or colour, resized |
| `NAME=idx:DIR` | `t10k-images-idx3-ubyte`, or else `train-images-...`, or `images-...`, plain or gzipped; resized |
| `NAME=npz:FILE` | an array `x_test`, `x` or `x_train` of rows as the model takes them, in its units |
| `NAME=csv:FILE`, `NAME=parquet:FILE` | of models of text: the text in the column of that name |

The first two and CIFAR-10 in grey, Omniglot and notMNIST are the sets of Hendrycks and Gimpel, "A
baseline for detecting misclassified and out-of-distribution examples in neural networks", 2017,
whose code has noise on pixels from 0 to 1 as above. Images have pixels from 0 to 255, which become
the data's range. Where a source has more rows than are wanted, a random choice by seed is taken.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from model_store.artifacts.manifest import NAME_PATTERN, ImageSpec, InputSpec
from model_store.errors import InvalidInput
from model_store.sources.images import as_row
from model_store.sources.npy import read_npz
from training.data.arrays import check_ids, numbers
from training.data.cells import csv_table, parquet_table, values_of
from training.data.idx import find_idx, read_idx
from training.data.images import some_images
from training.data.texts import TextRows
from training.recipe import DataSection
from training.seeds import EvaluationStream, generator

if TYPE_CHECKING:
    from model_store.sources.text import TextEncoder

OPTION = "--outliers"
EXPECTED = "NAME=SRC with SRC `images:PATH`, `npz:FILE`, `idx:DIR`, or of text `csv:FILE` or `parquet:FILE`"
OF_TEXT = ("csv", "parquet")
IDX_STEMS = ("t10k-images-idx3-ubyte", "train-images-idx3-ubyte", "images-idx3-ubyte")
ARRAYS = ("x_test", "x", "x_train")


@dataclass(frozen=True)
class OutlierSource:
    """A named source of rows."""

    name: str
    kind: Literal["images", "npz", "idx", "csv", "parquet"]
    path: Path

    @classmethod
    def parse(cls, text: str, root: Path) -> "OutlierSource":
        """Read NAME=SRC; relative paths are under `root`.

        Raises:
            InvalidInput: if it is not of that form.
        """
        match = re.fullmatch(r"([^=]+)=(images|npz|idx|csv|parquet):(.+)", text)
        if match is None or re.fullmatch(NAME_PATTERN, match[1]) is None:
            raise InvalidInput(OPTION, EXPECTED, repr(text)[:200])
        return cls(match[1], match[2], root / match[3])  # type: ignore[arg-type]

    def rows(
        self, spec: InputSpec, most: int, seed: int, encoder: "TextEncoder | None" = None
    ) -> Float32[np.ndarray, "N I"]:
        """Return at most so many rows, a random choice by seed; text as an encoder makes rows of
        it.

        Raises:
            InvalidInput: if the source is not there, is damaged, or cannot be made into rows of the
                model's shape.
        """
        if self.kind in OF_TEXT and encoder is not None:
            return _of_texts(self.kind, self.path, encoder, most, seed)
        if self.kind in OF_TEXT or (spec.takes_ids and self.kind != "npz"):
            what = "a model of text" if self.kind in OF_TEXT else "rows that are no ids"
            raise InvalidInput(
                OPTION, f"{what} for `{self.kind}:`", f"one of rows of shape {spec.shape}"
            )
        if self.kind == "npz":
            return _of_npz(self.path, spec, most, seed)
        read = some_images if self.kind == "images" else _of_idx
        shown = read(self.path, spec.shape, _decoding(spec), most, seed).astype(np.float32)
        return np.float32(spec.minimum) + shown * np.float32((spec.maximum - spec.minimum) / 255.0)


def uniform(spec: InputSpec, rows: int, seed: int) -> Float32[np.ndarray, "N I"]:
    """Return rows of uniform noise over the data's range."""
    noise = generator(seed, EvaluationStream.UNIFORM).uniform(
        spec.minimum, spec.maximum, (rows, _size(spec))
    )
    return noise.astype(np.float32)


def gaussian(spec: InputSpec, rows: int, seed: int) -> Float32[np.ndarray, "N I"]:
    """Return rows of normal noise, its mean the data's minimum and its standard deviation their
    range."""
    noise = generator(seed, EvaluationStream.GAUSSIAN).standard_normal((rows, _size(spec)))
    return (spec.minimum + (spec.maximum - spec.minimum) * noise).astype(np.float32)


def some(x: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Return at most so many rows, a random choice by seed."""
    return x[np.random.default_rng(seed).permutation(len(x))[:most]]


def _decoding(spec: InputSpec) -> ImageSpec:
    """Return how images become rows: as those that the model takes do, of whatever size."""
    if spec.image is not None and spec.image.resize:
        return spec.image
    if len(spec.shape) == 2:
        return ImageSpec(mode="L", resize=True)
    if len(spec.shape) == 3 and spec.shape[0] == 3:
        return ImageSpec(mode="RGB", resize=True)
    raise InvalidInput(OPTION, f"`npz:`, since rows of shape {spec.shape} are not images", "images")


def _of_idx(
    folder: Path, shape: tuple[int, ...], decoding: ImageSpec, most: int, seed: int
) -> UInt8[np.ndarray, "N I"]:
    there = [
        stem for stem in IDX_STEMS if (folder / stem).is_file() or (folder / f"{stem}.gz").is_file()
    ]
    images = some(read_idx(find_idx(folder, (there or [*IDX_STEMS])[0]), 3), most, seed)
    return np.stack([as_row(Image.fromarray(image), shape, decoding) for image in images])


def _of_npz(path: Path, spec: InputSpec, most: int, seed: int) -> Float32[np.ndarray, "N I"]:
    arrays = read_npz(path)
    name = next((name for name in ARRAYS if name in arrays), None)
    if name is None:
        raise InvalidInput(path.name, f"an array {', '.join(ARRAYS)}", f"{sorted(arrays)}"[:200])
    x = arrays[name]
    if x.ndim < 2 or len(x) == 0 or x[0].size != _size(spec):
        raise InvalidInput(name, f"rows of shape {spec.shape}", f"shape {x.shape}")
    chosen = some(x, most, seed)
    rows = numbers(chosen, name).astype(np.float32)
    if spec.takes_ids:
        check_ids(chosen, name, int(spec.maximum))
    return rows


def _of_texts(
    kind: str, path: Path, encoder: "TextEncoder", most: int, seed: int
) -> Float32[np.ndarray, "N I"]:
    column = encoder.spec.column
    section = DataSection(source=f"{kind}:{path}", text=column, tokenizer="")
    table = csv_table(path, None, section) if kind == "csv" else parquet_table(path, None, section)
    if column not in table.column_names:
        raise InvalidInput(path.name, f"a column {column!r}", f"{table.column_names}"[:200])
    texts = values_of(table.column(column), column, "categorical")
    return TextRows(encoder, b"").encode(
        [texts[i] for i in some(np.arange(len(texts)), most, seed).tolist()]
    )


def _size(spec: InputSpec) -> int:
    return int(np.prod(spec.shape))
