"""The store layout that all storage backends share."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from model_store.artifacts.manifest import NAME_PATTERN
from model_store.errors import InvalidInput, NotFound

MANIFEST = "manifest.json"
ALIASES = "aliases"
LAST_DELETED = ".last-deleted"  # the highest deleted version number, next to the aliases
MAX_ALIAS_BYTES = 1 << 10
REPORTS = "reports"  # evaluation reports: `model_store.artifacts.report`
REPORT = "report.json"


Files = Mapping[str, bytes | Path]  # the content or path of each file


@dataclass
class Lease:
    """A local folder with a version's files. They exist until the lease is closed."""

    root: Path  # the store that contains the folder
    folder: Path
    lock: BinaryIO | None = None  # of a copy in the cache

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()

    __del__ = close


def reports_path(name: str, version: str) -> str:
    return f"{name}/{REPORTS}/{version}"


def version_number(text: str | None) -> int:
    """Parse a version number, for example from `LAST_DELETED`. Return 0 if there is none."""
    return int(text) if text is not None and is_version(text) else 0


def is_name(text: str) -> bool:
    return re.fullmatch(NAME_PATTERN[1:-1], text) is not None


def is_version(text: str) -> bool:
    return re.fullmatch(r"[1-9][0-9]{0,8}", text) is not None


def check_is_known_name(name: str) -> None:
    if not is_name(name):
        raise NotFound("model", f"a name matching {NAME_PATTERN}", repr(name[:80]))


def check_is_new_name(name: str) -> None:
    if not is_name(name):
        raise InvalidInput("name", f"a name matching {NAME_PATTERN}", repr(name[:80]))


def is_url(place: str) -> bool:
    return "://" in place


def resolve_location(place: str) -> str:
    return place if is_url(place) else str(Path(place).resolve())
