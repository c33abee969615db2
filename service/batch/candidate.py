"""Fit a candidate model in a job.

The service runs `python -m training candidate`, because it never imports training.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from model_store.errors import DubitoError
from model_store.processes import end_with_parent, start_module
from model_store.state.jobs import Job

TRAINING = ("training", "torch")
LOG_FILE = "log.txt"
LAST_LINES = 30
POLL_S = 0.5
_EPOCH = re.compile(r"^epoch (\d+)/(\d+)", re.MULTILINE)


class Cancelled(Exception):
    """Raised if the job was cancelled or its process must stop."""


def can_fit() -> bool:
    return all(find_spec(package) is not None for package in TRAINING)


def command(model: str) -> str:
    return f"dubito candidate {model}"


def fit_candidate(folder: Path, job: Job, report: Callable[[int, int], bool]) -> str:
    """Fit a candidate and return the file name of its log.

    `report` gets the numbers of all and of finished epochs. It returns False to cancel the fit.
    """
    state, place = folder.parent, folder / job.id
    with (place / LOG_FILE).open("wb") as lines:
        process = start_module(
            "training",
            os.environ,
            *("candidate", job.request["model"], "--state", str(state)),
            stdout=lines,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )
    with process:
        try:
            while process.poll() is None:
                if not report(*_epochs(place)):
                    raise Cancelled
                time.sleep(POLL_S)
        finally:
            process.terminate()
    if process.returncode != 0:
        log = last_lines(place)
        raise DubitoError(log[-1].removeprefix("error: ") if log else "the fit ended")
    return LOG_FILE


def last_lines(folder: Path) -> list[str]:
    """Return the last lines of a fit's log, or an empty list if there is no log."""
    with suppress(FileNotFoundError):
        return (folder / LOG_FILE).read_text(errors="replace").splitlines()[-LAST_LINES:]
    return []


def _epochs(folder: Path) -> tuple[int, int]:
    epochs = _EPOCH.findall("\n".join(last_lines(folder)))
    epoch, total = map(int, epochs[-1]) if epochs else (0, 1)
    return total, epoch
