"""Read input files and write results for the command line."""

import contextlib
import csv
import io
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dubito.errors import DubitoError
from dubito.predictions import GLOBAL_FIELDS, Predictions
from dubito.rows import MEDIA_TYPES, RowsLike

STDIN = [Path("-")]
JSON_LINES = (".jsonl", ".ndjson")
OUT = (".csv", ".npz", ".parquet")


@contextlib.contextmanager
def open_files(files: list[Path]) -> Iterator[list[Path]]:
    """Open the input files. `-` saves standard input to a temporary file and guesses its type."""
    if files != STDIN:
        yield files
        return
    content = sys.stdin.buffer.read()
    if not content:
        raise DubitoError("standard input is empty")
    with TemporaryDirectory(prefix="dubito-") as folder:
        path = Path(folder) / f"stdin{_guess_suffix(content)}"
        path.write_bytes(content)
        yield [path]


def _guess_suffix(content: bytes) -> str:
    if content.startswith(b"\x93NUMPY"):
        return ".npy"
    if content.startswith(b"PAR1"):
        return ".parquet"
    if content.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return ".npz" if all(n.endswith(".npy") for n in archive.namelist()) else ".zip"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return ""  # such as an image
    if text.lstrip()[:1] not in ("[", "{"):
        return ".csv"
    try:
        json.loads(text)
    except ValueError:
        return ".jsonl"
    return ".json"


def is_pool(files: Sequence[Path]) -> bool:
    return len(files) == 1 and files[0].suffix.lower() in MEDIA_TYPES


def rows_in(files: Sequence[Path]) -> RowsLike:
    path = files[0]
    if len(files) > 1 or not is_named(path, ".npy", ".json", *JSON_LINES):
        return files
    if is_named(path, ".npy"):
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):
            raise DubitoError(f"{path}: invalid npy file, or not numeric") from None
    try:
        text = path.read_text(encoding="utf-8-sig")
        if is_named(path, ".json"):
            rows = json.loads(text)
            return rows if isinstance(rows, list) else [rows]
    except ValueError as error:
        raise DubitoError(f"{path}: invalid JSON: {error}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise DubitoError(f"{path}: invalid JSON in line {number}: {error}") from None
    return rows


def is_named(path: Path, *endings: str) -> bool:
    return path.suffix.lower() in endings


def check_out(out: Path | None) -> None:
    if out is not None and out.suffix not in OUT:
        expected = f"a name that ends in {', '.join(OUT)}"
        raise DubitoError(f"--out: expected {expected}, got {out.name}")
    if out is not None and not out.absolute().parent.is_dir():
        raise DubitoError(f"--out: expected a file in an existing folder, got {out}")


def write(answer: Predictions, path: Path) -> None:
    if path.suffix == ".npz":
        np.savez(path, allow_pickle=False, **answer.arrays)
        return
    columns = answer.table()
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        names = [name for name in GLOBAL_FIELDS if name in answer]
        metadata = {f"dubito.{name}": json.dumps(answer[name].tolist()) for name in names}
        table = pyarrow.table(columns).replace_schema_metadata(metadata)
        pyarrow.parquet.write_table(table, path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        lists = (list(map(escape_formula, array.tolist())) for array in columns.values())
        writer.writerows(zip(*lists, strict=True))


def escape_formula(cell: object) -> object:
    """Prefix text with an apostrophe if a spreadsheet would interpret it as a formula."""
    return f"'{cell}" if isinstance(cell, str) and _is_formula(cell) else cell


def unescape_formula(text: str) -> str:
    return text[1:] if text[:1] == "'" and _is_formula(text[1:]) else text


def _is_formula(text: str) -> bool:
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return False
    try:
        float(text)
        return False
    except ValueError:
        return True
