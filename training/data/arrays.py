"""Loaders for `npz:FILE`, `idx:DIR` (MNIST's file format) and `digits`."""

import gzip
import math
import struct
import zlib
from dataclasses import replace
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float32, UInt8

from model_store.artifacts.manifest import LARGEST_ID, ImageSpec, InputSpec
from model_store.errors import InvalidInput
from model_store.sources.cells import category_text
from model_store.sources.rows import RowReader
from training.data.rows import Dataset, Keys, Rows, class_numbers, hold_out

if TYPE_CHECKING:
    from training.sections import DataSection

DIGITS_TEST_FRACTION = 0.2
IDX_FILES = (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1))  # with the number of axes
WORKBOOKS = (".xlsx", ".xlsm", ".xls")
UNSPLIT = ("x", "y")
SPLIT = ("x_train", "y_train", "x_test", "y_test")


def resolve_path(root: Path, rest: str, field: str = "data.source") -> Path:
    """Find a path in `root`, or in the current folder. Raise InvalidInput if neither has it."""
    check_not_workbook(rest, field)
    for path in (root / rest, Path(rest)):
        if path.exists():
            return path
    is_local = root / rest == Path(rest)
    places = "" if is_local else f", which is neither in {root} nor in the current folder"
    raise InvalidInput(field, "an existing path", f"{rest!r}{places}"[:300])


def check_not_workbook(name: str, field: str) -> None:
    if name.lower().endswith(WORKBOOKS):
        expected = "a CSV or Parquet file (save the sheet as `CSV UTF-8`)"
        raise InvalidInput(field, expected, f"an Excel workbook, {name!r}")


def digits() -> Dataset:
    """Load scikit-learn's 1,797 handwritten digits (UCI, 1998).

    Images have 8x8 pixels with values from 0 to 16.
    """
    from sklearn.datasets import load_digits  # This import is slow.

    bunch = load_digits()
    numbers = np.arange(len(bunch.data))
    rows = Rows(bunch.data.astype(np.float32), bunch.target.astype(np.int64), numbers)
    train, test = map(rows.take, hold_out(len(rows), DIGITS_TEST_FRACTION))
    classes = tuple(map(str, bunch.target_names))
    return Dataset(train, test, (8, 8), classes, 0.0, 16.0, is_held_out=True)


def make_array_dataset(arrays: dict[str, np.ndarray], task: str, section: "DataSection") -> Dataset:
    """Create a data set from inputs x (N, ...) and labels or targets y (N,).

    Labels are integers or strings. Arrays `x` and `y` are split at random into training and test
    rows. Bytes stay bytes. If `vocabulary` is set, rows are ids from 0 to `vocabulary` - 1, or to
    the largest id in the arrays.
    """
    is_unsplit = set(arrays) == set(UNSPLIT)
    if is_unsplit:
        x, y = arrays["x"], arrays["y"]
        _check_lengths(x, y, "x", "y")
        is_stratified = section.is_stratified and task != "regression"
        keys = Keys(np.unique(y, return_inverse=True)[1] if is_stratified else None)
        ids, test = hold_out(len(y), section.test_fraction, keys)
        arrays = {"x_train": x[ids], "y_train": y[ids], "x_test": x[test], "y_test": y[test]}
        names = {"x_train": "x", "x_test": "x"}
    elif set(arrays) == set(SPLIT):
        ids, names = np.arange(len(arrays["y_train"])), {name: name for name in SPLIT}
    else:
        expected = f"arrays {' and '.join(UNSPLIT)}, or {', '.join(SPLIT)}"
        raise InvalidInput("data.source", expected, f"{sorted(arrays)}"[:200])
    for part in ("train", "test"):
        x_part, y_part = f"x_{part}", f"y_{part}"
        _check_lengths(arrays[x_part], arrays[y_part], x_part, y_part)
    takes_ids = section.vocabulary is not None
    largest = section.vocabulary - 1 if isinstance(section.vocabulary, int) else LARGEST_ID
    dtype: Literal["int32", "float32"] = "int32" if takes_ids else "float32"
    shape, test_shape = arrays["x_train"].shape[1:], arrays["x_test"].shape[1:]
    if test_shape != shape:
        raise InvalidInput("x_test", f"rows of shape {shape} as in x_train", f"{test_shape}")
    spec = InputSpec(shape=shape, dtype=dtype, minimum=0.0, maximum=float(largest))
    x, x_test = (_read(arrays[name], names[name], spec) for name in ("x_train", "x_test"))
    classes: tuple[str, ...] = ()
    if task == "regression":
        y, y_test = (_targets(arrays[name], name) for name in ("y_train", "y_test"))
    else:
        labels, test_labels = (_labels(arrays[name], name) for name in ("y_train", "y_test"))
        y, y_test, classes = class_numbers(labels, test_labels, "y")
    minimum, maximum = float(x.min()), float(x.max())
    if takes_ids:
        minimum = 0.0
        is_auto = section.vocabulary == "auto"
        maximum = max(maximum, float(x_test.max())) if is_auto else float(largest)
    rows = Rows(x, y, ids), Rows(x_test, y_test)
    return Dataset(
        *rows, shape, classes, minimum, maximum, takes_ids=takes_ids, is_held_out=is_unsplit
    )


def _check_lengths(x: np.ndarray, y: np.ndarray, x_name: str, y_name: str) -> None:
    if x.ndim < 2 or x.size == 0:
        raise InvalidInput(x_name, "rows of at least one number", f"shape {x.shape}")
    if y.shape != (len(x),):
        raise InvalidInput(y_name, f"shape ({len(x)},), one for each row of {x_name}", f"{y.shape}")


def _read(
    x: np.ndarray, name: str, spec: InputSpec
) -> Float32[np.ndarray, "N I"] | UInt8[np.ndarray, "N I"]:
    if x.dtype != np.uint8:
        return RowReader(spec, name).read(x, 0)
    if spec.takes_ids:
        RowReader(spec, name).read(x, 0)  # Check the ids, but keep the bytes.
    return np.ascontiguousarray(x.reshape(len(x), -1))


def _targets(y: np.ndarray, name: str) -> Float32[np.ndarray, "N"]:
    spec = InputSpec(shape=(1,), minimum=0.0, maximum=1.0)
    return RowReader(spec, name).read(y[:, None], 0)[:, 0]


def _labels(y: np.ndarray, name: str) -> list[str]:
    is_integer = y.dtype.kind != "f" or bool((y == np.floor(y)).all())
    if y.dtype.kind not in "biufU" or not is_integer:
        expected = "labels: strings, booleans or whole numbers"
        received = "fractions" if y.dtype.kind == "f" else "other values"
        raise InvalidInput(name, expected, f"{received} of dtype {y.dtype.str[:20]}")
    return [category_text(label) for label in y.tolist()]


def idx(folder: Path, section: "DataSection") -> Dataset:
    if not folder.is_dir():
        received = f"{str(folder)!r}, which is not a folder"
        raise InvalidInput("data.source", "a folder of IDX files", received)
    arrays: dict[str, np.ndarray] = {}
    for part, stem in (("train", "train"), ("test", "t10k")):
        images, labels = (read_idx(find_idx(folder, f"{stem}-{kind}"), n) for kind, n in IDX_FILES)
        arrays |= {f"x_{part}": images.astype(np.float32), f"y_{part}": labels}
    data = make_array_dataset(arrays, "classification", section)
    return replace(data, minimum=0.0, maximum=255.0, image=ImageSpec(mode="L"))


def find_idx(folder: Path, stem: str) -> Path:
    for name in (stem, f"{stem}.gz"):
        if (folder / name).is_file():
            return folder / name
    raise InvalidInput("data.source", f"{stem} or {stem}.gz in {str(folder)!r}", "neither")


def read_idx(path: Path, ndim: int) -> UInt8[np.ndarray, "..."]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read_idx(file, ndim, path.name)
    except (OSError, EOFError, zlib.error) as error:
        expected = "a readable IDX file, plain or gzipped"
        raise InvalidInput(path.name, expected, str(error) or "a truncated file") from None


def _read_idx(file: BufferedIOBase, ndim: int, name: str) -> UInt8[np.ndarray, "..."]:
    header = file.read(4 + 4 * ndim)
    magic = bytes([0, 0, 8, ndim])
    if len(header) < 4 + 4 * ndim or header[:4] != magic:
        expected = f"an IDX header of unsigned bytes and {ndim} axes"
        raise InvalidInput(name, expected, f"bytes {header[:4].hex()}")
    shape = struct.unpack(f">{ndim}I", header[4:])
    size, content = math.prod(shape), file.read()
    if len(content) != size:
        expected = f"{size} bytes of data (shape {shape} in its header)"
        raise InvalidInput(name, expected, f"{len(content)}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
