"""Types shared between modules."""

from collections.abc import Callable
from mmap import mmap
from typing import Any, Literal

Content = bytes | bytearray | mmap  # of a file or request body
JsonObject = dict[str, Any]
Pause = Callable[[], None]  # called every few milliseconds during long work, to yield to others


def no_pause() -> None: ...


Task = Literal["classification", "regression"]
