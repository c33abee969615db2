"""Where training finds and puts things: `DUBITO_DATA` and `DUBITO_RUNS`, and who holds a run's
folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model_store.errors import InvalidInput


def runs_folder() -> Path:
    return Path(os.environ.get("DUBITO_RUNS", "runs"))


def data_root() -> Path:
    return Path(os.environ.get("DUBITO_DATA", "data"))


class Held(InvalidInput):
    """That another process works on a run."""


@contextmanager
def hold(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold a run's folder, so that two processes never write one run; where another holds it,
    `wait` or refuse."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            expected = "a run that no other process works on"
            raise Held("run", expected, f"{folder}, which one does") from None
        yield
