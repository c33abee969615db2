"""The arithmetic of a job: every row of a pool under the same draws, as a request with this seed
would have them.

What is computed of rows goes to the disk as it comes, and lasts from `sync` to `sync`: a job that
    is taken up again
goes on after the last row that lasts, and ends with the same bytes.
"""

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from model_store.errors import InvalidInput
from model_store.inference.model import Model
from model_store.inference.runtime import DrawSet
from model_store.sources.files import check_ids, open_rows, stamp_of
from model_store.sources.row_file import Part, RowFile
from service.api.requests import rows_array
from service.batch.asked import Asked
from service.batch.column_files import ColumnFiles
from service.call import Call
from service.engine.batching import part_rows

SYNC_S = 2.0  # between syncs, about
IDS_FILE = "ids.json"
UNKNOWN_CATEGORIES = "unknown_categories"  # noted beside what was computed
MOST_PIXELS = (
    1 << 62
)  # of a part's images: each has its own bound, and they are decoded one after the other

Rows = Iterator[
    tuple[int, Float32[np.ndarray, "n I"]]
]  # the first one's place in the pool, and some


class Cancelled(Exception):
    """Nobody wants the job any more."""


class Work(ABC):
    """A job's work, in its folder."""

    def __init__(
        self, folder: Path, asked: Asked, model: Model, report: Callable[[int, int], bool]
    ) -> None:
        """Prepare.

        Args:
            report: told how many rows x draws there are to do and how many are done; says whether
                to go on.
        """
        self.folder = folder
        self.asked = asked
        self.model = model
        self._report = report
        self._synced = time.monotonic()
        self._work = asked.rows * asked.num_samples
        self._done = 0
        self._call = Call()  # a job is bounded by its parts
        self.pool = self._opened()

    def told(self, error: InvalidInput) -> str:
        """Return what is wrong with a row, with the row's id where it has one."""
        place = error.field.removeprefix(f"{self.asked.field}.").partition(".")[0]
        if not place.isdigit() or not self.has_ids:
            return str(error)
        return f"{error} (id {self._ids()[int(place)][:200]!r})"

    @property
    def has_ids(self) -> bool:
        """Whether rows have names other than their places."""
        return (self.folder / IDS_FILE).exists() or self.pool.has_ids

    @abstractmethod
    def run(self) -> Path:
        """Do all that is left to do, and return the file that holds the answer.

        Raises:
            InvalidInput: naming a row that cannot be read or computed.
            Cancelled: if it is not to go on.
        """

    def _opened(self) -> RowFile:
        asked = self.asked
        path = self.folder / asked.path  # which a whole path takes the place of
        if asked.stamp is not None and (not path.exists() or stamp_of(path) != asked.stamp):
            raise InvalidInput(
                asked.field, "the file as it was when the job was asked for", "another, or none"
            )
        return open_rows(path, self.model.manifest.input, asked.field)

    def _ids(self) -> list[str]:
        """Return a name for each row."""
        own = self.folder / IDS_FILE
        ids = json.loads(own.read_bytes()) if own.exists() else self.pool.ids()
        if ids is None:
            return [str(i) for i in range(self.asked.rows)]
        check_ids(ids, self.asked.rows)
        return list(ids)

    def _draws(self, num_samples: int) -> DrawSet:
        return self.model.runtime.draw_set(self.asked.seed, num_samples)

    def _all(self, first: int) -> Rows:
        """Yield all rows from `first` on."""
        for part in self.pool.parts(first):
            x = self._numbers(part, first)
            yield first, x
            first += len(x)

    def _some(self, rows: Int64[np.ndarray, "M"]) -> Rows:
        """Yield some rows, given their places in ascending order."""
        if len(rows) == 0:
            return
        first = int(rows[0])
        for part in self.pool.parts(first):
            n = len(next(iter(part.values()))) if isinstance(part, dict) else len(part)
            here = rows[(rows >= first) & (rows < first + n)] - first
            if len(here):
                yield first + int(here[0]), self._numbers(part, first)[here]
            first += n
            if first > rows[-1]:
                return

    def _numbers(self, part: Part, first: int) -> Float32[np.ndarray, "n I"]:
        spec, encoder = self.model.manifest.input, self.model.text_encoder
        return rows_array(part, spec, self.asked.field, MOST_PIXELS, self._call, encoder, first)

    def _in_runs(self, rows: Rows, num_samples: int) -> Rows:
        """Yield rows as many as are computed at once."""
        most = part_rows(self.model, num_samples)
        for first, x in rows:
            for start in range(0, len(x), most):
                yield first + start, x[start : start + most]

    def _advance(self, row_draws: int, columns: ColumnFiles | None = None) -> None:
        """Note what was done; now and then have it last and say so.

        Raises:
            Cancelled: if the job is not to go on.
        """
        self._done += row_draws
        if time.monotonic() - self._synced < SYNC_S:
            return
        if columns is not None:
            columns.sync()
        self._synced = time.monotonic()
        if not self._report(self._work, self._done):
            raise Cancelled

    def _written(self, name: str, write: Callable[[Path], Any]) -> Path:
        """Write the answer whole, or not at all."""
        draft = self.folder / f"{name}.draft"
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(self.folder / name)
        self._report(self._work, self._work)
        return self.folder / name
