"""`npz:FILE`: arrays `x` and `y`, or `x_train`, `y_train`, `x_test` and `y_test`."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32, UInt8

from model_store.artifacts.manifest import LARGEST_ID
from model_store.errors import InvalidInput
from model_store.sources.npy import read_npz
from training.data.rows import Dataset, Rows, class_numbers
from training.data.splitting import Keys, hold_out

if TYPE_CHECKING:
    from training.recipe import DataSection

WHOLE = ("x", "y")
SPLIT = ("x_train", "y_train", "x_test", "y_test")


def npz(path: Path, task: str, section: "DataSection") -> Dataset:
    """Read arrays: x has a row in each place of its first axis, y a label (integer or string) or a
    number.

    Of `x` and `y` a random share is held out for test. Rows of bytes are kept as bytes. With
    `integers` rows are ids, from 0 to `vocabulary` - 1, or to the largest there is.

    Raises:
        InvalidInput: naming the array that is missing or not as it should be.
    """
    return dataset_of_arrays(read_npz(path), task, section)


def dataset_of_arrays(arrays: dict[str, np.ndarray], task: str, section: "DataSection") -> Dataset:
    """Return arrays as rows, as `npz` does of those in a file.

    Raises:
        InvalidInput: naming the array that is missing or not as it should be.
    """
    if set(arrays) == set(WHOLE):
        _check_lengths(arrays["x"], arrays["y"], "x", "y")
        keys = (
            Keys(np.unique(arrays["y"], return_inverse=True)[1])
            if section.is_stratified and task != "regression"
            else None
        )
        train, test = hold_out(len(arrays["y"]), section.test_fraction, keys)
        ids = train
        parts = {
            f"{name}_{part}": arrays[name][i]
            for name in WHOLE
            for part, i in (("train", train), ("test", test))
        }
    elif set(arrays) == set(SPLIT):
        parts, ids = arrays, np.arange(len(arrays["y_train"]))
    else:
        raise InvalidInput(
            "data.source",
            f"arrays {' and '.join(WHOLE)}, or {', '.join(SPLIT)}",
            f"{sorted(arrays)}"[:200],
        )
    names = {name: name[0] if set(arrays) == set(WHOLE) else name for name in SPLIT}
    for part in ("train", "test"):
        _check_lengths(parts[f"x_{part}"], parts[f"y_{part}"], f"x_{part}", f"y_{part}")
    shape = parts["x_train"].shape[1:]
    if parts["x_test"].shape[1:] != shape:
        raise InvalidInput(
            "x_test", f"rows of shape {shape} as in x_train", f"{parts['x_test'].shape[1:]}"
        )
    x, x_test = (
        numbers(parts["x_train"], names["x_train"]),
        numbers(parts["x_test"], names["x_test"]),
    )
    classes: tuple[str, ...] = ()
    if task == "regression":
        y, y_test = _targets(parts["y_train"], "y_train"), _targets(parts["y_test"], "y_test")
    else:
        labels, test_labels = (
            _labels(parts["y_train"], "y_train"),
            _labels(parts["y_test"], "y_test"),
        )
        y, y_test, classes = class_numbers(labels, test_labels, "y")
    least, most = float(x.min()), float(x.max())
    if section.integers:
        largest = None if section.vocabulary is None else section.vocabulary - 1
        for part in ("train", "test"):
            check_ids(parts[f"x_{part}"], names[f"x_{part}"], largest)
        least, most = 0.0, max(most, float(x_test.max())) if largest is None else float(largest)
    rows = Rows(x, y, ids), Rows(x_test, y_test)
    return Dataset(*rows, shape, classes, least, most, takes_ids=section.integers)


def _check_lengths(x: np.ndarray, y: np.ndarray, x_name: str, y_name: str) -> None:
    if x.ndim < 2 or x.size == 0:
        raise InvalidInput(x_name, "rows of at least one number", f"shape {x.shape}")
    if y.shape != (len(x),):
        raise InvalidInput(y_name, f"shape ({len(x)},), one for each row of {x_name}", f"{y.shape}")


def numbers(x: np.ndarray, name: str) -> Float32[np.ndarray, "N I"] | UInt8[np.ndarray, "N I"]:
    """Return flat rows of finite numbers in float32; bytes stay bytes.

    Raises:
        InvalidInput: naming the array whose numbers are not such.
    """
    if x.dtype.kind not in "fiu":
        raise InvalidInput(name, "float or integer numbers", f"dtype {x.dtype.str[:20]}")
    flat = x.reshape(len(x), -1)
    if x.dtype == np.uint8:
        return np.ascontiguousarray(flat)
    with np.errstate(over="ignore"):
        flat = np.ascontiguousarray(flat, dtype=np.float32)
    finite = np.isfinite(flat).all(axis=1)
    if not finite.all():
        raise InvalidInput(
            name, "finite numbers in float32's range", f"others in row {np.argmin(finite)}"
        )
    return flat


def check_ids(x: np.ndarray, name: str, largest: int | None) -> None:
    """Check that an array of numbers is of whole ones, from 0 to the largest id.

    Raises:
        InvalidInput: naming the array, and the first row where they are not.
    """
    largest = LARGEST_ID if largest is None else largest
    flat = x.reshape(len(x), -1)
    is_id = (flat >= 0) & (flat <= largest) & (flat == np.floor(flat))
    if not is_id.all():
        n, i = np.argwhere(~is_id)[0]
        raise InvalidInput(
            name, f"ids: whole numbers from 0 to {largest}", f"{flat[n, i]} in row {n}"
        )


def _targets(y: np.ndarray, name: str) -> Float32[np.ndarray, "N"]:
    flat = numbers(y[:, None], name)
    return flat[:, 0].astype(np.float32)


def _labels(y: np.ndarray, name: str) -> list[str]:
    if y.dtype.kind not in "iuU":
        raise InvalidInput(name, "integer or string labels", f"dtype {y.dtype.str[:20]}")
    return [str(label) for label in y.tolist()]
