"""Keys for random streams.

A key consists of a seed, a stream and counters within the stream, such as a step. Each enumeration
belongs to a different seed. The values determine the bits of every fit, so never change or reuse
them.
"""

from enum import IntEnum, unique

import numpy as np


@unique
class Stream(IntEnum):
    """Random streams derived from the seed of a recipe or of `dubito calibrate`."""

    INITIALISATION = 0
    INITIAL_ROWS = 1
    ORDER = 2
    STEP_NOISE = 3
    VALIDATION_NOISE = 4
    CALIBRATION = 5  # the seed is derived from one of `ServedRows`
    LAYER_NOISE = 6  # random numbers inside layers
    DETECTORS = 7
    TEMPERATURE = 8
    SPLIT = 9  # of rows for a recalibration
    IMPORTANCE = 11  # importance sampling diagnostics
    AUGMENTATION = 12
    CHAINS = 13  # of Hamiltonian Monte Carlo
    NEAREST_ROWS = 20  # training rows published for explanations


@unique
class ServedRows(IntEnum):
    REFERENCE = 0
    RANKING = 1
    TEST = 2
    NOISE_VALUES = 3  # values of noise rows
    NOISE = 4


@unique
class EvaluationStream(IntEnum):
    """Random streams derived from the seed of `dubito evaluate`."""

    UNIFORM = 0
    GAUSSIAN = 1
    MIXED = 10
    FIXED_DRAWS = 20  # for an attacker's gradients
    FRESH_DRAWS = 21
    STARTS = 22  # initial points of attacks
    TEST_ROWS = 30
    OUTLIER_ROWS = 31
    RESAMPLES = 32  # bootstrap resamples for intervals


def generator(*key: int) -> np.random.Generator:
    return np.random.default_rng(hash_key(*key))


def hash_key(*key: int) -> int:
    """Mix integers into a 63-bit seed, as splitmix64 does."""
    state = 0
    for part in key:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
