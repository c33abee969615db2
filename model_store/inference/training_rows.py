"""The training rows stored in a version, which explanations of predictions refer to.

The optional file `training-rows.safetensors` contains a sample of the training rows and their ids.
Predictions do not depend on it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, UInt8

from model_store.scores.records import SMALLEST, check_tensor

BLOCK_NUMBERS = 1 << 16  # compared at once, so that differences fit in the processor's cache
MAX_ID_BYTES = 1 << 20  # total


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """A sample of R encoded training rows with I numbers each."""

    x: Float32[np.ndarray, "R I"] | UInt8[np.ndarray, "R I"]
    scale: Float32[np.ndarray, "I"]  # unit of each number in distances
    ids: tuple[str, ...]
    labels: Float64[np.ndarray, "R"] | None = None  # class numbers or targets

    def __len__(self) -> int:
        return len(self.x)

    def nearest(
        self, row: Float32[np.ndarray, "I"], count: int
    ) -> tuple[list[str], Float64[np.ndarray, "k"]]:
        """Return the ids and distances of the `count` nearest training rows.

        A distance is the root mean square of the scaled differences.
        """
        squares = np.empty(len(self.x), dtype=np.float64)
        step = max(1, BLOCK_NUMBERS // len(row))
        for first in range(0, len(squares), step):
            block = slice(first, first + step)
            differences = (self.x[block].astype(np.float64) - row) / self.scale
            squares[block] = np.einsum("ri,ri->r", differences, differences)
        order = np.argsort(squares, kind="stable")[:count]
        return [self.ids[i] for i in order.tolist()], np.sqrt(squares[order] / len(row))

    def tensors(self) -> dict[str, np.ndarray]:
        ids = [name.encode() for name in self.ids]
        labels = {} if self.labels is None else {"labels": self.labels}
        return {
            **labels,
            "x": self.x,
            "scale": self.scale,
            "ids": np.frombuffer(b"".join(ids), dtype=np.uint8),
            "id_ends": np.cumsum([len(name) for name in ids], dtype=np.int64),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, np.ndarray], row_size: int) -> "TrainingRows":
        """Create training rows from the tensors in a file.

        Raises:
            ValueError: if the tensors are invalid.
        """
        pixels = "x" in tensors and tensors["x"].dtype == np.uint8
        x = check_tensor(tensors, "x", np.uint8 if pixels else np.float32, (0, row_size))
        scale = check_tensor(tensors, "scale", np.float32, (row_size,), low=SMALLEST)
        ends = check_tensor(tensors, "id_ends", np.int64, (len(x),), low=0, is_sorted=True)
        labels = None
        if "labels" in tensors:
            labels = check_tensor(tensors, "labels", np.float64, (len(x),))
        ids = tensors.get("ids")
        if ids is None or ids.dtype != np.uint8 or ids.shape != (ends[-1],):
            raise ValueError("ids: expected as many bytes as the last number of id_ends")
        if len(ids) > MAX_ID_BYTES:
            raise ValueError(f"ids: expected up to {MAX_ID_BYTES} bytes")
        text, starts = ids.tobytes(), [0, *ends[:-1].tolist()]
        try:
            names = [text[a:b].decode() for a, b in zip(starts, ends.tolist(), strict=True)]
        except UnicodeDecodeError:
            raise ValueError("ids: expected UTF-8") from None
        return cls(x, scale, tuple(names), labels)
