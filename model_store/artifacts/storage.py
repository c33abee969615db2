"""The interface of storage backends."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from model_store.artifacts.manifest import NAME_PATTERN, FileSpec, Manifest
from model_store.errors import InvalidInput, NotFound

MANIFEST = "manifest.json"
ALIASES = "aliases"
LAST_DELETED = ".last-deleted"  # the highest deleted version number, next to the aliases
MAX_ALIAS_BYTES = 1 << 10
REPORTS = "reports"  # evaluation reports: `model_store.artifacts.report`
REPORT = "report.json"


@dataclass(frozen=True)
class Original:
    """A file to be published, and a function that finds identical published files."""

    path: Path
    spec: FileSpec
    find_duplicates: Callable[[], Iterator[str]]

    def check(self, name: str, size: int, sha256: str) -> None:
        """Raise InvalidInput if the file was modified after its digest was computed."""
        if self.spec.difference(size, sha256):
            raise InvalidInput("files", f"an unchanged {name}", "one that changed meanwhile")


Files = Mapping[str, bytes | Original]


@dataclass(frozen=True)
class AliasContent:
    """The content of an alias, with its tag and version in a bucket."""

    text: str
    tag: str
    version: str | None = None


class Lease:
    """A local folder with the files of a version, available until the lease is closed."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root  # the store that contains the folder
        self.folder = folder

    def close(self) -> None: ...

    def discard(self) -> bool:
        """Delete a damaged copy. Return False if the folder is the original."""
        return False


class Storage(ABC):
    """The base class of storage backends. Paths are relative to the root and use slashes.

    Versions and reports are written completely or not at all. Readers need no lock, and several
    writers can work at the same time. A `parent` is the path of a model or of a version's reports,
    which are numbered. Every method can raise OSError (folder) or StoreUnreachable (bucket).
    """

    # Reading

    @property
    @abstractmethod
    def scratch(self) -> Path:
        """A local folder for temporary files, with enough space for a version."""

    @abstractmethod
    def locate(self, path: str) -> str:
        """Return the local path or URL of a file, for use in messages."""

    @property
    @abstractmethod
    def has_listing(self) -> bool:
        """True if a listing is available without sending a request."""

    @abstractmethod
    def refresh(self) -> None:
        """Refresh the cached listing of a bucket."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all models that have versions."""

    @abstractmethod
    def numbers(self, parent: str) -> list[int]:
        """Return the numbers of all complete versions or reports.

        Raises:
            NotFound: if the name is invalid.
        """

    @abstractmethod
    def aliases(self, name: str) -> dict[str, str]: ...

    @abstractmethod
    def read(self, path: str, limit: int) -> bytes:
        """Read a file, up to `limit` + 1 bytes.

        Raises:
            FileNotFoundError: if the file does not exist.
            NotFound: if its folder is a symbolic link.
        """

    @abstractmethod
    def lease(self, manifest: Manifest) -> Lease:
        """Return a local folder that contains the files of a version."""

    def close(self) -> None:  # noqa: B027
        """Cancel all downloads."""

    # Writing

    def check_writable(self) -> None:  # noqa: B027
        """Raise InvalidInput if the backend cannot prevent conflicting writes."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[None]:
        """Prepare for writing, and clean up after writers that were killed."""

    @abstractmethod
    def create(self, parent: str, files_for: Callable[[int], Files]) -> int:
        """Write a version or report with the next free number, and return the number.

        `files_for` returns the files of a number, including the manifest or `report.json`. If
        another writer takes the number first, it is called again with the next one.
        """

    @abstractmethod
    def read_alias(self, name: str, alias: str) -> AliasContent | None:
        """Read an alias or `LAST_DELETED` directly, bypassing the listing."""

    @abstractmethod
    def replace_alias(self, name: str, alias: str, text: str, before: AliasContent | None) -> bool:
        """Replace an alias if its content is still `before`. Return False if it has changed."""

    @abstractmethod
    def delete_alias(self, name: str, alias: str) -> None: ...

    @abstractmethod
    def overwrite(self, path: str, content: bytes) -> None: ...

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a report, or a version and its reports."""


def reports_path(name: str, version: str) -> str:
    return f"{name}/{REPORTS}/{version}"


def seal_name(path: str) -> str:
    """Return the name of the file that marks a version or report as complete."""
    return REPORT if f"/{REPORTS}/" in path else MANIFEST


def deleted_number(content: AliasContent | None) -> int:
    """Parse the version number in `LAST_DELETED`. Return 0 if there is none."""
    return int(content.text) if content is not None and is_version(content.text) else 0


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
