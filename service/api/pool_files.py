"""Files of rows that requests name, in the operator's folder of pools."""

from collections.abc import Sequence
from pathlib import Path

from model_store.errors import InvalidInput


def path_in(folder: Path | None, name: str, field: str) -> Path:
    """Return the file of a name under the operator's folder.

    Raises:
        InvalidInput: if there is no such folder or file, or the name, or a link, leads out of it.
    """
    if folder is None:
        expected = "none, since the service has no folder of pools (DUBITO_POOLS)"
        raise InvalidInput(field, expected, "a name")
    if "\0" in name or not name:
        raise InvalidInput(field, "the name of a file", "none")
    root = folder.resolve()
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError):
        raise InvalidInput(field, "the name of a file", "another") from None
    expected = "the name of a file in the folder of pools"
    if Path(name).is_absolute() or not path.is_relative_to(root) or path == root:
        raise InvalidInput(field, expected, "a path that leads out of it")
    if not path.is_file():
        raise InvalidInput(field, expected, "one that is not there")
    return path


def with_id(error: InvalidInput, ids: Sequence[str] | None) -> InvalidInput:
    """Return an error of a row, with the row's id where it has one."""
    place = next((part for part in error.field.split(".")[1:2] if part.isdigit()), None)
    if place is None or ids is None:
        return error
    return InvalidInput(error.field, error.expected, f"{error.got} (id {ids[int(place)][:200]!r})")
