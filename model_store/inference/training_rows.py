"""The training rows stored in a version, which explanations of predictions refer to.

The optional file `training-rows.safetensors` contains a sample of the training rows and their ids.
Predictions do not depend on it.
"""

from dataclasses import dataclass

import numpy as np
import orjson
from jaxtyping import Float32, Float64, UInt8

from model_store.scores.records import SMALLEST, check_tensor

BLOCK_NUMBERS = 1 << 16  # compared at once, so that differences fit in the processor's cache


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """A sample of R encoded training rows with I numbers each."""

    x: Float32[np.ndarray, "R I"] | UInt8[np.ndarray, "R I"]
    scale: Float32[np.ndarray, "I"]  # unit of each number in distances
    ids: tuple[str, ...]
    labels: Float64[np.ndarray, "R"]  # class numbers or targets

    def __len__(self) -> int:
        return len(self.x)

    def nearest(
        self, row: Float32[np.ndarray, "I"], count: int
    ) -> tuple[list[str], Float64[np.ndarray, "k"]]:
        """Return the ids and root-mean-square distances of the `count` nearest training rows."""
        squares = np.empty(len(self.x), dtype=np.float64)
        step = max(1, BLOCK_NUMBERS // len(row))
        for first in range(0, len(squares), step):
            block = slice(first, first + step)
            differences = (self.x[block].astype(np.float64) - row) / self.scale
            squares[block] = np.einsum("ri,ri->r", differences, differences)
        order = np.argsort(squares, kind="stable")[:count]
        return [self.ids[i] for i in order.tolist()], np.sqrt(squares[order] / len(row))

    def tensors(self) -> dict[str, np.ndarray]:
        ids = np.frombuffer(orjson.dumps(self.ids), dtype=np.uint8)
        return {"x": self.x, "scale": self.scale, "ids": ids, "labels": self.labels}

    @classmethod
    def from_tensors(cls, tensors: dict[str, np.ndarray], row_size: int) -> "TrainingRows":
        """Create training rows from a file's tensors. Raise ValueError if they are invalid."""
        pixels = "x" in tensors and tensors["x"].dtype == np.uint8
        x = check_tensor(tensors, "x", np.uint8 if pixels else np.float32, (0, row_size))
        scale = check_tensor(tensors, "scale", np.float32, (row_size,), low=SMALLEST)
        labels = check_tensor(tensors, "labels", np.float64, (len(x),))
        content = check_tensor(tensors, "ids", np.uint8, (0,)).tobytes()
        try:
            ids = orjson.loads(content)
        except ValueError:
            raise ValueError("ids: expected JSON in UTF-8") from None
        is_list = isinstance(ids, list) and all(isinstance(name, str) for name in ids)
        if not is_list or len(ids) != len(x):
            raise ValueError("ids: expected a string for each row of x")
        return cls(x, scale, tuple(ids), labels)
