"""Environments and folders for commands in tests."""

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
    """Return the environment with these DUBITO_ settings only, and the graph cache."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DUBITO_") or name == "DUBITO_GRAPHS"
    }
    return inherited | settings


def environment_in(folder: Path) -> dict[str, str]:
    """Return the environment of commands with data, runs and models in a folder."""
    return environment_with(
        DUBITO_STORE=str(folder / "models"),
        DUBITO_RUNS=str(folder / "runs"),
        DUBITO_DATA=str(folder),
    )


def run_service(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m service` with settings until it ends."""
    return subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        env=environment_with(**settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def run_store(store: "ModelStore", *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `python -m model_store` on a store in this process, which saves the startup time."""
    from model_store.__main__ import main

    command = ["--store", str(store.root), *map(str, arguments)]
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(command)
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())


def run_training(folder: Path, *arguments: str) -> None:
    """Run `python -m training` successfully in `environment_in(folder)`."""
    command = [sys.executable, "-m", "training", *arguments]
    completed = subprocess.run(
        command, env=environment_in(folder), cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert completed.returncode == 0, completed.stderr


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Let commands in this process use the modules, data, runs and models of a folder."""
    with pytest.MonkeyPatch.context() as settings:
        settings.syspath_prepend(folder)
        settings.setenv("DUBITO_DATA", str(folder))
        settings.setenv("DUBITO_RUNS", str(folder / "runs"))
        settings.setenv("DUBITO_STORE", str(folder / "models"))
        yield


def run_training_in_process(folder: Path, *arguments: str) -> None:
    """Run `python -m training` in this process, which saves the import of torch."""
    from training.__main__ import main

    with working_in(folder):
        assert main([*arguments]) == 0
