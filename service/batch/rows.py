"""The rows of a shard as numbers, and those that cannot be read, each with the reason."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from model_store.errors import DubitoError
from model_store.inference.model import Model
from model_store.sources.parquet import ParquetFile, byte_range
from service.api.requests import rows_array
from service.batch.files import Copy, Files, Listed
from service.batch.job import Shard
from service.call import Call

MOST_PIXELS = 1 << 62  # of a part's images: each has its own bound


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows as the model takes them, their places in the data set, and their ids: where there are
    none, the places."""

    places: Int64[np.ndarray, "n"]
    ids: list[str]
    x: Float32[np.ndarray, "n I"]

    def take(self, chosen: np.ndarray) -> "Rows":
        """Return some of them."""
        return Rows(
            self.places[chosen],
            [self.ids[i] for i in np.arange(len(self.ids))[chosen]],
            self.x[chosen],
        )


@dataclass(eq=False)
class Rejects:
    """Rows that could not be read or computed."""

    lines: list[bytes] = field(default_factory=list)

    def add(self, place: int, name: str | None, reason: str) -> None:
        """Take in a row."""
        self.lines.append(
            json.dumps({"row": place, "id": name, "reason": reason[:500]}).encode() + b"\n"
        )


class Reader:
    """Reads shards; a file stays open until another is read."""

    def __init__(self, source: Files, files: tuple[Listed, ...], model: Model) -> None:
        self._source, self._files, self._model = source, files, model
        self._call = Call()  # bounded by parts
        self._open: tuple[int, Copy, ParquetFile] | None = None

    def rows(
        self, shard: Shard, rejects: Rejects, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[Rows]:
        """Yield the rows of a shard, in parts; those alone whose ids are wanted.

        Raises:
            InvalidInput: if the file is not whole, or not as it was.
        """
        pool = self._pool(shard)
        for first, batch in pool.batches(shard.first, shard.rows):
            for rows in self._read(pool, batch, first, shard.place - shard.first, rejects):
                kept = (
                    rows
                    if wanted is None
                    else rows.take(np.array([wanted(name) for name in rows.ids], dtype=bool))
                )
                if len(kept.ids):
                    yield kept

    def close(self) -> None:
        """Let go of the file that is open."""
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def _pool(self, shard: Shard) -> ParquetFile:
        """Return the shard's file, with what is needed of it at hand."""
        listed = self._files[shard.file]
        if self._open is None or self._open[0] != shard.file:
            self.close()
            copy = self._source.open(listed)
            self._open = (
                shard.file,
                copy,
                ParquetFile(
                    copy.path,
                    self._model.manifest.input,
                    f"source: {listed.name}",
                    listed.of_folders,
                ),
            )
        _, copy, pool = self._open
        ends = np.cumsum(pool.groups)
        within = range(
            int(np.searchsorted(ends, shard.first, side="right")),
            int(np.searchsorted(ends, shard.first + shard.rows)) + 1,
        )
        copy.need(*byte_range(copy.path, within))
        return pool

    def _read(
        self, pool: ParquetFile, batch: Any, first: int, offset: int, rejects: Rejects
    ) -> Iterator[Rows]:
        """Yield a batch's rows; one that cannot be read is halved, until the rows are found that
        cannot be.

        Args:
            first: place of its first row in the file.
            offset: of the file's first row in the data set.
        """
        n, spec = batch.num_rows, self._model.manifest.input
        named: list[str] | None = None
        try:
            if pool.has_ids:
                named = pool.ids_of(batch, first)
            part = pool.part(batch, first)
            encoder = self._model.text_encoder
            x = rows_array(part, spec, pool.field, MOST_PIXELS, self._call, encoder, first)
        except DubitoError as error:
            if n == 1:
                rejects.add(first + offset, named[0] if named else None, str(error))
                return
            for begin, size in ((0, n // 2), (n // 2, n - n // 2)):
                yield from self._read(
                    pool, batch.slice(begin, size), first + begin, offset, rejects
                )
        else:
            places = np.arange(first + offset, first + offset + n)
            yield Rows(places, [str(i) for i in places.tolist()] if named is None else named, x)
