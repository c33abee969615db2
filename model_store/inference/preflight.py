"""The preflight process, which tests a version with limited memory.

`model_store.inference.preflight_process` starts `python -m model_store.inference.preflight`. For
each line of JSON, the process opens, verifies and loads a version like the service, predicts, and
writes one line. It exits after the first failure, because its memory may be corrupt.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from model_store.artifacts.manifest import ENCODER, TOKENIZER
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, StoreError, one_line
from model_store.inference.explanation import explain
from model_store.inference.model import NEEDED, TOKENIZER_COPIES, Model
from model_store.processes import (
    READY,
    become_child,
    is_out_of_memory,
    limit_memory,
)

ENCODED_ROWS = 4  # per run, since encoding may be slow
COPIES = 6  # memory to load a file, in file sizes


def main() -> int:
    send = become_child()
    send(READY)
    for line in sys.stdin:
        failure = check(**json.loads(line))
        send(failure)
        if failure is not None:
            return 1
    return 0


def check(store: str, name: str, version: str, working_bytes: int) -> dict[str, Any] | None:
    """Check whether a version can be served. If it cannot, return the fields of a `Failure`.

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
        return {"file": file or "network.onnx", "reason": reason, "is_read": is_read}
    return None


def predict(model: Model) -> None:
    """Run typical predictions and check that the scores are finite.

    Raises:
        BrokenArtifact: if a prediction fails, or scores are not finite.
    """
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
        model.predict(
            row.repeat(ENCODED_ROWS if model.encoder else model.runtime.chunk_rows, axis=0), theta
        )
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
