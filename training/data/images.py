"""`images:PATH`: a folder or zip of `train/CLASS/*` and `test/CLASS/*`, or of `CLASS/*`: a class a
folder.

Files are PNG, JPEG, WebP, BMP or TIFF. A zip's members are read in place. Where there is no `test`,
a share of the images is held out. Hidden files are passed over, and so are those of other kinds,
which is said, but not a folder without any image: a class would vanish. Pixels are kept as bytes.
"""

import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8
from PIL.ImageFile import ImageFile

from model_store.artifacts.manifest import ImageSpec
from model_store.errors import InvalidInput
from model_store.sources.images import FORMATS, GREY_MODES, open_image, pixels
from training import log
from training.data.rows import Dataset, Rows, class_numbers
from training.data.splitting import Keys, hold_out

if TYPE_CHECKING:
    from training.recipe import DataSection

Pixels = UInt8[np.ndarray, "N I"]
Opened = Callable[[str], IO[bytes]]  # a file by its name
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
TRAINING_FORMATS = (*FORMATS, "TIFF")
SPLIT_NAMES = ("train", "test")
UNREADABLE = (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError)
MAX_IMAGE_BYTES = 1 << 26
MAX_DATA_BYTES = 1 << 34
SHOWN = 10  # endings of files that are left out


def images(path: Path, section: "DataSection") -> Dataset:
    """Read images and their classes; `image_size` (height, width) is what they are stretched or cut
    to, else all must be of one size.

    They are grey, of shape (H, W), if all files are, and else colour, of shape (3, H, W).
    """
    with _files(path) as (files, opened):
        found = _classes_for_training(files, path)
        names = list(found["train"])
        shape, spec = _shape(opened, [*names, *found["test"]], section)
        x = {part: _pixels(opened, list(labels), shape, spec) for part, labels in found.items()}
    labels, test_labels = (list(found[part].values()) for part in SPLIT_NAMES)
    y, y_test, classes = class_numbers(labels, test_labels, "data.source: folders")
    train, test = Rows(x["train"], y, np.array(names)), Rows(x["test"], y_test)
    if not test_labels:
        keys = Keys(y) if section.is_stratified else None
        kept, held_out = hold_out(len(y), section.test_fraction, keys)
        train, test = train.take(kept), train.take(held_out)
    is_held_out = not test_labels
    return Dataset(train, test, shape, classes, 0.0, 255.0, image=spec, is_held_out=is_held_out)


def some_images(
    path: Path, shape: tuple[int, ...], spec: ImageSpec, most: int, seed: int
) -> Pixels:
    with _files(path) as (files, opened):
        found = _image_classes(files)
        names = [*(found["test"] or found["train"])]
        if not names:
            expected = f"images test/CLASS/*{'|'.join(SUFFIXES)} in {str(path)!r}"
            raise InvalidInput("data.source", expected, "none")
        order = np.random.default_rng(seed).permutation(len(names))[:most]
        return _pixels(opened, [names[i] for i in order], shape, spec)


def survey(path: Path) -> tuple[dict[str, int], Counter[tuple[int, int]], bool, bool]:
    """Return how many training images each class has, how many images each size (width, height)
    has, whether all are grey, and whether there are test images, by their headers alone."""
    with _files(path) as (files, opened):
        found = _classes_for_training(files, path)
        sizes: Counter[tuple[int, int]] = Counter()
        is_grey = True
        for name in [*found["train"], *found["test"]]:
            image = _open(opened, name)
            sizes[image.size] += 1
            is_grey = is_grey and image.mode in GREY_MODES
    classes = dict(Counter(found["train"].values()).most_common())
    return classes, sizes, is_grey, bool(found["test"])


@contextmanager
def _files(path: Path) -> Iterator[tuple[list[str], Opened]]:
    """Yield the names of a folder's or a zip's files, and what opens one: members are read in
    place, whatever their names."""
    if path.is_dir():
        found = [each for depth in range(1, 5) for each in path.glob("/".join("*" * depth))]
        names = (each.relative_to(path).as_posix() + "/" * each.is_dir() for each in found)
        yield list(names), lambda name: (path / name).open("rb")
        return
    try:
        with zipfile.ZipFile(path) as file:
            yield file.namelist(), file.open
    except (zipfile.BadZipFile, OSError) as error:
        reason = error.strerror or "no such file" if isinstance(error, OSError) else str(error)
        expected = f"a folder or zip file, {str(path)!r}"
        raise InvalidInput("data.source", expected, reason) from None


def _classes_for_training(files: list[str], path: Path) -> dict[str, dict[str, str]]:
    found = _image_classes(files)
    if not found["train"]:
        expected = f"images train/CLASS/* or CLASS/*, {'|'.join(SUFFIXES)}, in {str(path)!r}"
        raise InvalidInput("data.source", expected, "none")
    return found


def _image_classes(names: list[str]) -> dict[str, dict[str, str]]:
    """Return for train and test each image's name and its class, by name; folders of classes alone
    are `train`."""
    is_folder = {PurePosixPath(name): name.endswith("/") for name in sorted(names)}
    hidden = (".", "__MACOSX")
    paths = [path for path in is_folder if not any(p.startswith(hidden) for p in path.parts)]
    outer = _outer(path for path in paths if not is_folder[path])
    paths = [path for path in paths if len(path.parts) > outer]
    has_parts = any(path.parts[outer] in SPLIT_NAMES for path in paths)
    depth = outer + 1 + has_parts  # of files in a class's folder
    found: dict[str, dict[str, str]] = {part: {} for part in SPLIT_NAMES}
    folders = set()
    others: Counter[str] = Counter()  # files in the classes' folders, by their endings
    for path in paths:
        part = path.parts[outer] if has_parts else "train"
        if part not in found or len(path.parts) < depth:
            continue
        label, is_file = path.parts[depth - 1], not is_folder[path]
        if len(path.parts) > depth or not is_file:
            folders.add((part, label))
        if len(path.parts) != depth + 1 or not is_file:
            continue
        if path.name.lower().endswith(SUFFIXES):
            found[part][str(path)] = label
        else:
            others[path.suffix.lower() or "no ending"] += 1
    images = f"images ({'|'.join(SUFFIXES)})"
    if others:
        counts = ", ".join(f"{count} of {ending}" for ending, count in others.most_common(SHOWN))
        log.info("left out: %d files that are no %s: %s", others.total(), images, counts)
    for part, label in sorted(folders):
        if found[part] and label not in found[part].values():
            raise InvalidInput(f"data.source: folder {label!r}", images, "none")
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
    opened: Opened, names: list[str], section: "DataSection"
) -> tuple[tuple[int, ...], ImageSpec]:
    first: tuple[int, int] | None = None
    is_grey = True
    for name in names:
        image = _open(opened, name)
        is_grey = is_grey and image.mode in GREY_MODES
        first = first or image.size
        if section.image_size is None and image.size != first:
            size = f"{first[0]} x {first[1]} pixels"
            expected = f"an image of {size} as {names[0]} (or `image_size` in the recipe)"
            raise InvalidInput(_field(name), expected, f"{image.width} x {image.height}")
    assert first is not None
    height, width = section.image_size or (first[1], first[0])
    shape = (height, width) if is_grey else (3, height, width)
    needed = len(names) * math.prod(shape)
    if needed > MAX_DATA_BYTES:
        raise InvalidInput("data.source", f"at most {MAX_DATA_BYTES} bytes of pixels", f"{needed}")
    is_cut = section.image_fit == "crop"
    return shape, ImageSpec(
        mode="L" if is_grey else "RGB",
        resize=section.image_size is not None,
        fit=section.image_fit,
        shorter=(section.image_resize or section.longer_side) if is_cut else None,
        interpolation=section.image_interpolation,
    )


def _pixels(
    opened: Opened, names: list[str], shape: tuple[int, ...], spec: ImageSpec
) -> UInt8[np.ndarray, "N I"]:
    x = np.empty((len(names), math.prod(shape)), dtype=np.uint8)
    for n, name in enumerate(names):
        x[n] = pixels(_open(opened, name), shape, spec, _field(name))
    return x


def _open(opened: Opened, name: str) -> ImageFile:
    try:
        with opened(name) as file:
            content = file.read(MAX_IMAGE_BYTES + 1)
    except UNREADABLE as error:
        reason = (str(error) or "its end").splitlines()[0][:200]
        raise InvalidInput(_field(name), "a readable file", reason) from None
    if len(content) > MAX_IMAGE_BYTES:
        raise InvalidInput(_field(name), f"at most {MAX_IMAGE_BYTES} bytes", "more")
    return open_image(content, _field(name), TRAINING_FORMATS)


def _field(name: str) -> str:
    return f"data.source: {name!r}"
