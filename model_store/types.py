"""Types shared between modules."""

from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from typing import Literal

Content = bytes | bytearray | mmap  # of a file or request body
Pause = Callable[[], None]  # called every few milliseconds during long work, to yield to others


def no_pause() -> None:
    """Do nothing."""


Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class DetectorNames:
    combined: tuple[str, ...]  # in the flag's statistic
    density: tuple[str, ...] = ()
    two_sided: tuple[str, ...] = ()  # small scores are unusual too
    attributed: tuple[str, ...] = ()  # explained by the network's output `terms`
