"""Files of rows: npy, npz, parquet, CSV, and zips of images or texts. Read from begin to end in
parts.

What a file's rows are taken from is chosen by the model, and said: `read_as`. Ids come from the
file where it has them: an array `ids` of an npz, the column `id` of a table, the names of a zip's
files.
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from service.pools.arrays import NpyFile, NpzFile
from service.pools.csv_file import CsvFile
from service.pools.parquet import ParquetFile
from service.pools.pool_file import IDS, PoolFile, Source
from service.pools.zip_file import ZipOfFiles

KINDS: dict[str, type[PoolFile]] = {
    kind.ENDING: kind for kind in (NpyFile, NpzFile, ParquetFile, CsvFile, ZipOfFiles)
}


def open_pool(source: Source, spec: InputSpec, field: str, ending: str | None = None) -> PoolFile:
    """Open a file of rows of a model's kind; of what is in one, `ending` says what it is.

    Raises:
        InvalidInput: if it is none, is not whole, or has rows of another width; names `field`.
    """
    if isinstance(source, Path):
        ending = source.suffix
    kind = KINDS.get((ending or "").lower())
    if kind is None:
        raise InvalidInput(
            field, f"a file that ends in {', '.join(KINDS)}", (ending or "another")[:20]
        )
    try:
        pool = kind(source, spec, field)
    except OSError as error:
        raise InvalidInput(field, "a file that can be read", error.strerror or "another") from error
    if pool.rows == 0:
        raise InvalidInput(field, "at least one row", "none")
    return pool


def path_in(folder: Path | None, name: str, field: str) -> Path:
    """Return the file of a name under the operator's folder.

    Raises:
        InvalidInput: if there is no such folder or file, or the name, or a link, leads out of it.
    """
    if folder is None:
        raise InvalidInput(
            field, "none, since the service has no folder of pools (DUBITO_POOLS)", "a name"
        )
    if "\0" in name or not name:
        raise InvalidInput(field, "the name of a file", "none")
    root = folder.resolve()
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError):
        raise InvalidInput(field, "the name of a file", "another") from None
    if Path(name).is_absolute() or not path.is_relative_to(root) or path == root:
        raise InvalidInput(
            field, "the name of a file in the folder of pools", "a path that leads out of it"
        )
    if not path.is_file():
        raise InvalidInput(
            field, "the name of a file in the folder of pools", "one that is not there"
        )
    return path


def stamp_of(path: Path) -> str:
    """Return what changes when a file does: its size and time."""
    stat = path.stat()
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def with_id(error: InvalidInput, ids: Sequence[str] | None) -> InvalidInput:
    """Return an error of a row, with the row's id where it has one."""
    place = next((part for part in error.field.split(".")[1:2] if part.isdigit()), None)
    if place is None or ids is None:
        return error
    return InvalidInput(error.field, error.expected, f"{error.got} (id {ids[int(place)][:200]!r})")


def check_ids(ids: list[str], rows: int) -> None:
    """Raise InvalidInput unless there is a different name for each row."""
    if len(ids) != rows:
        raise InvalidInput(IDS, f"one for each of the {rows} pool rows", f"{len(ids)}")
    digests = np.frombuffer(
        b"".join(
            blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest() for name in ids
        ),
        dtype="V16",
    )
    _, firsts, counts = np.unique(digests, return_index=True, return_counts=True)
    if len(firsts) < rows:
        again = ids[int(firsts[np.argmax(counts)])]
        raise InvalidInput(
            IDS, "different names", f"some that are the same, {again[:80]!r} among them"
        )
