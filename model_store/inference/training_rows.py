"""The training rows that a version includes to explain predictions by similar rows.

The optional file `training-rows.safetensors` contains a sample of the training rows and their ids.
Predictions do not depend on it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt8

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
        """Find up to `count` nearest training rows, and return their ids and distances.

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
        """Create training rows from the tensors of a file.

        Raises:
            ValueError: if the tensors are invalid.
        """
        expected = {"x", "scale", "ids", "id_ends"}
        if set(tensors) - {"labels"} != expected:
            raise ValueError(f"expected tensors {sorted(expected)}, got others")
        x, scale, ids, ends = (tensors[name] for name in ("x", "scale", "ids", "id_ends"))
        if (
            x.dtype not in (np.uint8, np.float32)
            or x.ndim != 2
            or x.shape[1] != row_size
            or len(x) == 0
        ):
            raise ValueError(f"x: expected rows of {row_size} float32 numbers or bytes")
        if (
            scale.dtype != np.float32
            or scale.shape != (row_size,)
            or not np.all(np.isfinite(scale) & (scale > 0))
        ):
            raise ValueError(f"scale: expected {row_size} finite float32 numbers above 0")
        if not np.isfinite(x).all():
            raise ValueError("x: expected finite numbers")
        if ids.dtype != np.uint8 or ids.ndim != 1 or len(ids) > MAX_ID_BYTES:
            raise ValueError(f"ids: expected up to {MAX_ID_BYTES} bytes")
        labels = tensors.get("labels")
        if labels is not None and not (
            labels.dtype == np.float64 and labels.shape == (len(x),) and np.isfinite(labels).all()
        ):
            raise ValueError(f"labels: expected {len(x)} finite float64 numbers")
        return cls(x, scale, _texts(ids, ends, len(x)), labels)


def _texts(
    content: UInt8[np.ndarray, "B"], ends: Int64[np.ndarray, "R"], count: int
) -> tuple[str, ...]:
    is_shaped = ends.dtype == np.int64 and ends.shape == (count,)
    if not is_shaped or np.any(np.diff(ends, prepend=0) < 0) or ends[-1] != len(content):
        raise ValueError(f"id_ends: expected {count} rising int64 numbers up to the bytes of ids")
    text = content.tobytes()
    starts = [0, *ends[:-1].tolist()]
    try:
        return tuple(
            text[start:end].decode() for start, end in zip(starts, ends.tolist(), strict=True)
        )
    except UnicodeDecodeError:
        raise ValueError("ids: expected UTF-8") from None
