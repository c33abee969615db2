"""`python -m service key`: a new key, and its entry for the file of keys."""

import argparse
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from model_store.artifacts.manifest import NAME_PATTERN
from model_store.artifacts.storage import is_name
from model_store.errors import InvalidInput
from service.auth.keys import SCOPES

KEY_PREFIX = "dubito_"  # by which scanners for secrets may know a key
KEY_BYTES = 32


def print_key(arguments: list[str]) -> None:
    """Print a new key on standard error, and its entry, to be added to the file, on standard
    output.

    Raises:
        InvalidInput: naming the argument.
    """
    parser = argparse.ArgumentParser(
        prog="python -m service key", description="Make a key for DUBITO_KEYS_FILE."
    )
    parser.add_argument("name", metavar="NAME", help="what the log calls the key")
    parser.add_argument(
        "--scopes", required=True, help=f"what it may do: some of {','.join(SCOPES)}"
    )
    parser.add_argument(
        "--expires",
        metavar="SPAN",
        help="how long it is valid, such as 90d or 12h; else without end",
    )
    options = parser.parse_args(arguments)
    key, entry = new_key(options.name, options.scopes, options.expires)
    print(
        f"The key, which is shown this once and kept nowhere:\n\n    {key}\n\nIts entry:\n",
        file=sys.stderr,
        flush=True,
    )
    print(entry)


def new_key(name: str, scopes: str, expires: str | None) -> tuple[str, str]:
    """Return a new key, and its entry, which has the key's SHA-256.

    `scopes` have commas between; `expires` is a span from now, in days or hours: `90d`, `12h`.

    Raises:
        InvalidInput: naming the argument.
    """
    if not is_name(name):
        raise InvalidInput("NAME", f"a name matching {NAME_PATTERN}", repr(name[:80]))
    wanted = scopes.split(",")
    if not set(wanted) <= set(SCOPES):
        raise InvalidInput("--scopes", f"some of {','.join(SCOPES)}", repr(scopes[:80]))
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    quoted = ", ".join(f'"{scope}"' for scope in wanted)
    lines = [
        f'name = "{name}"',
        f'sha256 = "{sha256(key.encode()).hexdigest()}"',
        f"scopes = [{quoted}]",
    ]
    if expires is not None:
        lines.append(f"expires = {datetime.now(UTC) + _span(expires):%Y-%m-%dT%H:%M:%SZ}")
    return key, "\n".join(["[[keys]]", *lines, ""])


def _span(text: str) -> timedelta:
    match = re.fullmatch(r"([1-9][0-9]{0,4})([dh])", text)
    if match is None:
        raise InvalidInput("--expires", "days or hours, such as 90d or 12h", repr(text[:80]))
    return timedelta(days=int(match[1])) if match[2] == "d" else timedelta(hours=int(match[1]))
