"""Share expensive fixtures between the processes of a test run."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def create_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Create a folder once per test run. Other processes wait for it."""
    run_folder = shared_folder(factory)
    folder, marker = run_folder / name, run_folder / f"{name}.done"
    with (run_folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists():
            shutil.rmtree(folder, ignore_errors=True)  # another process failed
            folder.mkdir()
            make(folder)
            marker.touch()
    return folder
