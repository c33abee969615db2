"""Outlier rows for evaluation: noise, other data sets, and changed test rows.

`docs/evaluation.md` lists the sets. Noise follows Hendrycks and Gimpel, "A baseline for detecting
misclassified and out-of-distribution examples in neural networks", 2017. Tables use `even` instead,
because noise is too easy to detect there: one-hot columns are 0 or 1, never .37. If a source has
too many rows, the seed selects a random subset.

Shapes: N rows of I numbers.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float32, Int64, Num, UInt8

from model_store.artifacts.manifest import (
    NAME_PATTERN,
    CategoricalColumn,
    ImageSpec,
    InputSpec,
    NumericColumn,
    TimeColumn,
    column_width,
)
from model_store.errors import InvalidInput
from model_store.sources.columns import encode, fill_missing
from model_store.sources.files import open_rows
from model_store.sources.rows import RowReader
from training.data.arrays import resolve_path
from training.data.cells import csv_source
from training.data.images import sample_images
from training.seeds import EvaluationStream, generator

if TYPE_CHECKING:
    from model_store.sources.text import TextEncoder

OPTION = "--outliers"
EXPECTED = (
    "NAME=SRC with SRC `images:PATH`, `npz:FILE`, or for tables and text `csv:FILE` or "
    "`parquet:FILE`"
)
MAX_DISCRETE_VALUES = 10  # columns with more values are continuous

Rows = Float32[np.ndarray, "N I"]
Inputs = Num[np.ndarray, "N I"]
Labels = Int64[np.ndarray, "N"]
OutlierRows = Float32[np.ndarray, "M I"]


@dataclass(frozen=True)
class OutlierSource:
    name: str
    kind: str  # images, npz, csv or parquet
    path: Path

    @classmethod
    def parse(cls, text: str, root: Path) -> "OutlierSource":
        match = re.fullmatch(r"([^=]+)=(images|npz|csv|parquet):(.+)", text)
        if match is None or re.fullmatch(NAME_PATTERN, match[1]) is None:
            raise InvalidInput(OPTION, EXPECTED, repr(text)[:200])
        return cls(match[1], match[2], resolve_path(root, match[3], OPTION))

    def rows(
        self, spec: InputSpec, max_rows: int, seed: int, encoder: "TextEncoder | None" = None
    ) -> Rows:
        has_cells = bool(spec.columns) or encoder is not None
        if self.kind in ("csv", "parquet") and not has_cells:
            expected, received = "a model of columns or text", f"rows of shape {spec.shape}"
            raise InvalidInput(OPTION, f"{expected} for `{self.kind}:`", received)
        if self.kind == "images":
            pixels = sample_images(self.path, spec.shape, image_spec(spec), max_rows, seed)
            return scale_pixels(pixels, spec)
        content = csv_source(self.path) if self.kind == "csv" else self.path
        file = open_rows(content, spec, self.path.name, f".{self.kind}")
        rows = RowReader(spec, self.path.name, encoder=encoder).read_all(file)
        fill_missing(rows, spec.columns)
        return sample_rows(rows, max_rows, seed)


def sample_rows(x: np.ndarray, max_rows: int, seed: int) -> np.ndarray:
    return x[np.random.default_rng(seed).permutation(len(x))[:max_rows]]


def generated_sets(
    spec: InputSpec, x: Inputs, y: Num[np.ndarray, "N"], is_classified: bool, seed: int
) -> dict[str, Rows]:
    """Generate outliers: noise, mixtures of two rows, and rotated images."""
    noise = noise_rows(spec, x, len(x), seed, EvaluationStream.UNIFORM)
    rows, has_cells = x.astype(np.float32), spec.takes_ids or bool(spec.columns)
    is_even = not spec.takes_ids and takes_even_rows(spec, x)
    sets = {"even" if is_even else "uniform": noise}
    if not has_cells and not is_even:
        sets["gaussian"] = gaussian(spec, len(x), seed)
    if is_classified:
        combine = cross if has_cells else mix
        name = "crossed" if has_cells else "mixed"
        sets[name] = combine(rows, y.astype(np.int64), spec, seed)
    if _is_image(spec):
        sets["rotated"] = rotate(rows, spec)
    return sets


def noise_rows(spec: InputSpec, x: Inputs, rows: int, *seed: int) -> Rows:
    """Draw uniform noise, random ids or uniformly drawn columns in the format of `x`."""
    if spec.takes_ids:
        return random_ids(spec, x[:rows], *seed)
    if takes_even_rows(spec, x):
        return even_rows(spec, x, rows, *seed)
    return uniform(spec, rows, *seed)


def uniform(spec: InputSpec, rows: int, *seed: int) -> Rows:
    x = generator(*seed).uniform(spec.minimum, spec.maximum, (rows, _size(spec)))
    return x.astype(np.float32)


def gaussian(spec: InputSpec, rows: int, seed: int) -> Rows:
    normal = generator(seed, EvaluationStream.GAUSSIAN).standard_normal((rows, _size(spec)))
    return (spec.minimum + _span(spec) * normal).astype(np.float32)


def takes_even_rows(spec: InputSpec, x: Inputs) -> bool:
    """Check whether to draw columns uniformly instead of generating noise rows.

    This applies to declared columns, and to rows other than images if a number has up to
    `MAX_DISCRETE_VALUES` distinct values.
    """
    return bool(spec.columns) or (
        not _is_image(spec) and any(len(np.unique(number)) <= MAX_DISCRETE_VALUES for number in x.T)
    )


def even_rows(spec: InputSpec, x: Inputs, rows: int, *seed: int) -> OutlierRows:
    """Draw each column independently and uniformly from its values or range in `x`.

    Missing values are left out. If no columns are declared, each number counts as a column.
    """
    random = generator(*seed)
    columns = spec.columns or [
        NumericColumn(name=str(i), mean=0.0, std=1.0, indicator=False) for i in range(x.shape[1])
    ]
    parts = []
    for column, part in zip(columns, _split(x.astype(np.float32), spec), strict=True):
        present = part
        if column.indicator:
            present = part[part[:, -1] == 0.0]
            present = present if len(present) else part
        values = np.unique(present, axis=0)
        if isinstance(column, CategoricalColumn) or len(values) <= MAX_DISCRETE_VALUES:
            parts.append(values[random.integers(len(values), size=rows)])
            continue
        first = random.uniform(present[:, 0].min(), present[:, 0].max(), rows)
        if isinstance(column, TimeColumn):  # `encode` adds its sines and cosines
            parts.append(encode([column], {column.name: first * column.std + column.mean}))
        else:
            values_and_zeros = np.zeros((rows, part.shape[1]), dtype=np.float32)
            values_and_zeros[:, 0] = first
            parts.append(values_and_zeros)
    return np.concatenate(parts, axis=1)


def random_ids(spec: InputSpec, x: Inputs, *seed: int) -> Rows:
    ids = generator(*seed).integers(int(spec.minimum), int(spec.maximum) + 1, x.shape)
    return np.where(_is_token(spec, x), ids, x).astype(np.float32)


def mix(x: Rows, y: Labels, _: InputSpec, seed: int) -> OutlierRows:
    """Average each row with a random row of another class.

    The result is empty if there is only one class.
    """
    partners = _partners(y, generator(seed, EvaluationStream.MIXED))
    return 0.5 * (x[: len(partners)] + x[partners])


def cross(x: Inputs, y: Labels, spec: InputSpec, seed: int) -> OutlierRows:
    """Replace random columns (or ids) with values from a row of another class.

    It replaces `mix` because categories cannot be averaged. The result is empty if there is only
    one class.
    """
    rng = generator(seed, EvaluationStream.MIXED)
    partners = _partners(y, rng)
    first, second = x[: len(partners)], x[partners]
    if spec.takes_ids:
        is_second = rng.random(first.shape) < 0.5
        is_second &= _is_token(spec, first) & _is_token(spec, second)
    else:
        widths = [column_width(column) for column in spec.columns]
        is_second = np.repeat(rng.random((len(partners), len(widths))) < 0.5, widths, axis=1)
    return np.where(is_second, second, first).astype(np.float32)


def rotate(x: Rows, spec: InputSpec) -> Rows:
    """Rotate images by 90 degrees, or by 180 if they are not square."""
    images = x.reshape(len(x), -1, *spec.shape[-2:])
    quarters = 1 if images.shape[2] == images.shape[3] else 2
    return np.rot90(images, quarters, axes=(2, 3)).reshape(len(x), -1)


def _partners(y: Labels, rng: np.random.Generator) -> list[int]:
    candidates = {c: np.flatnonzero(y != c) for c in np.unique(y).tolist()}
    return [int(rng.choice(candidates[c])) for c in y.tolist() if len(candidates[c])]


def _split(x: Rows, spec: InputSpec) -> list[Float32[np.ndarray, "N J"]]:
    widths = [column_width(column) for column in spec.columns] or [1] * x.shape[1]
    return np.split(x, np.cumsum(widths)[:-1], axis=1)


def _is_token(spec: InputSpec, x: Inputs) -> Bool[np.ndarray, "N I"]:
    return np.ones(x.shape, dtype=bool) if spec.text is None else x != spec.text.pad_id


def _is_image(spec: InputSpec) -> bool:
    return len(spec.shape) == 2 or (len(spec.shape) == 3 and spec.shape[0] == 3)


def image_spec(spec: InputSpec) -> ImageSpec:
    if spec.image is not None and spec.image.resize:
        return spec.image
    if not _is_image(spec):
        expected = f"`npz:` for rows of shape {spec.shape}, which are not images"
        raise InvalidInput(OPTION, expected, "images")
    return ImageSpec(mode="L" if len(spec.shape) == 2 else "RGB", resize=True)


def scale_pixels(pixels: UInt8[np.ndarray, "N I"], spec: InputSpec) -> Rows:
    """Scale pixels from 0 to 255 to the data's range."""
    return np.float32(spec.minimum) + pixels.astype(np.float32) * np.float32(_span(spec) / 255.0)


def _size(spec: InputSpec) -> int:
    return int(np.prod(spec.shape))


def _span(spec: InputSpec) -> float:
    return spec.maximum - spec.minimum
