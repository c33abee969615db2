"""Where files of data are."""

from pathlib import Path

from model_store.errors import InvalidInput


def path_below(root: Path, rest: str, field: str = "data.source") -> Path:
    """Return the path of a file of data, which is below the data folder if it is relative.

    Raises:
        InvalidInput: if it is in the current folder instead.
    """
    path = root / rest
    if not path.exists() and Path(rest).exists():
        expected = f"a path below {str(root)!r}, which DUBITO_DATA says"
        raise InvalidInput(
            field, expected, f"{rest!r} of the current folder (DUBITO_DATA=. looks there)"
        )
    return path
