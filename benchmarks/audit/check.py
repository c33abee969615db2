"""A check: one quantity, computed here and by somebody else's code on the same random inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

Pairs = Iterator[tuple[Any, Any]]  # ours and theirs, numbers or arrays of one shape
Compare = Callable[[np.random.Generator], Pairs]

ROUNDING = 1e-9  # the most that two orders of summation may differ by here, of numbers of size 1
SINGLE = 2e-6  # the same of float32


@dataclass(frozen=True)
class Check:
    """Compares a quantity with that of another package, case by case."""

    quantity: str
    package: str
    function: str
    compare: Compare
    tolerance: float
    # "" where both compute the same; else why they do not, and then the difference may be any
    why: str
    most_seeds: int | None  # of a check that takes long


@dataclass(frozen=True)
class Finding:
    """How far both were apart, over all seeds and cases."""

    check: Check
    cases: int
    numbers: int
    largest: float

    @property
    def agrees(self) -> bool:
        """Whether the largest difference is one of rounding."""
        return self.largest <= self.check.tolerance


CHECKS: list[Check] = []


def check(
    quantity: str,
    package: str,
    function: str,
    tolerance: float = ROUNDING,
    why: str = "",
    most_seeds: int | None = None,
) -> Callable[[Compare], Compare]:
    """Register a function that yields ours and theirs of each case."""

    def registered(compare: Compare) -> Compare:
        CHECKS.append(Check(quantity, package, function, compare, tolerance, why, most_seeds))
        return compare

    return registered


def run(one: Check, seeds: int) -> Finding:
    """Compare on the inputs of so many seeds."""
    cases, numbers, largest = 0, 0, 0.0
    for seed in range(min(seeds, one.most_seeds or seeds)):
        for ours, theirs in one.compare(np.random.default_rng(seed)):
            ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
            if ours.shape != theirs.shape:
                raise ValueError(f"{one.quantity}: expected shape {ours.shape}, got {theirs.shape}")
            with np.errstate(invalid="ignore"):
                apart = np.where(ours == theirs, 0.0, np.abs(ours - theirs))  # of infinite ends too
            cases, numbers = cases + 1, numbers + apart.size
            largest = max(largest, float(np.max(apart, initial=0.0)))
            if np.isnan(apart).any():
                largest = np.inf
    return Finding(one, cases, numbers, largest)


def installed(package: str) -> str:
    """Return a package's name and version."""
    return f"{package} {version(package)}"
