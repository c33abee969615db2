"""Data folders, run folders, and locks on run folders."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model_store.artifacts.store import ModelStore, store_from_environment
from model_store.errors import InvalidInput


def runs_folder() -> Path:
    return Path(os.environ.get("DUBITO_RUNS", "runs"))


def data_root() -> Path:
    return Path(os.environ.get("DUBITO_DATA", "data"))


def open_store(writes: bool = True) -> ModelStore:
    store = store_from_environment()
    if writes:
        store.storage.check_writable()  # Fail now, not after hours of training.
    return store


class RunLockedError(InvalidInput):
    """Raised if another process is using the run."""


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Lock a run's folder, or raise `RunLockedError` if another process has the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            expected = "a run that no other process is working on"
            raise RunLockedError("run", expected, f"{folder}, which is in use") from None
        yield
