"""Rows near the data that are not of it, made of test rows: mixed, rotated, corrupted, or with
columns shuffled.

N rows of I numbers. Each function returns as many rows as it is given, in the data's range; what is
random is by seed.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float32, Int64, Num

from model_store.artifacts.manifest import InputSpec, column_width
from training.seeds import EvaluationStream, generator

NOISE = 0.2  # standard deviation, of the range
CONTRAST = 0.3  # of a row's own
OCCLUDED = 0.5  # of height and of width
BLUR = 1 / 14  # standard deviation, of the height: two pixels of MNIST

Images = Float32[np.ndarray, "N C H W"]


def near_manifold(
    x: Num[np.ndarray, "N I"],
    y: Num[np.ndarray, "N"],
    spec: InputSpec,
    is_classified: bool,
    seed: int,
) -> dict[str, Float32[np.ndarray, "N I"]]:
    """Return sets by name: two classes mixed, of columns crossed; of images rotated and corrupted
    ones; of others shuffled columns.
    """
    rows, sets = x.astype(np.float32), {}
    if is_classified:
        labels = y.astype(np.int64)
        sets = (
            {"crossed": crossed(rows, labels, spec, seed)}
            if spec.columns
            else {"mixed": mixed(rows, labels, seed)}
        )
    if len(spec.shape) == 2 or (len(spec.shape) == 3 and spec.shape[0] == 3):
        images = rows.reshape(len(rows), -1, *spec.shape[-2:])
        sets |= {
            name: change(images, spec, seed).reshape(len(rows), -1)
            for name, change in CORRUPTIONS.items()
        }
    else:
        sets["shuffled"] = shuffled(rows, spec, seed)
    return sets


def mixed(
    x: Float32[np.ndarray, "N I"], y: Int64[np.ndarray, "N"], seed: int
) -> Float32[np.ndarray, "M I"]:
    """Return the mean of each row and a random row of another class; of a lone class, none."""
    partners = partners_of_another_class(y, generator(seed, EvaluationStream.MIXED))
    return 0.5 * (x[: len(partners)] + x[partners])


def crossed(
    x: Float32[np.ndarray, "N I"], y: Int64[np.ndarray, "N"], spec: InputSpec, seed: int
) -> Float32[np.ndarray, "M I"]:
    """Return rows that have each column of one of two rows of different classes, at random; of a
    lone class, none.

    A mean would be no row of a table, which has no half categories.
    """
    rng = generator(seed, EvaluationStream.MIXED)
    partners = partners_of_another_class(y, rng)
    is_other = rng.random((len(partners), len(spec.columns))) < 0.5
    widths = [column_width(column) for column in spec.columns]
    return np.where(np.repeat(is_other, widths, axis=1), x[partners], x[: len(partners)])


def partners_of_another_class(y: Int64[np.ndarray, "N"], rng: np.random.Generator) -> list[int]:
    """Return for each row one of another class; nothing of a lone class."""
    others = {c: np.flatnonzero(y != c) for c in np.unique(y).tolist()}
    return [int(rng.choice(others[c])) for c in y.tolist() if len(others[c])]


def shuffled(
    x: Float32[np.ndarray, "N I"], spec: InputSpec, seed: int
) -> Float32[np.ndarray, "N I"]:
    """Return rows whose every column is some other row's: each alone is as in the data, together
    they are not."""
    rng = generator(seed, EvaluationStream.SHUFFLED)
    widths = [column_width(column) for column in spec.columns] or [1] * x.shape[1]
    columns = np.split(x, np.cumsum(widths)[:-1], axis=1)
    return np.concatenate([column[rng.permutation(len(x))] for column in columns], axis=1)


def rotated(images: Images) -> Images:
    """Return images turned by a quarter, or of unequal sides by half."""
    quarters = 1 if images.shape[2] == images.shape[3] else 2
    return np.ascontiguousarray(np.rot90(images, quarters, axes=(2, 3)))


def noisy(images: Images, spec: InputSpec, seed: int) -> Images:
    """Return images with normal noise added."""
    noise = generator(seed, EvaluationStream.NOISY).standard_normal(images.shape).astype(np.float32)
    return np.clip(images + np.float32(NOISE * _span(spec)) * noise, *_range(spec))


def low_contrast(images: Images) -> Images:
    """Return images drawn towards their own mean."""
    mean = images.mean(axis=(1, 2, 3), keepdims=True)
    return mean + np.float32(CONTRAST) * (images - mean)


def occluded(images: Images, spec: InputSpec, seed: int) -> Images:
    """Return images with a rectangle of the data's minimum over a random place, a quarter of the
    area."""
    rng = generator(seed, EvaluationStream.OCCLUDED)
    height, width = (max(1, round(OCCLUDED * side)) for side in images.shape[2:])
    tops = rng.integers(0, images.shape[2] - height + 1, len(images))
    lefts = rng.integers(0, images.shape[3] - width + 1, len(images))
    covered = images.copy()
    for image, top, left in zip(covered, tops.tolist(), lefts.tolist(), strict=True):
        image[:, top : top + height, left : left + width] = spec.minimum
    return covered


def blurred(images: Images, spec: InputSpec) -> Images:
    """Return images blurred by a Gaussian."""
    std = BLUR * images.shape[2]
    down, across = (_blur(side, std) for side in images.shape[2:])
    return np.clip(down @ images @ across.T, *_range(spec))


CORRUPTIONS: dict[str, Callable[[Images, InputSpec, int], Images]] = {
    "rotated": lambda images, *_: rotated(images),
    "noisy": noisy,
    "low-contrast": lambda images, *_: low_contrast(images),
    "occluded": occluded,
    "blurred": lambda images, spec, _: blurred(images, spec),
}


def _blur(size: int, std: float) -> Float32[np.ndarray, "S S"]:
    distance = np.subtract.outer(np.arange(size), np.arange(size))
    weights = np.exp(-0.5 * np.square(distance / std))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _span(spec: InputSpec) -> float:
    return spec.maximum - spec.minimum


def _range(spec: InputSpec) -> tuple[np.float32, np.float32]:
    return np.float32(spec.minimum), np.float32(spec.maximum)
