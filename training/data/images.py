"""`images:PATH`: a folder or zip of `train/CLASS/*.png|jpg|jpeg` and `test/CLASS/*`; class names are the folders'.

A zip's members are read in place. Where there is no `test`, a random share of the images is held out. Files of other
kinds and hidden ones are passed over. Pixels are kept as bytes.
"""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from jaxtyping import UInt8

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput
from model_store.inputs.images import GREY_MODES, open_image, pixels
from training.data.rows import Dataset, Rows, class_numbers, hold_out

Pixels = UInt8[np.ndarray, "N I"]
SUFFIXES = (".png", ".jpg", ".jpeg")
SPLIT_NAMES = ("train", "test")
MAX_IMAGE_BYTES = 1 << 26
MAX_DATA_BYTES = 1 << 34


@dataclass(frozen=True)
class Folder:
    """Files of a folder."""

    path: Path

    def names(self) -> list[str]:
        """Return the names of its files, two folders down."""
        return [path.relative_to(self.path).as_posix() for path in self.path.glob("*/*/*") if path.is_file()]

    def read(self, name: str) -> bytes:
        """Return a file's content, up to one byte more than an image may have."""
        with (self.path / name).open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)


@dataclass(frozen=True)
class Zip:
    """Members of a zip file, read in place: nothing is written anywhere, whatever their names."""

    file: zipfile.ZipFile

    def names(self) -> list[str]:
        """Return the names of its members."""
        return self.file.namelist()

    def read(self, name: str) -> bytes:
        """Return a member's content, up to one byte more than an image may have."""
        with self.file.open(name) as member:
            return member.read(MAX_IMAGE_BYTES + 1)


def images(path: Path, test_fraction: float, image_size: list[int] | None) -> Dataset:
    """Read images and their classes; `image_size` (height, width) resizes them, else all must be of one size.

    They are grey, of shape (H, W), if all files are, and else colour, of shape (3, H, W).

    Raises:
        InvalidInput: naming the file that is broken or of another size, or what is missing.
    """
    with _opened(path) as files:
        found = _labelled(files.names())
        if not found["train"]:
            expected = f"images train/CLASS/*{'|'.join(SUFFIXES)} in {str(path)!r}"
            raise InvalidInput("data.source", expected, "none")
        first = next(iter(found["train"]))
        shape, spec = _shape(files, [*found["train"], *found["test"]], first, image_size)
        x = {part: _pixels(files, list(names), shape, spec) for part, names in found.items()}
    if found["test"]:
        y, y_test, classes = class_numbers(
            list(found["train"].values()), list(found["test"].values()), "data.source: folders"
        )
        train, test = Rows(x["train"], y), Rows(x["test"], y_test)
    else:
        y, _, classes = class_numbers(list(found["train"].values()), [], "data.source: folders")
        kept, held_out = hold_out(len(y), test_fraction)
        rows = Rows(x["train"], y)
        train, test = rows.take(kept), rows.take(held_out)
    return Dataset(train, test, shape, classes, 0.0, 255.0, image=spec)


def some_images(path: Path, shape: tuple[int, ...], mode: Literal["L", "RGB"], most: int, seed: int) -> Pixels:
    """Read at most so many images, a random choice by seed of `test/CLASS/*`, or else of `train/CLASS/*`.

    They are decoded as `mode` and resized to `shape`, (H, W) or (3, H, W).

    Raises:
        InvalidInput: naming the file that is broken, or what is missing.
    """
    with _opened(path) as files:
        found = _labelled(files.names())
        names = [*(found["test"] or found["train"])]
        if not names:
            raise InvalidInput("data.source", f"images test/CLASS/*{'|'.join(SUFFIXES)} in {str(path)!r}", "none")
        order = np.random.default_rng(seed).permutation(len(names))[:most]
        return _pixels(files, [names[i] for i in order], shape, ImageSpec(mode=mode, resize=True))


@contextmanager
def _opened(path: Path) -> Iterator[Folder | Zip]:
    if path.is_dir():
        yield Folder(path)
        return
    try:
        with zipfile.ZipFile(path) as file:
            yield Zip(file)
    except zipfile.BadZipFile as error:
        raise InvalidInput("data.source", f"a folder or zip file, {str(path)!r}", str(error)) from None
    except OSError as error:
        raise InvalidInput(
            "data.source", f"a folder or zip file, {str(path)!r}", error.strerror or "no such file"
        ) from None


def _labelled(names: list[str]) -> dict[str, dict[str, str]]:
    """Return for train and test each image's name and its class, by name."""
    found: dict[str, dict[str, str]] = {part: {} for part in SPLIT_NAMES}
    for name in sorted(names):
        parts = PurePosixPath(name).parts
        is_image = parts and parts[-1].lower().endswith(SUFFIXES)
        if len(parts) == 3 and parts[0] in found and is_image and not any(p.startswith(".") for p in parts):
            found[parts[0]][name] = parts[1]
    return found


def _shape(
    files: Folder | Zip, names: list[str], first: str, image_size: list[int] | None
) -> tuple[tuple[int, ...], ImageSpec]:
    """Return the shape of all images and how they are decoded, from their headers."""
    size: tuple[int, int] | None = None
    grey = True
    for name in names:
        image = open_image(_content(files, name), _field(name))
        grey = grey and image.mode in GREY_MODES
        size = size or image.size
        if image_size is None and image.size != size:
            raise InvalidInput(
                _field(name),
                f"an image of {size[0]} x {size[1]} pixels as {first} (or `image_size` in the recipe)",
                f"{image.width} x {image.height}",
            )
    assert size is not None
    height, width = image_size or (size[1], size[0])
    shape = (height, width) if grey else (3, height, width)
    numbers = len(names) * int(np.prod(shape))
    if numbers > MAX_DATA_BYTES:
        raise InvalidInput("data.source", f"at most {MAX_DATA_BYTES} bytes of pixels", f"{numbers}")
    return shape, ImageSpec(mode="L" if grey else "RGB", resize=image_size is not None)


def _pixels(
    files: Folder | Zip, names: list[str], shape: tuple[int, ...], spec: ImageSpec
) -> UInt8[np.ndarray, "N I"]:
    x = np.empty((len(names), int(np.prod(shape))), dtype=np.uint8)
    for n, name in enumerate(names):
        field = _field(name)
        x[n] = pixels(open_image(_content(files, name), field), shape, spec, field)
    return x


def _content(files: Folder | Zip, name: str) -> bytes:
    try:
        content = files.read(name)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        reason = (str(error) or "its end").splitlines()[0][:200]
        raise InvalidInput(_field(name), "a readable file", reason) from None
    if len(content) > MAX_IMAGE_BYTES:
        raise InvalidInput(_field(name), f"at most {MAX_IMAGE_BYTES} bytes", "more")
    return content


def _field(name: str) -> str:
    return f"data.source: {name!r}"
