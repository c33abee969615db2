"""A job on a data set: what is asked, which files there are, and the shards that they are divided
in.

All of it is written to the output, as `job.json`, before anything else is, and never changes. So
whoever goes on with the job does the same, or says what differs.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from model_store.sources.parquet import ParquetFile
from service.batch.asked import options_of
from service.batch.files import Files, Listed
from service.engine.decision import DecisionOptions

FORMAT = 1
JOB = "job.json"
REJECTS = "rejects"
MOST_ROWS = 1 << 15  # of a shard
MOST_NUMBERS = 1 << 26  # of a shard's rows
MOST_OUTPUTS = 1 << 22  # of what is said of them
SOURCE, OUT = "source", "out"  # the options that errors name


@dataclass(frozen=True)
class Asked:
    """What answers depend on beside the data."""

    kind: Literal["score", "acquire"]
    model: str
    version: str
    manifest: str  # SHA-256 of what the version is
    num_samples: int
    seed: int
    shard_rows: int
    priors: tuple[float, ...] | None
    options: DecisionOptions | None = None  # of score
    acquisition: str = ""  # of acquire, as those below
    k: int = 0
    beta: float = 1.0
    exclude: str = ""  # SHA-256 of the ids that are left out; "": none


@dataclass(frozen=True)
class Shard:
    """A run of rows of one file."""

    number: int
    file: int
    first: int  # in the file
    rows: int
    place: int  # of the first row in the whole data set


@dataclass(frozen=True)
class Job:
    """What is to be done."""

    asked: Asked
    files: tuple[Listed, ...]
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        """How many rows the data set has."""
        return sum(shard.rows for shard in self.shards)

    def part(self, number: int) -> str:
        """Return the name of a shard's part of the output."""
        return f"part-{number:05d}-of-{len(self.shards):05d}.parquet"

    def rejects(self, number: int) -> str:
        """Return the name of the file of a shard's rejects, if it has any."""
        return f"{REJECTS}/part-{number:05d}-of-{len(self.shards):05d}.jsonl"

    def to_bytes(self) -> bytes:
        """Return it as `job.json` holds it."""
        shards = [[shard.file, shard.first, shard.rows] for shard in self.shards]
        files = [[file.name, file.size, file.stamp] for file in self.files]
        content = {"format": FORMAT, "asked": asdict(self.asked), "files": files, "shards": shards}
        return json.dumps(content).encode() + b"\n"

    @classmethod
    def of_bytes(cls, content: bytes) -> "Job":
        """Return what `to_bytes` made.

        Raises:
            InvalidInput: if it is something else.
        """
        try:
            read = json.loads(content)
            if read["format"] != FORMAT:
                raise InvalidInput(
                    OUT, f"an output of format {FORMAT}", f"one of format {read['format']!r}"[:80]
                )
            asked = {**read["asked"], "options": options_of(read["asked"]["options"])}
            asked["priors"] = None if asked["priors"] is None else tuple(asked["priors"])
            files = tuple(Listed(*file) for file in read["files"])
            return cls(Asked(**asked), files, tuple(_placed(read["shards"])))
        except (ValueError, KeyError, TypeError):
            raise InvalidInput(OUT, f"an output whose {JOB} is one", "something else") from None


def begun(
    out: Files,
    source: Files,
    asked: Asked,
    is_seeded: bool,
    spec: InputSpec,
    check_rows: Callable[[int], object],
) -> Job:
    """Return the job whose output lies, or from now on lies, in a place.

    Args:
        is_seeded: whether the seed was given; otherwise that of a job that began earlier counts.
        check_rows: raises InvalidInput if what is asked cannot be of so many rows.

    Raises:
        InvalidInput: if there is an output of something else, or the data set is none that the
            model takes.
    """
    listed = source.data()
    content = out.read(JOB)
    if content is None:
        if out.names():
            raise InvalidInput(
                OUT, "an empty place, or the output of this job", f"one that has no {JOB}"
            )
        if not listed:
            raise InvalidInput(SOURCE, "a data set of .parquet files", "none")
        planned = plan(source, listed, asked, spec)
        check_rows(planned.rows)
        if out.create(JOB, planned.to_bytes()):
            return planned
        content = out.read(JOB) or b""
    job = Job.of_bytes(content)
    wanted = asked if is_seeded else replace(asked, seed=job.asked.seed)
    differing = [
        *_differences(asdict(job.asked), asdict(wanted)),
        *_changed(job.files, tuple(listed)),
    ]
    if differing:
        raise InvalidInput(
            OUT, "an empty place, or the output of this job", f"one of another: {differing[0]}"
        )
    return job


def plan(source: Files, listed: list[Listed], asked: Asked, spec: InputSpec) -> Job:
    """Divide a data set in shards, by the footers of its files.

    Raises:
        InvalidInput: naming the file that is none, or has not the columns of the first one.
    """
    shards: list[list[int]] = []
    first: ParquetFile | None = None
    for number, file in enumerate(listed):
        copy = source.open(file)
        try:
            pool = ParquetFile(copy.path, spec, f"{SOURCE}: {file.name}", file.of_folders)
        finally:
            copy.close()
        first = first or pool
        if (pool.columns, pool.has_ids) != (first.columns, first.has_ids):
            expected = f"the columns that {listed[0].name} has, in its order, with ids or without"
            raise InvalidInput(pool.field, expected, "others")
        shards += [[number, *run] for run in _runs(pool.groups, asked.shard_rows)]
    if not shards:
        raise InvalidInput(SOURCE, "at least one row", "none")
    return Job(asked, tuple(listed), tuple(_placed(shards)))


def shard_rows_of(row_size: int, outputs: int) -> int:
    """Return how many rows a shard has at most, so that neither they nor what is said of them take
    much memory."""
    return max(1, min(MOST_ROWS, MOST_NUMBERS // row_size, MOST_OUTPUTS // outputs))


def _runs(groups: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield runs of at most so many rows: several row groups, or equal parts of a larger one."""
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


def _placed(shards: list[list[int]]) -> Iterator[Shard]:
    place = 0
    for number, (file, first, rows) in enumerate(shards):
        yield Shard(number, file, first, rows, place)
        place += rows


def _differences(there: dict[str, Any], asked: dict[str, Any]) -> Iterator[str]:
    for name, value in there.items():
        if value != asked[name]:
            if isinstance(value, dict) and isinstance(asked[name], dict):
                yield from _differences(value, asked[name])
            elif name in ("manifest", "exclude"):
                yield f"{name} differs"
            else:
                yield f"{name} {value!r} there, {asked[name]!r} asked"[:200]


def _changed(there: tuple[Listed, ...], now: tuple[Listed, ...]) -> Iterator[str]:
    before, after = {file.name: file for file in there}, {file.name: file for file in now}
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            what = (
                "is new"
                if name not in before
                else "is gone"
                if name not in after
                else "has changed"
            )
            yield f"of the source {name[:100]} {what}"
