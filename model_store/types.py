"""Types that rooms of the package share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Pause = Callable[[], None]  # long work calls it every few milliseconds, so that others may go on


def no_pause() -> None:
    """Go on at once."""


Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class DetectorNames:
    """Which detectors the flag combines, which are densities, which of these are judged from both
    sides, and of which the network says what each number of a row adds to the score.
    """

    combined: tuple[str, ...]
    density: tuple[str, ...] = ()
    two_sided: tuple[str, ...] = ()
    attributed: tuple[str, ...] = ()
