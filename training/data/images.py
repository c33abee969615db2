"""`images:PATH`: a folder or zip of `train/CLASS/*` and `test/CLASS/*`, or of `CLASS/*`: a class a
folder.

Files are PNG, JPEG, WebP, BMP or TIFF. A zip's members are read in place. Where there is no `test`,
a share of the images is held out. Files of other kinds and hidden ones are passed over, but not a
folder without any image: a class would vanish. Pixels are kept as bytes.
"""

import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput
from model_store.sources.images import FORMATS, GREY_MODES, open_image, pixels
from training.data.rows import Dataset, Rows, class_numbers
from training.data.splitting import Keys, hold_out

if TYPE_CHECKING:
    from training.recipe import DataSection

Pixels = UInt8[np.ndarray, "N I"]
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
TRAINING_FORMATS = (*FORMATS, "TIFF")
SPLIT_NAMES = ("train", "test")
MAX_IMAGE_BYTES = 1 << 26
MAX_DATA_BYTES = 1 << 34


@dataclass(frozen=True)
class Folder:
    """Files of a folder."""

    path: Path

    def names(self) -> list[str]:
        """Return the names of its files and, with a slash at their end, folders, at most three
        folders down."""
        found = [path for depth in range(1, 5) for path in self.path.glob("/".join("*" * depth))]
        return [
            path.relative_to(self.path).as_posix() + ("/" if path.is_dir() else "")
            for path in found
        ]

    def read(self, name: str) -> bytes:
        """Return a file's content, up to one byte more than an image may have."""
        with (self.path / name).open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)


@dataclass(frozen=True)
class Zip:
    """Members of a zip file, read in place: nothing is written anywhere, whatever their names."""

    file: zipfile.ZipFile

    def names(self) -> list[str]:
        """Return the names of its members; those of folders have a slash at their end."""
        return self.file.namelist()

    def read(self, name: str) -> bytes:
        """Return a member's content, up to one byte more than an image may have."""
        with self.file.open(name) as member:
            return member.read(MAX_IMAGE_BYTES + 1)


def images(path: Path, section: "DataSection") -> Dataset:
    """Read images and their classes; `image_size` (height, width) is what they are stretched or cut
    to, else all must be of one size.

    They are grey, of shape (H, W), if all files are, and else colour, of shape (3, H, W).

    Raises:
        InvalidInput: naming the file that is broken or of another size, or what is missing.
    """
    with _opened(path) as files:
        found = _labelled(files.names())
        if not found["train"]:
            expected = f"images train/CLASS/* or CLASS/*, {'|'.join(SUFFIXES)}, in {str(path)!r}"
            raise InvalidInput("data.source", expected, "none")
        first = next(iter(found["train"]))
        shape, spec = _shape(files, [*found["train"], *found["test"]], first, section)
        x = {part: _pixels(files, list(names), shape, spec) for part, names in found.items()}
    if found["test"]:
        y, y_test, classes = class_numbers(
            list(found["train"].values()), list(found["test"].values()), "data.source: folders"
        )
        train, test = Rows(x["train"], y, np.array([*found["train"]])), Rows(x["test"], y_test)
    else:
        y, _, classes = class_numbers(list(found["train"].values()), [], "data.source: folders")
        kept, held_out = hold_out(
            len(y), section.test_fraction, Keys(y) if section.is_stratified else None
        )
        rows = Rows(x["train"], y, np.array([*found["train"]]))
        train, test = rows.take(kept), rows.take(held_out)
    return Dataset(train, test, shape, classes, 0.0, 255.0, image=spec)


def some_images(
    path: Path, shape: tuple[int, ...], spec: ImageSpec, most: int, seed: int
) -> Pixels:
    """Read at most so many images, a random choice by seed of `test/CLASS/*`, or else of
    `train/CLASS/*`.

    They are brought to `shape`, (H, W) or (3, H, W), as `spec` says.

    Raises:
        InvalidInput: naming the file that is broken, or what is missing.
    """
    with _opened(path) as files:
        found = _labelled(files.names())
        names = [*(found["test"] or found["train"])]
        if not names:
            raise InvalidInput(
                "data.source", f"images test/CLASS/*{'|'.join(SUFFIXES)} in {str(path)!r}", "none"
            )
        order = np.random.default_rng(seed).permutation(len(names))[:most]
        return _pixels(files, [names[i] for i in order], shape, spec)


def looked_at(path: Path) -> tuple[dict[str, int], Counter[tuple[int, int]], bool, bool]:
    """Return how many training images each class has, how many images each size (width, height)
    has, whether all are grey, and whether there are test images, by their headers alone.

    Raises:
        InvalidInput: naming the file that is no image, or what is missing.
    """
    with _opened(path) as files:
        found = _labelled(files.names())
        if not found["train"]:
            expected = f"images train/CLASS/* or CLASS/*, {'|'.join(SUFFIXES)}, in {str(path)!r}"
            raise InvalidInput("data.source", expected, "none")
        sizes: Counter[tuple[int, int]] = Counter()
        is_grey = True
        for name in [*found["train"], *found["test"]]:
            image = open_image(_content(files, name), _field(name), TRAINING_FORMATS)
            sizes[image.size] += 1
            is_grey = is_grey and image.mode in GREY_MODES
        return (
            dict(Counter(found["train"].values()).most_common()),
            sizes,
            is_grey,
            bool(found["test"]),
        )


@contextmanager
def _opened(path: Path) -> Iterator[Folder | Zip]:
    if path.is_dir():
        yield Folder(path)
        return
    try:
        with zipfile.ZipFile(path) as file:
            yield Zip(file)
    except zipfile.BadZipFile as error:
        raise InvalidInput(
            "data.source", f"a folder or zip file, {str(path)!r}", str(error)
        ) from None
    except OSError as error:
        raise InvalidInput(
            "data.source", f"a folder or zip file, {str(path)!r}", error.strerror or "no such file"
        ) from None


def _labelled(names: list[str]) -> dict[str, dict[str, str]]:
    """Return for train and test each image's name and its class, by name; folders of classes alone
    are `train`.

    Raises:
        InvalidInput: naming a class's folder that has no image.
    """
    paths = [PurePosixPath(name) for name in sorted(names)]
    is_folder = dict(zip(paths, (name.endswith("/") for name in sorted(names)), strict=True))
    paths = [
        path for path in paths if not any(part.startswith((".", "__MACOSX")) for part in path.parts)
    ]
    outer = _outer(path for path in paths if not is_folder[path])
    paths = [path for path in paths if len(path.parts) > outer]
    has_parts = any(path.parts[outer] in SPLIT_NAMES for path in paths)
    depth = outer + 1 + has_parts  # of files in a class's folder
    found: dict[str, dict[str, str]] = {part: {} for part in SPLIT_NAMES}
    folders = set()
    for path in paths:
        part = path.parts[outer] if has_parts else "train"
        if part not in found or len(path.parts) < depth:
            continue
        if len(path.parts) > depth or is_folder[path]:
            folders.add((part, path.parts[depth - 1]))
        if (
            len(path.parts) == depth + 1
            and not is_folder[path]
            and path.name.lower().endswith(SUFFIXES)
        ):
            found[part][str(path)] = path.parts[depth - 1]
    for part, label in sorted(folders):
        if found[part] and label not in found[part].values():
            raise InvalidInput(
                f"data.source: folder {label!r}", f"images ({'|'.join(SUFFIXES)})", "none"
            )
    return found


def _outer(files: Iterable[PurePosixPath]) -> int:
    """Return how many folders all files are in, as where a zip holds one folder that holds the
    rest."""
    parents = [path.parts[:-1] for path in files]
    outer = 0
    while parents and all(len(p) > outer + 1 and p[outer] == parents[0][outer] for p in parents):
        if parents[0][outer] in SPLIT_NAMES:
            break
        outer += 1
    return outer


def _shape(
    files: Folder | Zip, names: list[str], first: str, section: "DataSection"
) -> tuple[tuple[int, ...], ImageSpec]:
    """Return the shape of all images and how they are decoded, from their headers."""
    size: tuple[int, int] | None = None
    image_size = section.image_size
    grey = True
    for name in names:
        image = open_image(_content(files, name), _field(name), TRAINING_FORMATS)
        grey = grey and image.mode in GREY_MODES
        size = size or image.size
        if image_size is None and image.size != size:
            raise InvalidInput(
                _field(name),
                f"an image of {size[0]} x {size[1]} pixels as {first} (or `image_size` in the "
                "recipe)",
                f"{image.width} x {image.height}",
            )
    assert size is not None
    height, width = image_size or (size[1], size[0])
    shape = (height, width) if grey else (3, height, width)
    numbers = len(names) * int(np.prod(shape))
    if numbers > MAX_DATA_BYTES:
        raise InvalidInput("data.source", f"at most {MAX_DATA_BYTES} bytes of pixels", f"{numbers}")
    is_cut = section.image_fit == "crop"
    return shape, ImageSpec(
        mode="L" if grey else "RGB",
        resize=image_size is not None,
        fit=section.image_fit,
        shorter=(section.image_resize or section.longer_side) if is_cut else None,
        interpolation=section.image_interpolation,
    )


def _pixels(
    files: Folder | Zip, names: list[str], shape: tuple[int, ...], spec: ImageSpec
) -> UInt8[np.ndarray, "N I"]:
    x = np.empty((len(names), int(np.prod(shape))), dtype=np.uint8)
    for n, name in enumerate(names):
        field = _field(name)
        x[n] = pixels(
            open_image(_content(files, name), field, TRAINING_FORMATS), shape, spec, field
        )
    return x


def _content(files: Folder | Zip, name: str) -> bytes:
    try:
        content = files.read(name)
    except (
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,
        NotImplementedError,
    ) as error:
        reason = (str(error) or "its end").splitlines()[0][:200]
        raise InvalidInput(_field(name), "a readable file", reason) from None
    if len(content) > MAX_IMAGE_BYTES:
        raise InvalidInput(_field(name), f"at most {MAX_IMAGE_BYTES} bytes", "more")
    return content


def _field(name: str) -> str:
    return f"data.source: {name!r}"
