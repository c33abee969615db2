"""CSV files as tables of text: encoding, delimiter and decimals, recognised or as a recipe says."""

import csv
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_store.errors import InvalidInput
from model_store.sources.delimiters import delimiter_of
from model_store.sources.missing import MISSING
from model_store.sources.numbers import COMMA_NUMBER
from training import log

if TYPE_CHECKING:
    from training.recipe import DataSection

SAMPLE_BYTES = 1 << 16
MOST_LINES = (
    20  # of a file's last cell: more are the rest of a file after a quote that nobody closed
)
BOMS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
POINT_NUMBER = re.compile(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?", re.ASCII)


def read_text_table(path: Path, section: "DataSection") -> Any:
    """Read a CSV file with a header as an Arrow table of text, missing values as null; say what was
    not usual.

    Raises:
        InvalidInput: if it cannot be read, or its first line does not name columns.
    """
    try:
        with path.open("rb") as file:
            sample = file.read(SAMPLE_BYTES)
    except OSError as error:
        raise _unreadable(path, error.strerror or "an error") from None
    encoding = section.encoding or _encoding(sample)
    try:
        table = _read(path, sample, encoding, section)
    except UnicodeError:
        if section.encoding is not None or encoding != "utf-8":
            raise _unreadable(path, f"bytes that are not {encoding}") from None
        encoding = "cp1252"
        try:
            table = _read(path, sample, encoding, section)
        except UnicodeError:
            encoding = "latin-1"
            table = _read(path, sample, encoding, section)
    if encoding != "utf-8" and section.encoding is None:
        log.info(
            "%s is read as %s, since it is not UTF-8 (data.encoding says otherwise)",
            path.name,
            encoding,
        )
    names = [name.strip() for name in table.column_names]
    table = table.rename_columns(names)
    for name, column in zip(names, table.columns, strict=True) if table.num_rows else ():
        if name == section.text:
            continue
        lines = str(column[-1].as_py() or "").count("\n")
        if lines > MOST_LINES:
            found = f"a cell of {lines} lines in row {table.num_rows - 1}"
            raise InvalidInput("data.source", "a CSV file with quotes that are closed", found)
    if names and section.target not in names and all(_is_number(name) for name in names):
        raise InvalidInput(
            "data.source", f"a first line of {path.name} that names the columns", "numbers alone"
        )
    return table


def decimal_of(table: Any, section: "DataSection", is_comma_free: bool) -> str:
    """Return what numbers have for a decimal point: as the recipe says, or a comma where no number
    has a point."""
    if section.decimal is not None:
        return section.decimal
    if not is_comma_free:
        return "."
    commas = 0
    for column in table.columns:
        for text in column[:10_000].unique().to_pylist():
            if text is not None and POINT_NUMBER.fullmatch(text.strip()):
                return "."
            commas += text is not None and COMMA_NUMBER.fullmatch(text.strip()) is not None
    if commas:
        log.info('numbers are read with decimal commas (data.decimal = "." says otherwise)')
    return "," if commas else "."


def has_points(table: Any) -> bool:
    """Whether some number is written with a decimal point, and nothing else."""
    texts = (
        text
        for column in table.columns
        for text in column[:10_000].unique().to_pylist()
        if text is not None
    )
    return any(POINT_NUMBER.fullmatch(text.strip()) for text in texts)


def _read(path: Path, sample: bytes, encoding: str, section: "DataSection") -> Any:
    from pyarrow import ArrowException, string
    from pyarrow import csv as arrow

    try:
        text = sample.decode(encoding, "ignore" if encoding.startswith("utf") else "strict")
    except LookupError as error:
        raise _unreadable(path, str(error)) from None
    try:
        delimiter = section.delimiter or delimiter_of(text.removeprefix("\ufeff"))
    except csv.Error as error:
        raise _unreadable(path, str(error)) from None
    parsing = arrow.ParseOptions(delimiter=delimiter, newlines_in_values=True)  # between quotes
    reading = arrow.ReadOptions(encoding="utf8" if encoding == "utf-8" else encoding)
    try:
        with arrow.open_csv(str(path), read_options=reading, parse_options=parsing) as reader:
            names = reader.schema.names
        options = arrow.ConvertOptions(
            column_types=dict.fromkeys(names, string()),
            null_values=MISSING,
            strings_can_be_null=True,
        )
        table = arrow.read_csv(
            str(path), read_options=reading, parse_options=parsing, convert_options=options
        )
    except UnicodeError:
        raise
    except (ArrowException, OSError, ValueError, LookupError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        if "UTF8" in reason:
            raise UnicodeError(reason) from None
        raise _unreadable(
            path, error.strerror if isinstance(error, OSError) and error.strerror else reason
        ) from None
    if delimiter != "," and section.delimiter is None:
        log.info("cells are separated by %r (data.delimiter says otherwise)", delimiter)
    return table


def _encoding(sample: bytes) -> str:
    """Return the encoding that a file's beginning speaks for."""
    for bom, encoding in BOMS.items():
        if sample.startswith(bom):
            return encoding
    if b"\x00" in sample[:1000]:
        return "utf-16-le" if sample[1:2] == b"\x00" else "utf-16-be"
    return "utf-8"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unreadable(path: Path, reason: str) -> InvalidInput:
    return InvalidInput("data.source", f"a readable CSV file, {str(path)!r}", reason)
