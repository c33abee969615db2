"""Try the one version of the one model in a store: `python -m model_store.inference.trial STORE`.

It is opened, verified and loaded as the service does it, and predicts one row. Training runs this in a fresh process
before it publishes, so that nothing of what it has in memory can help.
"""

import sys
from pathlib import Path

import numpy as np

from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, StoreError, one_line
from model_store.inference.model import NEEDED, Model

LOADED = 0
BROKEN = 1


def main() -> int:
    """Try a version; where it cannot be served say why, in one line, and return 1."""
    store = ModelStore(Path(sys.argv[1]))
    (name,) = store.names()
    try:
        predict_once(Model.load(store.open(name, store.resolve(name), wanted=NEEDED), threads=1))
    except BrokenArtifact as error:
        print(f"{error.file}: {error.reason}")
        return BROKEN
    except StoreError as error:
        print(one_line(error))
        return BROKEN
    return LOADED


def predict_once(model: Model) -> None:
    """Predict the row in the middle of the data's range, of the default number of draws.

    Raises:
        BrokenArtifact: if it cannot be predicted, or its scores are not numbers.
    """
    manifest = model.manifest
    middle = manifest.input.minimum / 2 + manifest.input.maximum / 2
    row = np.full((1, model.row_size), middle, dtype=np.float32)
    theta = model.runtime.draw(0, 0, manifest.noise.default_draws)
    try:
        scores = model.predict(row, theta).scores
    except Exception as error:
        reason = f"it does not predict a row: {type(error).__name__}: {one_line(error)}"
        raise BrokenArtifact(manifest.name, manifest.version, "network.onnx", reason) from None
    for score, values in scores.by_name().items():
        if not np.isfinite(values).all():
            reason = f"{score} of a row in the middle of the data's range: expected a number, got {values[0]}"
            raise BrokenArtifact(manifest.name, manifest.version, "network.onnx", reason)


if __name__ == "__main__":
    sys.exit(main())
