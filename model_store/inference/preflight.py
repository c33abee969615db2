"""Test versions in a separate process before they are served.

A graph is untrusted data. Only a run shows its time and memory, so it first runs in a process that
can be killed. That process, `python -m model_store.inference.preflight`, limits its memory, and its
parent limits its time.
"""

import json
import sys
import threading
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from model_store.artifacts.manifest import ENCODER, TOKENIZER
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, StoreError, one_line
from model_store.inference.explanation import explain
from model_store.inference.model import NEEDED, TOKENIZER_COPIES, Model
from model_store.processes import (
    READY,
    ChildProcess,
    NoAnswer,
    become_child,
    is_out_of_memory,
    limit_memory,
)

PREFLIGHT = "model_store.inference.preflight"
WORKING_BYTES = 1 << 30  # in addition to the files
TIMEOUT_S = 120.0  # for commands
ENCODED_ROWS = 4  # per run, since encoding may be slow
COPIES = 6  # memory to load a file, in file sizes


@dataclass(frozen=True)
class Failure:
    """The reason why a version cannot be served, and the file responsible."""

    file: str
    reason: str
    is_read: bool = True  # whether the files match the manifest

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class PreflightProcess(ChildProcess):
    """A process that checks several versions in turn and exits after the first failure."""

    def __init__(self) -> None:
        super().__init__(PREFLIGHT, {"CUDA_VISIBLE_DEVICES": ""})  # run on the CPU

    def run(
        self,
        store: Path,
        name: str,
        version: str,
        seconds: float,
        working_bytes: int = WORKING_BYTES,
        stopping: threading.Event | None = None,
    ) -> Failure | None:
        """Check a version. Return its failure, if any. Raise StopRequested if `stopping` is set."""
        request = {
            "store": str(store.resolve()),
            "name": name,
            "version": version,
            "working_bytes": working_bytes,
        }
        try:
            failure = self.ask(request, seconds, stopping or threading.Event())
        except NoAnswer as error:
            reason = f"the preflight process with {working_bytes} bytes ended ({error})"
            if error.is_late:
                reason = f"expected a prediction within {seconds:g} s, got none"
            return Failure("network.onnx", reason)
        return None if failure is None else Failure(**failure)


def check_version(store: ModelStore, name: str, version: str) -> None:
    """Check a version or alias in a new process. Raise NotFound, or BrokenArtifact if it fails."""
    manifest = store.manifest(name, store.resolve(name, version))
    with closing(PreflightProcess()) as process, closing(store.storage.lease(manifest)) as lease:
        failure = process.run(lease.root, name, manifest.version, TIMEOUT_S)
    if failure is not None:
        raise manifest.broken(failure.file, failure.reason)


def main() -> int:
    """Answer requests until the first failure, because memory may be corrupt after it."""
    send = become_child()
    send(READY)
    for line in sys.stdin:
        failure = check(**json.loads(line))
        send(None if failure is None else asdict(failure))
        if failure is not None:
            return 1
    return 0


def check(store: str, name: str, version: str, working_bytes: int) -> Failure | None:
    """Open, verify and load a version like the service, and predict. Return any failure.

    Memory is limited to `working_bytes` more than the files need.
    """
    is_read = False
    try:
        files = ModelStore(Path(store)).manifest(name, version).files
        copies = {**dict.fromkeys((*NEEDED, ENCODER), COPIES), TOKENIZER: TOKENIZER_COPIES}
        loaded = sum(times * files[file].size for file, times in copies.items() if file in files)
        limit_memory(working_bytes + loaded)
        artifact = ModelStore(Path(store)).open(name, version, files=NEEDED)
        is_read = True
        predict(Model.load(artifact, threads=1))
    except (StoreError, MemoryError) as error:
        file, reason = "", one_line(error)
        if isinstance(error, BrokenArtifact):
            file, reason = error.file, error.reason
        if is_out_of_memory(error):
            reason = f"it needs more than {working_bytes} bytes of memory, without its files"
        return Failure(file or "network.onnx", reason, is_read)
    return None


def predict(model: Model) -> None:
    """Run typical predictions. Raise BrokenArtifact if one fails or a score is not finite."""
    manifest, row = model.manifest, model.middle_row
    try:
        draws = model.runtime.draw_set(0, manifest.noise.default_draws)
        prediction = model.prediction(*model.runtime.run_set(row, draws))
        explain(model, prediction, row)
        if model.runtime.has_joint:
            model.runtime.joint.run(row, model.runtime.joint.draw(0, 0, 2)[:, None])
        theta = model.runtime.draw(0, 0, 1)
        if manifest.input.takes_ids:
            model.predict(np.full_like(row, manifest.input.maximum), theta)
        if model.text_encoder is not None:
            model.predict(model.text_encoder.row("a text")[None], theta)
        rows = ENCODED_ROWS if model.encoder else model.runtime.chunk_rows
        model.predict(row.repeat(rows, axis=0), theta)
    except Exception as error:
        reason = f"it does not predict a row: {type(error).__name__}: {one_line(error)}"
        raise manifest.broken("network.onnx", reason) from error
    for score, values in prediction.scores.by_name().items():
        if not np.isfinite(values).all():
            row_name = "a row in the middle of the data's range"
            reason = f"{score} of {row_name}: expected a finite number, got {values[0]}"
            raise manifest.broken("network.onnx", reason)


if __name__ == "__main__":
    sys.exit(main())
