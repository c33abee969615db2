"""Load `images:PATH`, a folder or zip file with one subfolder per class.

Images are in `train/CLASS/*` and `test/CLASS/*`, or in `CLASS/*`. In the latter case, a share of
the images becomes test rows. Files are PNG, JPEG, WebP, BMP or TIFF. Other files are skipped, but a
class folder without images is an error. Pixels stay bytes.
"""

import math
import zipfile
import zlib
from collections import Counter, defaultdict
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
from training.data.rows import Dataset, Keys, Rows, class_numbers, hold_out

if TYPE_CHECKING:
    from training.sections import DataSection

Pixels = UInt8[np.ndarray, "N I"]
Open = Callable[[str], ImageFile]  # opens an image by its name
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
TRAINING_FORMATS = (*FORMATS, "TIFF")
SPLIT_NAMES = ("train", "test")
UNREADABLE = (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError)
MAX_SHOWN = 10  # suffixes of skipped files


def images(path: Path, section: "DataSection") -> Dataset:
    """Read images and their classes.

    Images are resized or cropped to `image_size` (height, width). If it is not set, all must have
    the same size. Their shape is (H, W) if all files are grey, otherwise (3, H, W).
    """
    with _images(path) as (labels_by_split, open_image):
        names = list(labels_by_split["train"])
        shape, spec = _shape(open_image, [*names, *labels_by_split["test"]], section)
        x = {
            part: _pixels(open_image, list(labels), shape, spec)
            for part, labels in labels_by_split.items()
        }
    labels, test_labels = (list(labels_by_split[part].values()) for part in SPLIT_NAMES)
    y, y_test, classes = class_numbers(labels, test_labels, "data.source: folders")
    train, test = Rows(x["train"], y, np.array(names)), Rows(x["test"], y_test)
    if not test_labels:
        keys = Keys(y if section.is_stratified else None)
        train_index, test_index = hold_out(len(y), section.test_fraction, keys)
        train, test = train.take(train_index), train.take(test_index)
    is_held_out = not test_labels
    return Dataset(train, test, shape, classes, 0.0, 255.0, image=spec, is_held_out=is_held_out)


def sample_images(
    path: Path, shape: tuple[int, ...], spec: ImageSpec, max_rows: int, seed: int
) -> Pixels:
    with _images(path, needs_training=False) as (labels_by_split, open_image):
        names = [*(labels_by_split["test"] or labels_by_split["train"])]
        order = np.random.default_rng(seed).permutation(len(names))[:max_rows]
        return _pixels(open_image, [names[i] for i in order], shape, spec)


def survey_images(path: Path) -> tuple[dict[str, int], Counter[tuple[int, int]], bool, bool]:
    """Read the sizes, modes and classes of all images from their headers.

    Returns the number of training images by class, the number of images by size (width, height),
    whether all are grey, and whether there are test images.
    """
    with _images(path) as (labels_by_split, open_image):
        names = [*labels_by_split["train"], *labels_by_split["test"]]
        names_by_size, is_grey = _survey(open_image, names)
    sizes = Counter({size: len(names) for size, names in names_by_size.items()})
    classes = dict(Counter(labels_by_split["train"].values()).most_common())
    return classes, sizes, is_grey, bool(labels_by_split["test"])


def _survey(open_image: Open, names: list[str]) -> tuple[dict[tuple[int, int], list[str]], bool]:
    names_by_size = defaultdict(list)
    is_grey = True
    for name in names:
        image = open_image(name)
        names_by_size[image.size].append(name)
        is_grey = is_grey and image.mode in GREY_MODES
    return names_by_size, is_grey


@contextmanager
def _images(
    path: Path, needs_training: bool = True
) -> Iterator[tuple[dict[str, dict[str, str]], Open]]:
    """Yield the class of each image by split and file name, and a function that opens an image."""
    if path.is_dir():
        depths = ("/".join("*" * depth) for depth in range(1, 5))
        entries = [entry for pattern in depths for entry in path.glob(pattern)]
        names = [entry.relative_to(path).as_posix() + "/" * entry.is_dir() for entry in entries]
        classes = _image_classes(names, path, needs_training)
        yield classes, lambda name: _open(name, (path / name).open, "rb")
        return
    try:
        with zipfile.ZipFile(path) as file:
            classes = _image_classes(file.namelist(), path, needs_training)
            yield classes, lambda name: _open(name, file.open, name)
    except (zipfile.BadZipFile, OSError) as error:
        reason = error.strerror or "a missing file" if isinstance(error, OSError) else str(error)
        expected = f"a folder or zip file, {str(path)!r}"
        raise InvalidInput("data.source", expected, reason) from None


def _image_classes(
    names: list[str], source: Path, needs_training: bool
) -> dict[str, dict[str, str]]:
    is_folder = {PurePosixPath(name): name.endswith("/") for name in sorted(names)}
    hidden = (".", "__MACOSX")
    paths = [path for path in is_folder if not any(p.startswith(hidden) for p in path.parts)]
    outer = _count_outer_folders(path for path in paths if not is_folder[path])
    paths = [path for path in paths if len(path.parts) > outer]
    has_parts = any(path.parts[outer] in SPLIT_NAMES for path in paths)
    depth = outer + 1 + has_parts  # of class folders
    labels_by_split: dict[str, dict[str, str]] = {part: {} for part in SPLIT_NAMES}
    folders = set()
    other_files: Counter[str] = Counter()  # by suffix
    for path in paths:
        part = path.parts[outer] if has_parts else "train"
        if part not in labels_by_split or len(path.parts) < depth:
            continue
        label, is_file = path.parts[depth - 1], not is_folder[path]
        if len(path.parts) > depth or not is_file:
            folders.add((part, label))
        if len(path.parts) != depth + 1 or not is_file:
            continue
        if path.name.lower().endswith(SUFFIXES):
            labels_by_split[part][str(path)] = label
        else:
            other_files[path.suffix.lower() or "no suffix"] += 1
    images = f"images ({'|'.join(SUFFIXES)})"
    if other_files:
        most_common = other_files.most_common(MAX_SHOWN)
        counts = ", ".join(f"{count} of {suffix}" for suffix, count in most_common)
        log.info("skipping %d files other than %s: %s", other_files.total(), images, counts)
    for part, label in sorted(folders):
        if labels_by_split[part] and label not in labels_by_split[part].values():
            raise InvalidInput(f"data.source: folder {label!r}", images, "none")
    if not labels_by_split["train"] and (needs_training or not labels_by_split["test"]):
        expected = f"images train/CLASS/* or CLASS/*, {'|'.join(SUFFIXES)}, in {str(source)!r}"
        raise InvalidInput("data.source", expected, "none")
    return labels_by_split


def _count_outer_folders(files: Iterable[PurePosixPath]) -> int:
    """Count the nested folders that contain all class folders, e.g. a zip's top-level folder."""
    outer = 0
    for names in zip(*(path.parts[:-2] for path in files), strict=False):
        if len(set(names)) > 1 or names[0] in SPLIT_NAMES:
            break
        outer += 1
    return outer


def _shape(
    open_image: Open, names: list[str], section: "DataSection"
) -> tuple[tuple[int, ...], ImageSpec]:
    names_by_size, is_grey = _survey(open_image, names)
    first, *other_sizes = names_by_size
    if section.image_size is None and other_sizes:
        size = f"{first[0]} x {first[1]} pixels"
        expected = f"an image of {size} like {names[0]} (or set `image_size` in the recipe)"
        name, (width, height) = names_by_size[other_sizes[0]][0], other_sizes[0]
        raise InvalidInput(_field(name), expected, f"{width} x {height}")
    height, width = section.image_size or (first[1], first[0])
    shape = (height, width) if is_grey else (3, height, width)
    return shape, ImageSpec(
        mode="L" if is_grey else "RGB",
        resize=section.image_size is not None,
        fit="stretch" if section.image_resize is None else "crop",
        shorter=section.image_resize,
        interpolation=section.image_interpolation,
    )


def _pixels(open_image: Open, names: list[str], shape: tuple[int, ...], spec: ImageSpec) -> Pixels:
    x = np.empty((len(names), math.prod(shape)), dtype=np.uint8)
    for n, name in enumerate(names):
        x[n] = pixels(open_image(name), shape, spec, _field(name))
    return x


def _open(name: str, open_file: Callable[[str], IO[bytes]], argument: str) -> ImageFile:
    try:
        with open_file(argument) as file:
            content = file.read()
    except UNREADABLE as error:
        reason = (str(error) or "a truncated file").splitlines()[0][:200]
        raise InvalidInput(_field(name), "a readable file", reason) from None
    return open_image(content, _field(name), TRAINING_FORMATS)


def _field(name: str) -> str:
    return f"data.source: {name!r}"
