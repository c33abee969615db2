"""Data set and output files, in a folder or a bucket.

Each output file is written once, atomically.
"""

import io
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from model_store.artifacts.disk import make_folder, sync_folder, write_synced
from model_store.artifacts.objects import PROBE, Objects
from model_store.artifacts.storage import is_url
from model_store.errors import DubitoError, InvalidInput
from model_store.sources.files import file_stamp

ENDING = ".parquet"
DRAFT = ".draft-"
MAX_READ_BYTES = 1 << 30  # of an output read into memory


class Stopped(DubitoError):
    """Raised when work on a data set cannot continue."""


@dataclass(frozen=True)
class DataFile:
    name: str  # path in the data set, with slashes
    size: int  # bytes
    stamp: str  # changes with the file

    def change_error(self) -> InvalidInput:
        expected = f"{self.name} unchanged since the job began"
        return InvalidInput("source", expected, "another, or none")


def _is_data(name: str) -> bool:
    is_hidden = any(part.startswith((".", "_")) for part in name.split("/"))
    return name.endswith(ENDING) and not is_hidden


class LocalFiles:
    """The files in a folder and its subfolders, or a single file."""

    def __init__(self, root: Path, field: str) -> None:
        self.root = root
        self.field = field

    def data(self) -> list[DataFile]:
        """List the Parquet files, except hidden files (names with a leading . or _)."""
        if self.root.is_file():
            return [self._entry(self.root, self.root.name)]
        if not self.root.is_dir():
            expected = f"a {ENDING} file, or a folder of such files"
            raise InvalidInput(self.field, expected, f"{self.root}, which does not exist")
        paths = (path for path in self.root.rglob(f"*{ENDING}") if path.is_file())
        names = sorted(str(path.relative_to(self.root)) for path in paths)
        return [self._entry(self.root / name, name) for name in names if _is_data(name)]

    @staticmethod
    def _entry(path: Path, name: str) -> DataFile:
        return DataFile(name, path.stat().st_size, file_stamp(path))

    def open(self, entry: DataFile) -> Path:
        """Return a file's path, or raise InvalidInput if the file has changed."""
        path = self.root if self.root.is_file() else self.root / entry.name
        if not path.is_file() or self._entry(path, entry.name) != entry:
            raise entry.change_error()
        return path

    def check_output(self) -> None:
        """Create the output folder, or raise InvalidInput if it is not writable."""
        try:
            make_folder(self.root)
        except OSError as error:
            received = f"{self.root}: {error.strerror}"
            raise InvalidInput(self.field, "a writable folder", received) from None

    def names(self) -> set[str]:
        below = (path for path in self.root.rglob("*") if path.is_file())
        finished = (path for path in below if not path.name.startswith(DRAFT))
        return {str(path.relative_to(self.root)) for path in finished}

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, name: str, content: bytes) -> bool:
        """Write a new file atomically. Return False if it already exists."""
        target = self.root / name
        draft = target.parent / f"{DRAFT}{uuid.uuid4().hex}"
        # Unlike renaming, linking fails if the file exists.
        try:
            make_folder(target.parent)
            write_synced(draft, content)
            os.link(draft, target)
            sync_folder(target.parent)
        except OSError as error:
            if target.exists():  # by another worker, which may also have removed the draft
                return False
            reason = f"cannot create {name} in {self.root}: {error.strerror}"
            raise Stopped(f"{self.field}: {reason}") from None
        finally:
            with suppress(OSError):
                draft.unlink()
        return True

    def clear(self) -> None:
        """Remove drafts left by killed processes."""
        for draft in self.root.rglob(f"{DRAFT}*"):
            draft.unlink(missing_ok=True)


class BucketFiles:
    """The objects under a bucket's URL, or a single object."""

    def __init__(self, url: str, field: str) -> None:
        self.url = url.rstrip("/")
        self.field = field
        self.objects = Objects.from_url(self.url, field)

    @cached_property
    def _read(self) -> tuple[Objects, str | None]:
        """The bucket folder and, if the URL refers to a single object, its name."""
        parent, _, name = self.url.rpartition("/")
        if not name.endswith(ENDING) or parent.endswith("/") or self.objects.entries():
            return self.objects, None
        return Objects.from_url(parent, self.field), name

    def data(self) -> list[DataFile]:
        objects, single = self._read
        entries = objects.entries()
        return [
            DataFile(name, entry.size, entry.tag or entry.modified.isoformat())
            for name, entry in sorted(entries.items())
            if _is_data(name) and single in (None, name)
        ]

    def open(self, entry: DataFile) -> "BucketFile":
        return BucketFile(self._read[0], entry)

    def check_output(self) -> None:
        """Raise InvalidInput unless the server supports conditional writes."""
        if self.objects.ignored_condition() == "If-None-Match":
            received = "one that ignores If-None-Match"
            raise InvalidInput(self.field, "a bucket with conditional writes", received)

    def names(self) -> set[str]:
        return {name for name in self.objects.entries() if not name.startswith(PROBE)}

    def read(self, name: str) -> bytes | None:
        entry = self.objects.get(name, MAX_READ_BYTES)
        return None if entry is None else entry.content

    def create(self, name: str, content: bytes) -> bool:
        return self.objects.create(name, content)

    def clear(self) -> None:
        """Do nothing, because buckets have no drafts."""


class BucketFile(io.RawIOBase):
    """An object in a bucket. Each read sends a request."""

    def __init__(self, objects: Objects, entry: DataFile) -> None:
        super().__init__()
        self._objects, self._entry = objects, entry
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._entry.size}
        self._position = start[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read bytes, or raise InvalidInput if the object has changed."""
        left = max(0, self._entry.size - self._position)
        size = left if size < 0 else min(size, left)
        if size == 0:
            return b""
        try:
            content, tag = self._objects.span(self._entry.name, self._position, size)
        except FileNotFoundError:
            raise self._entry.change_error() from None
        if len(content) < size or (tag and tag != self._entry.stamp):
            raise self._entry.change_error()
        self._position += size
        return content


Files = LocalFiles | BucketFiles


def open_files(place: str, field: str) -> Files:
    """Open a folder or a bucket's URL. Errors name the option `field`."""
    return BucketFiles(place, field) if is_url(place) else LocalFiles(Path(place), field)
