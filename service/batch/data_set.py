"""Split a data set of Parquet files into shards and read their rows.

The output folder stores the plan, that is the request and the files, as `job.json`. A repeated
command must have the same plan.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Int64
from pydantic import TypeAdapter, ValidationError

from model_store.artifacts.manifest import InputSpec
from model_store.errors import DubitoError, InvalidInput
from model_store.sources.parquet import ParquetFile
from service.batch.computation import Computation, ComputationRequest, Inputs, Kind
from service.batch.files import DataFile, Files

PLAN = "job.json"
REJECTS = "rejects"
MAX_SHARD_ROWS = 1 << 15
MAX_SHARD_NUMBERS = 1 << 26  # in its rows
MAX_SHARD_OUTPUTS = 1 << 22  # in its predictions
SOURCE, OUT = "source", "out"  # the options that errors name


@dataclass(frozen=True, kw_only=True)
class DataSetRequest(ComputationRequest):
    """A request from `dubito score` or `dubito rank`."""

    kind: Kind
    manifest: str  # its digest
    shard_rows: int


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of a file."""

    number: int
    file: int
    first: int  # in the file
    rows: int
    place: int  # index of the first row in the data set


@dataclass(frozen=True)
class Plan:
    request: DataSetRequest
    files: tuple[DataFile, ...]
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def part(self, number: int) -> str:
        return f"part-{number:05d}-of-{len(self.shards):05d}.parquet"

    def rejects(self, number: int) -> str:
        return f"{REJECTS}/part-{number:05d}-of-{len(self.shards):05d}.jsonl"


PLANS = TypeAdapter(Plan)


def begin(
    out: Files, source: Files, request: DataSetRequest, is_seeded: bool, spec: InputSpec
) -> Plan:
    """Read an output's plan, or write a new one.

    Raise InvalidInput if the output belongs to another job. Unless `is_seeded`, a repeated command
    uses the seed of the plan.
    """
    expected = "an empty folder or bucket, or the output of this job"
    data_files = source.data()
    content = out.read(PLAN)
    if content is None:
        if out.names():
            raise InvalidInput(OUT, expected, f"files without {PLAN}")
        if not data_files:
            raise InvalidInput(SOURCE, "a data set of .parquet files", "none")
        plan = create_plan(source, data_files, request, spec)
        if out.create(PLAN, PLANS.dump_json(plan) + b"\n"):
            return plan
        content = out.read(PLAN) or b""
    try:
        plan = PLANS.validate_json(content)
    except ValidationError:
        raise InvalidInput(OUT, expected, f"an invalid {PLAN}") from None
    request = request if is_seeded else replace(request, seed=plan.request.seed)
    difference = _find_difference(plan, replace(plan, request=request, files=tuple(data_files)))
    if difference is not None:
        raise InvalidInput(OUT, expected, f"the output of another job: {difference}")
    return plan


def create_plan(
    source: Files, data_files: list[DataFile], request: DataSetRequest, spec: InputSpec
) -> Plan:
    """Split a data set into shards. All its files must have the same columns."""
    shards, place = list[Shard](), 0
    first: ParquetFile | None = None
    for number, file in enumerate(data_files):
        table = _open_table(source, file, spec)
        first = first or table
        if (table.columns, table.has_ids) != (first.columns, first.has_ids):
            same = f"the columns that {data_files[0].name} has"
            expected = f"{same}, in its order, with ids or without"
            raise InvalidInput(table.field, expected, "others")
        parts = -(-table.rows // request.shard_rows)
        ends = [table.rows * i // parts for i in range(parts + 1)] if parts else []
        for first_row, end in pairwise(ends):
            shards.append(Shard(len(shards), number, first_row, end - first_row, place))
            place += end - first_row
    if not shards:
        raise InvalidInput(SOURCE, "at least one row", "none")
    return Plan(request, tuple(data_files), tuple(shards))


def _open_table(source: Files, file: DataFile, spec: InputSpec) -> ParquetFile:
    return ParquetFile(source.open(file), spec, f"{SOURCE}: {file.name}")


def default_shard_rows(row_size: int, outputs: int) -> int:
    return max(1, min(MAX_SHARD_ROWS, MAX_SHARD_NUMBERS // row_size, MAX_SHARD_OUTPUTS // outputs))


def _find_difference(old: Plan, new: Plan) -> str | None:
    before, after = _request_fields(old.request), _request_fields(new.request)
    for name, value in before.items():
        if value != after[name]:
            values = f"{value!r} instead of {after[name]!r}"
            return f"{name} differs" if name == "manifest" else f"{name} {values}"[:200]
    old_names, new_names = ({file.name for file in plan.files} for plan in (old, new))
    for name in sorted(file.name for file in {*old.files} ^ {*new.files}):
        change = "has changed" if name in new_names else "is missing"
        return f"{name[:100]} {change if name in old_names else 'is new'}"
    return None


def _request_fields(request: DataSetRequest) -> dict[str, Any]:
    fields = asdict(request)
    return fields | fields.pop("options")


@dataclass(frozen=True, eq=False)
class Rows:
    """Numeric rows, with their ids and their indices in the data set."""

    places: Int64[np.ndarray, "n"]
    ids: list[str]
    x: Inputs

    def take(self, rows: np.ndarray | slice) -> "Rows":
        ids = [self.ids[i] for i in np.arange(len(self.ids))[rows]]
        return Rows(self.places[rows], ids, self.x[rows])

    def parts(self, size: int) -> Iterator["Rows"]:
        for start in range(0, len(self.ids), size):
            yield self.take(slice(start, start + size))


def reject_line(place: int, name: str | None, reason: str) -> bytes:
    return json.dumps({"row": place, "id": name, "reason": reason[:500]}).encode() + b"\n"


def read_shard(
    source: Files, plan: Plan, shard: Shard, computation: Computation, rejects: list[bytes]
) -> Iterator[Rows]:
    """Yield the rows of a shard in parts. Append a line to `rejects` for each unreadable row."""
    table = _open_table(source, plan.files[shard.file], computation.manifest.input)
    offset = shard.place - shard.first  # index of the file's first row in the data set

    def read(batch: Any, first: int) -> Iterator[Rows]:
        """Read the rows of a batch, bisecting it to isolate unreadable rows."""
        n, ids = batch.num_rows, list[str]()
        try:
            if table.has_ids:
                ids = table.convert_ids_column(batch, first)
            x = computation.numbers(table.part(batch, first), table.spec, table.field, first)
        except DubitoError as error:
            if n == 1:
                rejects.append(reject_line(first + offset, ids[0] if ids else None, str(error)))
                return
            for start, size in ((0, n // 2), (n // 2, n - n // 2)):
                yield from read(batch.slice(start, size), first + start)
        else:
            places = np.arange(first + offset, first + offset + n)
            yield Rows(places, ids or [str(i) for i in places.tolist()], x)

    for first, batch in table.batches(shard.first, shard.rows):
        yield from read(batch, first)
