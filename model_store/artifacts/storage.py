"""Where models lie: the seam between what a store is and the folder or the bucket that holds it.

Both have one layout (model_store/README.md), of paths with slashes below a root. `Storage` is all
that differs: `model_store.artifacts.folder` and `model_store.artifacts.bucket` implement it, and
tests/model_store/artifacts/test_storage.py holds both to the same properties.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from model_store.artifacts.manifest import NAME_PATTERN, FileSpec, Manifest
from model_store.errors import InvalidInput, NotFound

MANIFEST = "manifest.json"
ALIASES = "aliases"
# next to the aliases: the highest number of a version that was the newest and is gone
LAST_DELETED = ".last-deleted"
MAX_ALIAS_BYTES = 1 << 10
EVIDENCE = "evidence"  # of evaluation reports: `model_store.artifacts.report`
REPORT = "evidence.json"


@dataclass(frozen=True)
class Original:
    """A file that is published by its path, and published files that may be the same, by their
    paths in the store."""

    path: Path
    spec: FileSpec
    alike: tuple[str, ...] = ()

    def check(self, name: str, size: int, sha256: str) -> None:
        """Raise InvalidInput if what was copied is not what was announced."""
        if self.spec.difference(size, sha256):
            raise InvalidInput(
                "files", f"a {name} that stays as it is", "one that changed meanwhile"
            )


@dataclass(frozen=True)
class Written:
    """What an alias was written to say, and a tag, or a tag and a version, that change whenever
    that does."""

    text: str
    tag: str
    version: str | None = None


class Lease:
    """A version in a folder of this machine, which stays there as long as this object does."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root  # of a store that has the version
        self.folder = folder

    def close(self) -> None: ...

    def discard(self) -> bool:
        """Let go of a version that turned out to be damaged, and delete it if it is a copy; return
        whether it is."""
        return False


class Storage(ABC):
    """Files by path below a root. What appears, appears whole; readers need no lock and writers may
    be several.

    Any method may raise OSError (a folder) or StoreUnreachable (a bucket).
    """

    @property
    @abstractmethod
    def scratch(self) -> Path:
        """A folder of this machine with room for versions."""

    @abstractmethod
    def place(self, path: str) -> str:
        """Return where a file is, as a path of this machine or a URL, for people."""

    @property
    @abstractmethod
    def was_seen(self) -> bool:
        """Whether lists need no further look."""

    @abstractmethod
    def look(self) -> None:
        """Look at what is there now; where looking costs a request, lists say what was seen then
        until the next look.

        A storage that was never looked at looks whenever it is asked.
        """

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, in any order; NotFound for what cannot be a name."""

    @abstractmethod
    def aliases(self, name: str) -> dict[str, str]: ...

    @abstractmethod
    def reports(self, name: str, version: str) -> list[int]: ...

    @abstractmethod
    def read(self, path: str, limit: int) -> bytes:
        """Return a file of at most `limit` bytes (and one more, to see that it is longer).

        Raises:
            FileNotFoundError: if there is none.
            NotFound: if the way to it is a link.
        """

    @abstractmethod
    def has(self, path: str) -> bool: ...

    @abstractmethod
    def lease(self, manifest: Manifest) -> Lease:
        """Return a version's files on this machine."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is being fetched: the process is about to end."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise InvalidInput, with the reason, if this is no place that writers can share."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[None]:
        """Write to a model, with what killed writers left behind cleared away; what follows is
        called within."""

    @abstractmethod
    def last_number(self, parent: str) -> int:
        """Return the highest number that was ever given below a path: a model's, or a version's
        reports'."""

    @abstractmethod
    def create(self, path: str, files: Mapping[str, bytes | Original]) -> bool:
        """Write all files of a version or a report, its manifest or `evidence.json` among them,
        which seals it.

        Returns:
            False if another writer has its number; then nothing is left.
        """

    @abstractmethod
    def written(self, name: str, alias: str) -> Written | None:
        """Return what is written of one alias (or `LAST_DELETED`) now."""

    @abstractmethod
    def replace(self, name: str, alias: str, text: str, before: Written | None) -> bool:
        """Write an alias, if what is written is still what it was `before`; return whether it
        was."""

    @abstractmethod
    def overwrite(self, path: str, content: bytes) -> None: ...

    @abstractmethod
    def drop_alias(self, name: str, alias: str) -> None: ...

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a version or a report: it is gone at once, its files soon after."""


def seal_of(path: str) -> str:
    """Return the file without which what lies at a path is no version, or no report."""
    return REPORT if f"/{EVIDENCE}/" in path else MANIFEST


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
