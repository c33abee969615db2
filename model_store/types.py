"""Types shared between modules."""

from collections.abc import Callable
from mmap import mmap
from typing import Literal

Content = bytes | bytearray | mmap  # of a file or request body
Pause = Callable[[], None]  # called every few milliseconds during long work, to yield to others


def no_pause() -> None:
    """Do nothing."""


Task = Literal["classification", "regression"]
