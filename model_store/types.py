"""Types that rooms of the package share."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")

Steps = Generator[
    None, None, T
]  # work that is done in steps of some milliseconds, and what it comes to


def at_once(steps: Steps[T]) -> T:
    """Do all steps of some work, one right after the other, and return what it comes to."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


Task = Literal["classification", "regression"]
TailLaw = Literal["predictive", "exponential"]  # of scores beyond those of the reference rows


@dataclass(frozen=True)
class DetectorNames:
    """Which detectors the flag combines, which are densities, which of these are judged from both
    sides, and of which the network says what each number of a row adds to the score.

    `tail` says how all of them judge scores beyond those of the reference rows.
    """

    combined: tuple[str, ...]
    density: tuple[str, ...] = ()
    two_sided: tuple[str, ...] = ()
    tail: TailLaw = "predictive"
    attributed: tuple[str, ...] = ()
