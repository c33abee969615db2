"""Random inputs, and those at which implementations part: ties, probabilities of 0, one draw, one
class, one row.

K draws, N rows, C classes; P positive rows and N negative ones.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64, Int64
from scipy.special import log_softmax


def draws_of_classes(generator: np.random.Generator) -> Iterator[Float64[np.ndarray, "K N C"]]:
    """Return log class probabilities of draws, case by case."""
    yield log_softmax(3.0 * generator.normal(size=(20, 50, 10)), axis=2)
    yield log_softmax(3.0 * generator.normal(size=(100, 20, 3)), axis=2)
    yield log_softmax(generator.integers(-1, 2, size=(5, 50, 4)).astype(float), axis=2)  # ties
    logits = generator.normal(size=(20, 50, 5))
    logits[generator.uniform(size=logits.shape) < 0.5] = -np.inf  # p = 0
    logits[..., 0] = np.maximum(logits[..., 0], -50.0)  # so that there is a class left
    yield log_softmax(logits, axis=2)
    certain = np.full((7, 20, 3), -np.inf)  # p = 1, of another class in each draw
    np.put_along_axis(certain, generator.integers(3, size=(7, 20, 1)), 0.0, axis=2)
    yield certain
    yield log_softmax(generator.normal(size=(1, 20, 10)), axis=2)  # one draw
    yield log_softmax(generator.normal(size=(2, 1, 2)), axis=2)  # one row


def labelled(
    generator: np.random.Generator,
) -> Iterator[tuple[Float64[np.ndarray, "N C"], Int64[np.ndarray, "N"]]]:
    """Return class probabilities without ties, and the classes, case by case."""
    for rows, classes, scale in ((500, 10, 2.0), (1000, 3, 4.0), (60, 2, 1.0)):
        probs = np.exp(log_softmax(scale * generator.normal(size=(rows, classes)), axis=1))
        chosen = (probs.cumsum(axis=1) > generator.uniform(size=(rows, 1))).argmax(axis=1)
        yield probs, chosen
        yield probs, np.zeros(rows, dtype=np.int64)  # one class alone is there
        yield probs, probs.argmax(axis=1)  # all are right
        yield probs, probs.argmin(axis=1)  # all are wrong


def tied(
    generator: np.random.Generator,
) -> Iterator[tuple[Float64[np.ndarray, "N C"], Int64[np.ndarray, "N"]]]:
    """Return class probabilities of few different values, 0 and 1 among them, and the classes."""
    for classes in (2, 4):
        counts = generator.multinomial(10, np.full(classes, 1.0 / classes), size=400)
        counts[:20] = 10 * np.eye(classes, dtype=np.int64)[generator.integers(classes, size=20)]
        probs = counts / 10
        yield probs, (probs.cumsum(axis=1) > generator.uniform(size=(400, 1))).argmax(axis=1)


def groups(
    generator: np.random.Generator,
) -> Iterator[tuple[Float64[np.ndarray, "P"], Float64[np.ndarray, "N"]]]:
    """Return scores of positive and of negative rows, case by case."""
    for positive, negative in ((200, 300), (40, 1000), (21, 20)):
        yield generator.normal(size=positive) + 1.0, generator.normal(size=negative)
        yield (
            generator.integers(0, 6, positive) + 1.0,
            generator.integers(0, 6, negative) + 0.0,
        )  # ties
        yield generator.normal(size=positive) + 20.0, generator.normal(size=negative)  # apart
        yield np.ones(positive), np.ones(negative)  # nothing to tell them by


def gaussians(
    generator: np.random.Generator,
) -> Iterator[tuple[Float64[np.ndarray, "K N 2"], Float64[np.ndarray, "N"]]]:
    """Return means and log variances of draws, and targets, case by case."""
    for draws, rows, spread in ((20, 100, 1.0), (100, 30, 0.01), (5, 50, 30.0), (1, 20, 1.0)):
        mean = 5.0 + spread * generator.normal(size=(draws, rows))
        log_variance = generator.normal(size=(draws, rows))
        y = mean[0] + np.exp(0.5 * log_variance[0]) * generator.normal(size=rows) * 2.0
        yield np.stack([mean, log_variance], axis=2), y


def calibrations(
    generator: np.random.Generator,
) -> Iterator[tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "N"]]]:
    """Return sorted calibration scores and new ones, case by case."""
    for rows in (1, 19, 99, 100, 999):
        yield np.sort(generator.normal(size=rows)), generator.normal(size=200)
        yield (
            np.sort(generator.integers(0, 8, rows) / 8),
            generator.integers(-1, 10, 200) / 8,
        )  # ties
