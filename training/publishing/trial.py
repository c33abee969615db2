"""The last step before a version is published: the service's own loading and a prediction, in a
fresh process."""

import shutil
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import LATEST, ModelStore
from model_store.errors import DubitoError
from model_store.inference.trials import TrialProcess
from training.publishing.stages import Draft

TRIAL_S = 120.0  # in which a version must be loaded and predict
ABANDONED_S = 3600.0  # after which a trial's files are those of a process that was killed
PREFIX = ".trial-"  # not a model's name: stores pass such folders over


class TrialError(DubitoError):
    """A version that the service could not load or predict with; nothing is published."""


def publish_draft(store: ModelStore, name: str, draft: Draft, alias: str = LATEST) -> Manifest:
    """Publish a version as the next of `name`, if the service can load it and predict with it.

    Raises:
        TrialError: if the service cannot; nothing is published.
        InvalidInput: if the name is not fit for a model.
    """
    scratch = store.storage.scratch
    scratch.mkdir(parents=True, exist_ok=True)
    for left in scratch.glob(f"{PREFIX}*"):
        if time.time() - left.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(
        prefix=PREFIX, dir=scratch
    ) as folder:  # there is room for the version, as in no /tmp
        drafted = ModelStore(Path(folder)).publish(name, draft.description, draft.files)
        with closing(TrialProcess()) as process:
            failure = process.tried(Path(folder), name, drafted.version, TRIAL_S)
    if failure is not None:
        raise TrialError(
            f"model {name} is not published, since the service could not load it: {failure}"
        )
    return store.publish(name, draft.description, draft.files, alias)
