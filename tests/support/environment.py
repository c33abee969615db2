"""Where commands run in tests: the environment that they see, and the folders that they work in."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from model_store.artifacts.store import ModelStore

ROOT = Path(__file__).parent.parent.parent


def environment_with(**settings: str) -> dict[str, str]:
    """The environment without any DUBITO_ variable but these, and where graphs are kept."""
    retained = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DUBITO_") or name == "DUBITO_GRAPHS"
    }
    return retained | settings


def environment_in(folder: Path) -> dict[str, str]:
    """The environment of commands that read data in a folder, and put runs and models below it."""
    return environment_with(
        DUBITO_STORE=str(folder / "models"),
        DUBITO_RUNS=str(folder / "runs"),
        DUBITO_DATA=str(folder),
    )


def run_service(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m service` with settings of `environment_with` until it ends."""
    return subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        env=environment_with(**settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def run_store(store: "ModelStore", *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `python -m model_store` on a store, in this process: one of its own takes longer to
    start than to do anything."""
    from model_store.__main__ import main

    command = ["--store", str(store.root), *map(str, arguments)]
    with redirect_stdout(io.StringIO()) as message, redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(command)
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(command, code, message.getvalue(), errors.getvalue())


def run_training(folder: Path, *arguments: str) -> None:
    """Run `python -m training` in `environment_in` a folder; it succeeds."""
    command = [sys.executable, "-m", "training", *arguments]
    completed = subprocess.run(
        command, env=environment_in(folder), cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert completed.returncode == 0, completed.stderr


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Commands of this process find a user's modules and data in a folder, and put runs and models
    below it."""
    with pytest.MonkeyPatch.context() as settings:
        settings.syspath_prepend(folder)
        settings.setenv("DUBITO_DATA", str(folder))
        settings.setenv("DUBITO_RUNS", str(folder / "runs"))
        settings.setenv("DUBITO_STORE", str(folder / "models"))
        yield


def run_training_here(folder: Path, *arguments: str) -> None:
    """`run_training` in this process, which spares it torch's start."""
    from training.__main__ import main

    with working_in(folder):
        assert main([*arguments]) == 0
