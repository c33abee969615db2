"""`idx:DIR`: MNIST's file format, gzipped or not."""

import gzip
import struct
import zlib
from io import BufferedIOBase
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput
from training.data.rows import Dataset, Rows

MAX_IDX_BYTES = 1 << 32
READ_BYTES = 1 << 20


def idx(folder: Path) -> Dataset:
    """Read MNIST's four files from a folder: train and t10k, images and labels, gzipped or not."""
    if not folder.is_dir():
        raise InvalidInput(
            "data.source", "a folder of IDX files", f"{str(folder)!r}, which is not a folder"
        )
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
                "data.source",
                f"as many {split} labels as images ({len(images)})",
                f"{len(labels)} labels",
            )
        rows[split] = Rows(
            images.reshape(len(images), -1).astype(np.float32), labels.astype(np.int64)
        )
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
        raise InvalidInput(
            "data.source", f"t10k labels below {num_classes}", str(int(rows["t10k"].y.max()))
        )
    shape = arrays["train", "images"].shape[1:]
    classes = tuple(map(str, range(num_classes)))
    return Dataset(
        rows["train"], rows["t10k"], shape, classes, 0.0, 255.0, image=ImageSpec(mode="L")
    )


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
        raise InvalidInput(
            path.name, "a readable IDX file, plain or gzipped", str(error) or "its end"
        ) from None


def _read_idx(file: BufferedIOBase, ndim: int, name: str) -> UInt8[np.ndarray, "..."]:
    header = file.read(4 + 4 * ndim)
    magic = bytes([0, 0, 8, ndim])
    if len(header) < 4 + 4 * ndim or header[:4] != magic:
        raise InvalidInput(
            name, f"an IDX header of unsigned bytes and {ndim} axes", f"bytes {header[:4].hex()}"
        )
    shape = struct.unpack(f">{ndim}I", header[4:])
    size = 1
    for length in shape:
        size *= length
    if not 0 < size <= MAX_IDX_BYTES:
        raise InvalidInput(
            name, f"between 1 and {MAX_IDX_BYTES} bytes of data", f"a header of shape {shape}"
        )
    content = bytearray()  # grows with what is there, not with what the header promises
    while len(content) <= size and (piece := file.read(min(READ_BYTES, size + 1 - len(content)))):
        content += piece
    if len(content) != size:
        came = "more" if len(content) > size else f"{len(content)}"
        raise InvalidInput(name, f"{size} bytes of data, as shape {shape} in its header says", came)
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
