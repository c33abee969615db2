"""Data sources: `digits` (bundled with scikit-learn) and `idx:DIR` (MNIST's file format, gzipped or not)."""

import gzip
import struct
import zlib
from dataclasses import dataclass
from hashlib import sha256
from io import BufferedIOBase
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from model_store.errors import InvalidInput

DIGITS_TEST_FRACTION = 0.2
DIGITS_SPLIT_SEED = 0  # which digits are test rows is part of the data, not of a run
MAX_IDX_BYTES = 1 << 32
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Rows:
    """Inputs, one row each, in the units of the source, and their class numbers."""

    x: Float32[np.ndarray, "N I"]
    y: Int64[np.ndarray, "N"]

    def __len__(self) -> int:
        """Return N."""
        return len(self.x)

    def take(self, index: Int64[np.ndarray, "M"]) -> "Rows":
        """Return the rows of these numbers, in their order."""
        return Rows(self.x[index], self.y[index])


@dataclass(frozen=True)
class Dataset:
    """A classification data set. Rows are flat; `shape` is an input's own shape."""

    train: Rows
    test: Rows
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    minimum: float
    maximum: float

    def digest(self) -> str:
        """Return a SHA-256 over all rows, so that a run knows its data again."""
        digest = sha256(repr((self.shape, self.classes, self.minimum, self.maximum)).encode())
        for rows in (self.train, self.test):
            digest.update(np.ascontiguousarray(rows.x).data)
            digest.update(np.ascontiguousarray(rows.y).data)
        return digest.hexdigest()


def load(source: str, root: Path) -> Dataset:
    """Read a data source; relative paths are under `root`.

    Raises:
        InvalidInput: if there is no such source, or its files are not as they should be.
    """
    kind, _, rest = source.partition(":")
    if source == "digits":
        return digits()
    if kind == "idx" and rest:
        return idx(root / rest)
    raise InvalidInput("data.source", "`digits` or `idx:DIR`", repr(source))


def digits() -> Dataset:
    """Return scikit-learn's bundled digits: 1,797 handwritten digits of 8x8 pixels from 0 to 16 (UCI, 1998)."""
    from sklearn.datasets import load_digits  # a slow import that other sources do not need

    bunch = load_digits()
    rows = Rows(bunch.data.astype(np.float32), bunch.target.astype(np.int64))
    order = np.random.default_rng(DIGITS_SPLIT_SEED).permutation(len(rows))
    test, train = np.split(order, [round(DIGITS_TEST_FRACTION * len(rows))])
    classes = tuple(str(label) for label in bunch.target_names)
    return Dataset(rows.take(np.sort(train)), rows.take(np.sort(test)), (8, 8), classes, 0.0, 16.0)


def idx(folder: Path) -> Dataset:
    """Read MNIST's four files from a folder: train and t10k, images and labels, gzipped or not."""
    if not folder.is_dir():
        raise InvalidInput("data.source", "a folder of IDX files", f"{str(folder)!r}, which is not a folder")
    arrays = {
        (split, kind): read_idx(find_idx(folder, f"{split}-{kind}-idx{ndim}-ubyte"), ndim)
        for split in ("train", "t10k")
        for kind, ndim in (("images", 3), ("labels", 1))
    }
    rows = {}
    for split in ("train", "t10k"):
        images, labels = arrays[split, "images"], arrays[split, "labels"]
        if len(images) != len(labels):
            raise InvalidInput(
                "data.source", f"as many {split} labels as images ({len(images)})", f"{len(labels)} labels"
            )
        rows[split] = Rows(images.reshape(len(images), -1).astype(np.float32), labels.astype(np.int64))
    if arrays["train", "images"].shape[1:] != arrays["t10k", "images"].shape[1:]:
        raise InvalidInput(
            "data.source",
            f"t10k images of shape {arrays['train', 'images'].shape[1:]} as in train",
            f"{arrays['t10k', 'images'].shape[1:]}",
        )
    num_classes = int(rows["train"].y.max()) + 1
    if num_classes < 2 or len(np.unique(rows["train"].y)) < num_classes:
        raise InvalidInput(
            "data.source",
            "labels of two classes or more, numbered from 0 without gaps",
            f"labels {np.unique(rows['train'].y).tolist()[:20]}",
        )
    if rows["t10k"].y.max() >= num_classes:
        raise InvalidInput("data.source", f"t10k labels below {num_classes}", str(int(rows["t10k"].y.max())))
    shape = arrays["train", "images"].shape[1:]
    return Dataset(rows["train"], rows["t10k"], shape, tuple(map(str, range(num_classes))), 0.0, 255.0)


def find_idx(folder: Path, stem: str) -> Path:
    """Return the path of an IDX file, plain or gzipped."""
    for name in (stem, f"{stem}.gz"):
        if (folder / name).is_file():
            return folder / name
    raise InvalidInput("data.source", f"{stem} or {stem}.gz in {str(folder)!r}", "neither")


def read_idx(path: Path, ndim: int) -> UInt8[np.ndarray, "..."]:
    """Read an IDX file of unsigned bytes with `ndim` axes.

    Raises:
        InvalidInput: if the file is not such a file, or is longer or shorter than its header says.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as unzipped:
                return _read_idx(unzipped, ndim, path.name)
        with path.open("rb") as file:
            return _read_idx(file, ndim, path.name)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInput(path.name, "a readable IDX file, plain or gzipped", str(error) or "its end") from None


def _read_idx(file: BufferedIOBase, ndim: int, name: str) -> UInt8[np.ndarray, "..."]:
    header = file.read(4 + 4 * ndim)
    magic = bytes([0, 0, 8, ndim])
    if len(header) < 4 + 4 * ndim or header[:4] != magic:
        raise InvalidInput(name, f"an IDX header of unsigned bytes and {ndim} axes", f"bytes {header[:4].hex()}")
    shape = struct.unpack(f">{ndim}I", header[4:])
    size = 1
    for length in shape:
        size *= length
    if not 0 < size <= MAX_IDX_BYTES:
        raise InvalidInput(name, f"between 1 and {MAX_IDX_BYTES} bytes of data", f"a header of shape {shape}")
    content = bytearray()  # grows with what is there, not with what the header promises
    while len(content) <= size and (piece := file.read(min(READ_BYTES, size + 1 - len(content)))):
        content += piece
    if len(content) != size:
        came = "more" if len(content) > size else f"{len(content)}"
        raise InvalidInput(name, f"{size} bytes of data, as shape {shape} in its header says", came)
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


@dataclass(frozen=True)
class Splits:
    """What each row of a data set is used for. No row is in two."""

    train: Rows
    validation: Rows  # chooses the best checkpoint
    reference: Rows  # fits the detectors
    ranking: Rows  # ranks the flag's statistic
    test: Rows  # measures, and is used for nothing else


def split(data: Dataset, validation_rows: int, reference_rows: int, ranking_rows: int, seed: int) -> Splits:
    """Split the training rows at random into training, validation and the two calibration splits.

    Raises:
        InvalidInput: if fewer than half of the rows would be left for training, or a class has none left.
    """
    held_out = np.cumsum([validation_rows, reference_rows, ranking_rows])
    if held_out[-1] > len(data.train) // 2:
        raise InvalidInput(
            "data.validation_rows + reference_rows + ranking_rows",
            f"at most half of the {len(data.train)} training rows",
            str(int(held_out[-1])),
        )
    order = np.random.default_rng(seed).permutation(len(data.train))
    validation, reference, ranking, train = (data.train.take(part) for part in np.split(order, held_out))
    absent = set(range(len(data.classes))) - set(train.y.tolist())
    if absent:
        raise InvalidInput("data.source", "training rows of every class", f"none of {sorted(absent)}")
    return Splits(train, validation, reference, ranking, data.test)
