"""Random streams: what each draw of random numbers is for is part of its key, so that no two
streams are one.

A key is a seed, a stream, and what tells draws of the stream apart, such as a step. Within an
enumeration no two values are equal; each enumeration is of another seed. The values are part of
every fit's bits: a new stream takes a new value, and no value is changed.
"""

from enum import IntEnum, unique

import numpy as np


@unique
class Stream(IntEnum):
    """Streams of a recipe's seed, or of that of `python -m training calibrate`."""

    INITIALISATION = 0
    INITIAL_ROWS = 1
    ORDER = 2
    STEP_NOISE = 3
    VALIDATION_NOISE = 4
    CALIBRATION = 5  # of the seed of one of `ServedRows`
    LAYER_NOISE = 6  # of layers that draw numbers of their own
    DETECTORS = 7
    TEMPERATURE = 8
    SPLIT = 9  # of rows, when a version is calibrated again
    PULL = 10  # of rows and draws that say whether a posterior has converged
    IMPORTANCE = 11  # of draws that say how well it covers what it approximates
    AUGMENTATION = 12
    NEAREST_ROWS = 20  # training rows that are published, for explanations


@unique
class ServedRows(IntEnum):
    REFERENCE = 0
    RANKING = 1
    TEST = 2
    NOISE_VALUES = 3  # what the noise rows are
    NOISE = 4


@unique
class EvaluationStream(IntEnum):
    """Streams of the seed of `python -m training evaluate`. Draws have keys of the names of their
    rows."""

    UNIFORM = 0
    GAUSSIAN = 1
    MIXED = 10
    SHUFFLED = 11
    NOISY = 12
    OCCLUDED = 13
    FIXED_DRAWS = 20  # of an attacker's gradients
    FRESH_DRAWS = 21
    STARTS = 22  # of attacks
    TEST_ROWS = 30
    OUTLIER_ROWS = 31
    RESAMPLES = 32  # of rows, for intervals
    EVEN = 34


def generator(*key: int) -> np.random.Generator:
    return np.random.default_rng(hash_key(*key))


def hash_key(*key: int) -> int:
    """Mix integers into a seed of 63 bits, in the manner of splitmix64."""
    state = 0
    for part in key:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
