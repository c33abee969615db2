"""From parts of pool files to rows of numbers, as requests' rows are read."""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import InputSpec
from model_store.sources.columns import from_cells
from model_store.types import Steps
from service.api.requests import rows_array
from service.pools.pool_file import Part, PoolFile
from service.server.budget import Reservation

if TYPE_CHECKING:
    from model_store.sources.text import TextEncoder


def numbers_of(
    part: Part,
    spec: InputSpec,
    field: str,
    first: int,
    max_pixels: int,
    reservation: Reservation,
    encoder: "TextEncoder | None",
) -> Steps[Float32[np.ndarray, "n I"]]:
    """Return a part's rows, the first of which is row `first` of its pool.

    Raises:
        InvalidInput: naming the row that cannot be read.
    """
    if isinstance(part, dict):
        yield
        return from_cells(part, spec.columns, field, first)
    return (yield from rows_array(part, spec, field, max_pixels, reservation, encoder, first))


def pool_array(
    pool: PoolFile, max_pixels: int, reservation: Reservation, encoder: "TextEncoder | None"
) -> Steps[Float32[np.ndarray, "N I"]]:
    """Return all rows of a pool; otherwise as `numbers_of`."""
    x = np.empty((pool.rows, pool.row_size), dtype=np.float32)
    first = 0
    for part in pool.parts():
        rows = yield from numbers_of(
            part, pool.spec, pool.field, first, max_pixels, reservation, encoder
        )
        x[first : first + len(rows)] = rows
        first += len(rows)
        yield
    return x
