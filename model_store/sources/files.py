"""Open data files in npy, npz, Parquet, CSV or zip format.

Row ids come from the array `ids` of an npz file, the column `id` of a table, or the file names of a
zip archive.
"""

import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput, refuse_unreadable
from model_store.sources.csv import CsvFile
from model_store.sources.npy import NpyFile, NpzFile
from model_store.sources.row_file import (
    IDS,
    UNBOUNDED,
    Bounds,
    Part,
    RowFile,
    Source,
    convert_zip_errors,
    cut,
    open_zip,
)

FILE_BYTES = 64 << 20  # per uncompressed file in a zip archive
PART_BYTES = 32 << 20  # per part, approximately


class ZipOfFiles(RowFile):
    """A zip archive with one image or text file per row. The file names are the row ids."""

    ENDING = ".zip"
    WHOLE = "a whole zip file"

    def _open(self) -> None:
        if self.spec.image is None and self.spec.text is None:
            expected = "a zip for a model of images or text alone"
            raise self._refuse(expected, "one for another model")
        self._archive = open_zip(self.source, self.WHOLE, self.field, self.bounds)
        entries = [(_path(info), info) for info in self._archive.infolist()]
        members = [(path, info) for path, info in entries if not _is_of_system(path)]
        self._members = sorted(members, key=lambda member: member[0])
        large = next((path for path, info in members if info.file_size > FILE_BYTES), None)
        if large is not None:
            expected = f"files of at most {FILE_BYTES} bytes"
            raise self._refuse(expected, f"a larger one, {large[:200]}")
        self.has_ids = True
        self.rows = len(members)
        self.read_as = "its files, in the order of their names"

    @property
    def _holds_files(self) -> bool:
        return True

    def ids(self) -> list[str] | None:
        return [path for path, _ in self._members]

    def parts(self, first: int = 0) -> Iterator[Part]:
        sizes = [info.file_size for _, info in self._members[first:]]
        self.bounds.reserve(min(sum(sizes), PART_BYTES + max(sizes, default=0)), self.field)
        with convert_zip_errors(self.WHOLE, self.field):
            contents = (self._archive.read(info) for _, info in self._members[first:])
            yield from cut(contents, len, self.part_rows, PART_BYTES)


def _path(info: zipfile.ZipInfo) -> str:
    return info.filename if "/" in info.filename else info.filename.replace("\\", "/")


def _is_of_system(path: str) -> bool:
    parts = path.split("/")
    return (
        parts[0] == "__MACOSX"
        or parts[-1].startswith(".")
        or parts[-1] in ("", "Thumbs.db", "desktop.ini")
    )


def _parquet(source: Source, spec: InputSpec, field: str, bounds: Bounds) -> RowFile:
    from model_store.sources.parquet import ParquetFile  # imports pyarrow, 40 MB

    return ParquetFile(source, spec, field, bounds=bounds)


READERS: dict[str, Callable[[Source, InputSpec, str, Bounds], RowFile]] = {
    ".npy": NpyFile,
    ".npz": NpzFile,
    ".parquet": _parquet,
    ".csv": CsvFile,
    ".zip": ZipOfFiles,
}


def open_rows(
    source: Source,
    spec: InputSpec,
    field: str,
    ending: str | None = None,
    bounds: Bounds = UNBOUNDED,
) -> RowFile:
    """Open a data file for a model. If it has no path, `ending` is its file extension."""
    if ending is None and isinstance(source, Path):
        ending = source.suffix
    read = READERS.get((ending or "").lower())
    if read is None:
        expected = f"a file that ends in {', '.join(READERS)}"
        raise InvalidInput(field, expected, (ending or "another")[:20])
    with refuse_unreadable(field):
        rows = read(source, spec, field, bounds)
    if rows.rows == 0:
        raise InvalidInput(field, "at least one row", "none")
    return rows


def file_stamp(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def check_ids(ids: list[str], rows: int) -> None:
    if len(ids) != rows:
        raise InvalidInput(IDS, f"an id for each of the {rows} pool rows", f"{len(ids)}")
    if len({*ids}) < rows:
        ((repeated, _),) = Counter(ids).most_common(1)
        received = f"duplicates such as {repeated[:80]!r}"
        raise InvalidInput(IDS, "unique ids", received)
