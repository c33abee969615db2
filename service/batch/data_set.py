"""A data set of Parquet files, divided in shards, and the rows of each.

The plan, the request and the list of files, is written to the output as `job.json` before anything
else and never changes. So a later start does the same, or says what differs.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from model_store.artifacts.manifest import InputSpec
from model_store.errors import DubitoError, InvalidInput
from model_store.sources.parquet import ParquetFile, byte_range
from service.batch.computation import Computation, ComputationRequest, Kind
from service.batch.files import Copy, Files, Listed

FORMAT = 1
PLAN = "job.json"
# In the order of the file
REQUEST_KEYS = (
    *("kind", "model", "version", "manifest", "num_samples", "seed", "shard_rows", "priors"),
    *("options", "acquisition", "k", "beta", "exclude"),
)
REJECTS = "rejects"
MOST_ROWS = 1 << 15  # of a shard
MOST_NUMBERS = 1 << 26  # of a shard's rows
MOST_OUTPUTS = 1 << 22  # of a shard's predictions
SOURCE, OUT = "source", "out"  # the options that errors name


@dataclass(frozen=True, kw_only=True)
class DataSetRequest(ComputationRequest):
    """What answers depend on besides the data."""

    kind: Kind
    manifest: str  # SHA-256 of the version's manifest
    shard_rows: int
    exclude: str = ""  # SHA-256 of the ids that are left out; "": none

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        return {name: content[name] for name in REQUEST_KEYS}


@dataclass(frozen=True)
class Shard:
    """A run of rows of one file."""

    number: int
    file: int
    first: int  # in the file
    rows: int
    place: int  # of the first row in the whole data set


@dataclass(frozen=True)
class Plan:
    request: DataSetRequest
    files: tuple[Listed, ...]
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def part(self, number: int) -> str:
        return f"part-{number:05d}-of-{len(self.shards):05d}.parquet"

    def rejects(self, number: int) -> str:
        return f"{REJECTS}/part-{number:05d}-of-{len(self.shards):05d}.jsonl"

    def to_bytes(self) -> bytes:
        content = {
            "format": FORMAT,
            "asked": self.request.to_json(),
            "files": [[file.name, file.size, file.stamp] for file in self.files],
            "shards": [[shard.file, shard.first, shard.rows] for shard in self.shards],
        }
        return json.dumps(content).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> "Plan":
        """Return what `to_bytes` made.

        Raises:
            InvalidInput: if it is something else.
        """
        try:
            read = json.loads(content)
            if read["format"] != FORMAT:
                got = f"one of format {read['format']!r}"[:80]
                raise InvalidInput(OUT, f"an output of format {FORMAT}", got)
            files = tuple(Listed(*file) for file in read["files"])
            request = DataSetRequest.from_json(read["asked"])
            return cls(request, files, tuple(_with_places(read["shards"])))
        except (ValueError, KeyError, TypeError):
            raise InvalidInput(OUT, f"an output whose {PLAN} is one", "something else") from None


def begin(
    out: Files,
    source: Files,
    request: DataSetRequest,
    is_seeded: bool,
    spec: InputSpec,
    check_rows: Callable[[int], object],
) -> Plan:
    """Return the plan that lies, or from now on lies, in an output.

    Args:
        is_seeded: whether the seed was given; otherwise that of an earlier start counts.
        check_rows: raises InvalidInput if the request cannot be of that many rows.

    Raises:
        InvalidInput: if there is an output of something else, or the data set is none that the
            model takes.
    """
    expected = "an empty place, or the output of this job"
    listed = source.data()
    content = out.read(PLAN)
    if content is None:
        if out.names():
            raise InvalidInput(OUT, expected, f"one that has no {PLAN}")
        if not listed:
            raise InvalidInput(SOURCE, "a data set of .parquet files", "none")
        plan = divide(source, listed, request, spec)
        check_rows(plan.rows)
        if out.create(PLAN, plan.to_bytes()):
            return plan
        content = out.read(PLAN) or b""
    plan = Plan.from_bytes(content)
    wanted = request if is_seeded else replace(request, seed=plan.request.seed)
    for difference in (
        *_differences(plan.request.to_json(), wanted.to_json()),
        *_file_changes(plan.files, tuple(listed)),
    ):
        raise InvalidInput(OUT, expected, f"one of another: {difference}")
    return plan


def divide(source: Files, listed: list[Listed], request: DataSetRequest, spec: InputSpec) -> Plan:
    """Divide a data set in shards, by the footers of its files.

    Raises:
        InvalidInput: naming the file that is none, or has not the columns of the first one.
    """
    shards: list[list[int]] = []
    first: ParquetFile | None = None
    for number, file in enumerate(listed):
        copy = source.open(file)
        try:
            table = ParquetFile(copy.path, spec, f"{SOURCE}: {file.name}", file.of_folders)
        finally:
            copy.close()
        first = first or table
        if (table.columns, table.has_ids) != (first.columns, first.has_ids):
            expected = f"the columns that {listed[0].name} has, in its order, with ids or without"
            raise InvalidInput(table.field, expected, "others")
        shards += [[number, *run] for run in row_runs(table.groups, request.shard_rows)]
    if not shards:
        raise InvalidInput(SOURCE, "at least one row", "none")
    return Plan(request, tuple(listed), tuple(_with_places(shards)))


def default_shard_rows(row_size: int, outputs: int) -> int:
    """Return how many rows a shard has at most, so that neither they nor their predictions take
    much memory."""
    return max(1, min(MOST_ROWS, MOST_NUMBERS // row_size, MOST_OUTPUTS // outputs))


def row_runs(groups: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield runs of at most `most` rows: several row groups, or equal parts of a larger one."""
    first = rows = 0
    for group in groups:
        if rows and rows + group > most:
            yield first, rows
            first, rows = first + rows, 0
        rows += group
        if rows > most:
            parts = -(-rows // most)
            for i in range(parts):
                start, end = rows * i // parts, rows * (i + 1) // parts
                yield first + start, end - start
            first, rows = first + rows, 0
    if rows:
        yield first, rows


def _with_places(shards: list[list[int]]) -> Iterator[Shard]:
    place = 0
    for number, (file, first, rows) in enumerate(shards):
        yield Shard(number, file, first, rows, place)
        place += rows


def _differences(there: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for name, value in there.items():
        if value == now[name]:
            continue
        if isinstance(value, dict) and isinstance(now[name], dict):
            yield from _differences(value, now[name])
        elif name in ("manifest", "exclude"):
            yield f"{name} differs"
        else:
            yield f"{name} {value!r} there, {now[name]!r} asked"[:200]


def _file_changes(there: tuple[Listed, ...], now: tuple[Listed, ...]) -> Iterator[str]:
    before, after = {file.name: file for file in there}, {file.name: file for file in now}
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            what = "is gone" if name not in after else "has changed" if name in before else "is new"
            yield f"of the source {name[:100]} {what}"


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows as the model takes them, their places in the data set, and their ids: where there are
    none, the places."""

    places: Int64[np.ndarray, "n"]
    ids: list[str]
    x: Float32[np.ndarray, "n I"]

    def take(self, chosen: np.ndarray | slice) -> "Rows":
        ids = [self.ids[i] for i in np.arange(len(self.ids))[chosen]]
        return Rows(self.places[chosen], ids, self.x[chosen])

    def parts(self, most: int) -> Iterator["Rows"]:
        for start in range(0, len(self.ids), most):
            yield self.take(slice(start, start + most))


def reject_line(place: int, name: str | None, reason: str) -> bytes:
    """Return what is written of a row that could not be read or computed."""
    return json.dumps({"row": place, "id": name, "reason": reason[:500]}).encode() + b"\n"


class Reader:
    """Reads shards; a file stays open until another is read."""

    def __init__(self, source: Files, files: tuple[Listed, ...], computation: Computation) -> None:
        self._source, self._files, self._computation = source, files, computation
        self._open: tuple[int, Copy, ParquetFile] | None = None

    def rows(
        self, shard: Shard, rejects: list[bytes], wanted: Callable[[str], bool] | None = None
    ) -> Iterator[Rows]:
        """Yield the rows of a shard, in parts; those alone whose ids are wanted.

        Raises:
            InvalidInput: if the file is not whole, or not as it was.
        """
        table = self._table(shard)
        for first, batch in table.batches(shard.first, shard.rows):
            for rows in self._read(table, batch, first, shard.place - shard.first, rejects):
                if wanted is not None:
                    rows = rows.take(np.array([wanted(name) for name in rows.ids], dtype=bool))
                if rows.ids:
                    yield rows

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def _table(self, shard: Shard) -> ParquetFile:
        """Return the shard's file, with the bytes of its row groups at hand."""
        listed = self._files[shard.file]
        if self._open is None or self._open[0] != shard.file:
            self.close()
            copy = self._source.open(listed)
            spec, field = self._computation.manifest.input, f"{SOURCE}: {listed.name}"
            table = ParquetFile(copy.path, spec, field, listed.of_folders)
            self._open = shard.file, copy, table
        _, copy, table = self._open
        ends = np.cumsum(table.groups)
        begin = int(np.searchsorted(ends, shard.first, side="right"))
        end = int(np.searchsorted(ends, shard.first + shard.rows)) + 1
        copy.need(*byte_range(copy.path, range(begin, end)))
        return table

    def _read(
        self, table: ParquetFile, batch: Any, first: int, offset: int, rejects: list[bytes]
    ) -> Iterator[Rows]:
        """Yield a batch's rows; one that cannot be read is halved, until the rows are found that
        cannot be.

        Args:
            first: place of its first row in the file.
            offset: of the file's first row in the data set.
        """
        n = batch.num_rows
        named: list[str] | None = None
        try:
            if table.has_ids:
                named = table.ids_of(batch, first)
            part = table.part(batch, first)
            x = self._computation.numbers(part, table.spec, table.field, first)
        except DubitoError as error:
            if n == 1:
                name = named[0] if named else None
                rejects.append(reject_line(first + offset, name, str(error)))
                return
            for begin, size in ((0, n // 2), (n // 2, n - n // 2)):
                half = batch.slice(begin, size)
                yield from self._read(table, half, first + begin, offset, rejects)
        else:
            places = np.arange(first + offset, first + offset + n)
            yield Rows(places, [str(i) for i in places.tolist()] if named is None else named, x)
