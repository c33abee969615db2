"""Load and run versions within bounds of memory: `python -m model_store.inference.preflight`.

`model_store.inference.preflight_process` starts it. It reads a line of JSON for each version, and
answers each with a line. A version is opened, verified and loaded as the service does it, and
predicts. After one that failed the process ends: what it has in memory is not to be trusted.
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

ENCODED_ROWS = 4  # that are run together, where each may take long
COPIES = 6  # of the files that are needed, while they become sessions


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
    """Return why a version cannot be served, None if it can, in `working_bytes` besides its files.

    A failure is the `file` and the `reason`; `is_read` says whether the files are at least those of
    the manifest.
    """
    is_read = False
    try:
        files = ModelStore(Path(store)).manifest(name, version).files
        copies = {**dict.fromkeys((*NEEDED, ENCODER), COPIES), TOKENIZER: TOKENIZER_COPIES}
        made = sum(times * files[file].size for file, times in copies.items() if file in files)
        limit_memory(working_bytes + made)
        artifact = ModelStore(Path(store)).open(name, version, files=NEEDED)
        is_read = True
        predict(Model.load(artifact, threads=1))
    except (StoreError, MemoryError) as error:
        file, reason = "", one_line(error)
        if isinstance(error, BrokenArtifact):
            file, reason = error.file, error.reason
        if is_out_of_memory(error):
            reason = (
                f"expected to be loaded and to predict in {working_bytes} bytes besides its files, "
                "got more"
            )
        return {"file": file or "network.onnx", "reason": reason, "is_read": is_read}
    return None


def predict(model: Model) -> None:
    """Predict the row in the middle of the data's range, of the default number of draws, then a
    full run's rows.

    Of ids also the largest, which no part of the network may lack, and a text of a model of text.

    Raises:
        BrokenArtifact: if they cannot be predicted, or the row's scores are not numbers.
    """
    manifest, row = model.manifest, model.middle_row
    try:
        draws = model.runtime.draw_set(0, manifest.noise.default_draws)
        prediction = model.prediction(*model.runtime.run_set(row, draws))
        explain(model, prediction, row)
        one = model.runtime.draw(0, 0, 1)
        if manifest.input.takes_ids:
            model.predict(np.full_like(row, manifest.input.maximum), one)
        if model.text_encoder is not None:
            model.predict(model.text_encoder.row("a text")[None], one)
        model.predict(
            row.repeat(ENCODED_ROWS if model.encoder else model.runtime.chunk_rows, axis=0), one
        )
    except Exception as error:
        reason = f"it does not predict a row: {type(error).__name__}: {one_line(error)}"
        raise manifest.broken("network.onnx", reason) from error
    for score, values in prediction.scores.by_name().items():
        if not np.isfinite(values).all():
            reason = (
                f"{score} of a row in the middle of the data's range: expected a number, "
                f"got {values[0]}"
            )
            raise manifest.broken("network.onnx", reason)


if __name__ == "__main__":
    sys.exit(main())
