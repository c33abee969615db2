"""The interface between a store and the folder or bucket that holds its files.

Both have the same layout (model_store/README.md): paths with slashes below a root. `Storage` is the
interface. `model_store.artifacts.folder` and `model_store.artifacts.bucket` implement it, and
tests/model_store/artifacts/test_store.py checks the same properties for both.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from model_store.artifacts.manifest import NAME_PATTERN, FileSpec, Manifest
from model_store.errors import InvalidInput, NotFound

MANIFEST = "manifest.json"
ALIASES = "aliases"
# Next to the aliases: the highest number of a newest version that was deleted
LAST_DELETED = ".last-deleted"
MAX_ALIAS_BYTES = 1 << 10
REPORTS = "reports"  # evaluation reports: `model_store.artifacts.report`
REPORT = "report.json"


@dataclass(frozen=True)
class Original:
    """A file to publish by its path, and paths in the store of files with the same content."""

    path: Path
    spec: FileSpec
    duplicates: tuple[str, ...] = ()

    def check(self, name: str, size: int, sha256: str) -> None:
        """Raise InvalidInput if the file changed after its digest was computed."""
        if self.spec.difference(size, sha256):
            raise InvalidInput("files", f"an unchanged {name}", "one that changed meanwhile")


Files = Mapping[str, bytes | Original]


@dataclass(frozen=True)
class AliasContent:
    """An alias file's text, and a tag (in some buckets also a version) that changes with it."""

    text: str
    tag: str
    version: str | None = None


class Lease:
    """A version's folder on this machine, which stays there until the lease is closed."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root  # a store that contains the version
        self.folder = folder

    def close(self) -> None: ...

    def discard(self) -> bool:
        """Delete a damaged copy; return False if the folder is no copy."""
        return False


class Storage(ABC):
    """Files by path below a root. A version or a report appears as a whole.

    Readers need no lock. There may be several writers. Every method may raise OSError (a folder) or
    StoreUnreachable (a bucket). A `parent` is the path of a model or of a version's reports; the
    numbers below it are its versions or reports.
    """

    # Reading

    @property
    @abstractmethod
    def scratch(self) -> Path:
        """A folder on this machine with enough space for versions."""

    @abstractmethod
    def locate(self, path: str) -> str:
        """Return a file's path on this machine or its URL, for messages."""

    @property
    @abstractmethod
    def has_listing(self) -> bool:
        """Whether a listing is available without another request."""

    @abstractmethod
    def refresh(self) -> None:
        """Refresh the listing. A bucket answers from it until the next call."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the models that have versions."""

    @abstractmethod
    def numbers(self, parent: str) -> list[int]:
        """Return the complete versions or reports; NotFound if the name is invalid."""

    @abstractmethod
    def aliases(self, name: str) -> dict[str, str]: ...

    @abstractmethod
    def read(self, path: str, limit: int) -> bytes:
        """Return up to `limit` bytes of a file, and one more if it is longer.

        Raises:
            FileNotFoundError: if there is no such file.
            NotFound: if its folder is a link.
        """

    @abstractmethod
    def lease(self, manifest: Manifest) -> Lease:
        """Return a version's files on this machine."""

    def close(self) -> None:  # noqa: B027
        """Cancel downloads, because the process is about to end."""

    # Writing

    def check_writable(self) -> None:  # noqa: B027
        """Raise InvalidInput if concurrent writers could overwrite each other."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[None]:
        """Enter before the methods below, and delete what killed writers left behind."""

    @abstractmethod
    def create(self, parent: str, files_for: Callable[[int], Files]) -> int:
        """Write a version or a report under the next free number, and return the number.

        `files_for` returns the files of a number, among them the seal. It may be called again if
        another writer takes the number.
        """

    @abstractmethod
    def read_alias(self, name: str, alias: str) -> AliasContent | None:
        """Return the current content of an alias (or `LAST_DELETED`)."""

    @abstractmethod
    def replace_alias(self, name: str, alias: str, text: str, before: AliasContent | None) -> bool:
        """Write an alias if its content is still `before`; return whether it was written."""

    @abstractmethod
    def delete_alias(self, name: str, alias: str) -> None: ...

    @abstractmethod
    def overwrite(self, path: str, content: bytes) -> None: ...

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a version with its reports, or a report: first its seal, then its files."""


def reports_path(name: str, version: str) -> str:
    return f"{name}/{REPORTS}/{version}"


def seal_name(path: str) -> str:
    """Return the file that completes the version or report at a path."""
    return REPORT if f"/{REPORTS}/" in path else MANIFEST


def deleted_number(content: AliasContent | None) -> int:
    """Return the number in `LAST_DELETED`, 0 if there is none."""
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
