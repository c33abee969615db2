"""The last step before a version is published: the service's own loading and a prediction, in a fresh process."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import model_store
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import ModelStore
from model_store.errors import DubitoError, one_line
from training.publishing.stages import Draft

TRIAL_S = 120.0  # in which a version must be loaded and predict one row
ABANDONED_S = 3600.0  # after which a trial's files are those of a process that was killed
PREFIX = ".trial-"  # not a model's name: stores pass such folders over


class TrialError(DubitoError):
    """A version that the service could not load or predict with; nothing is published."""


def publish_draft(store: ModelStore, name: str, draft: Draft) -> Manifest:
    """Publish a version as the next of `name`, if the service can load it and predict with it.

    Raises:
        TrialError: if the service cannot; nothing is published.
        InvalidInput: if the name is not fit for a model.
    """
    store.root.mkdir(parents=True, exist_ok=True)
    for left in store.root.glob(f"{PREFIX}*"):
        if time.time() - left.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=PREFIX, dir=store.root) as folder:  # there is room for the version, as in no /tmp
        ModelStore(Path(folder)).publish(name, draft.description, draft.files)
        _try(Path(folder).resolve(), name)
    return store.publish(name, draft.description, draft.files)


def _try(folder: Path, name: str) -> None:
    """Load the version in a store of its own, and predict, in a process that knows nothing but its files."""
    packages = str(Path(model_store.__path__[0]).parent)
    path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "model_store.inference.trial", str(folder)]
    refused = f"model {name} is not published, since the service could not load it"
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TRIAL_S,
        )
    except subprocess.TimeoutExpired:
        raise TrialError(f"{refused}: expected a prediction within {TRIAL_S:g} s, got none") from None
    if done.returncode != 0:
        last = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise TrialError(f"{refused}: {one_line(Exception(last))}")
