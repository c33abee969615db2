"""Where data sets and outputs lie: a folder, or a bucket. What is written appears whole, once, and
never changes.

A file of a data set is read through a `Copy`, a path of this machine that has the bytes that are
needed; of a folder it is the file itself.
"""

import os
import tempfile
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

from model_store.artifacts.disk import make_folder, sync_folder, write_synced
from model_store.artifacts.objects import Objects
from model_store.artifacts.place import is_url
from model_store.errors import DubitoError, InvalidInput
from model_store.sources.files import stamp_of

ENDING = ".parquet"
DRAFT = ".draft-"
PROBE = ".probe-"
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # in the name of a folder
FOOTER_BYTES = 64 << 10  # read at a file's end at first, which most footers are smaller than
PIECE_BYTES = 8 << 20  # of an object, read at a time
MOST_BYTES = 1 << 30  # of what is read whole


class Stopped(DubitoError):
    """Work on a data set that cannot go on. What is done is kept."""


@dataclass(frozen=True)
class Listed:
    name: str  # below the data set, with slashes
    size: int  # bytes
    stamp: str  # changes whenever the file does

    @property
    def of_folders(self) -> dict[str, str | None]:
        """Columns that the names of its folders give to all its rows, as `date=2024-01-01`."""
        pairs = (folder.partition("=") for folder in self.name.split("/")[:-1])
        values = {unquote(name): unquote(value) for name, mark, value in pairs if mark}
        return {name: None if value == NO_VALUE else value for name, value in values.items()}

    def change_error(self) -> InvalidInput:
        """Return the error of a file that is another by now."""
        expected = f"{self.name} as it was when the job began"
        return InvalidInput("source", expected, "another, or none")


class Copy:
    """A file as libraries open it: `path`, in which the bytes that were needed are right."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def need(self, first: int, end: int) -> None:
        """Make bytes `first` to `end` available, besides the footer."""

    def close(self) -> None:
        """Release the file."""


def _is_data(name: str) -> bool:
    is_hidden = any(part.startswith((".", "_")) for part in name.split("/"))
    return name.endswith(ENDING) and not is_hidden


class LocalFiles:
    """Files below a folder, or one file. Any method may raise a DubitoError of one line."""

    def __init__(self, root: Path, field: str) -> None:
        self.root = root
        self.field = field

    def data(self) -> list[Listed]:
        """Return the data set's Parquet files in the order of their names; those that begin with .
        or _ are left out."""
        if self.root.is_file():
            return [self._listed(self.root, self.root.name)]
        if not self.root.is_dir():
            expected = f"a {ENDING} file, or a folder of such"
            raise InvalidInput(self.field, expected, f"{self.root}, which is not there")
        found = {
            str(path.relative_to(self.root)): path
            for path in self.root.rglob(f"*{ENDING}")
            if path.is_file()
        }
        return [self._listed(found[name], name) for name in sorted(found) if _is_data(name)]

    @staticmethod
    def _listed(path: Path, name: str) -> Listed:
        return Listed(name, path.stat().st_size, stamp_of(path))

    def open(self, listed: Listed) -> Copy:
        """Open a file of the data set; raises InvalidInput if it is not as it was listed."""
        path = self.root if self.root.is_file() else self.root / listed.name
        if not path.is_file() or self._listed(path, listed.name) != listed:
            raise listed.change_error()
        return Copy(path)

    def check_output(self) -> None:
        """Make the folder; raises InvalidInput if this is no place for an output."""
        try:
            make_folder(self.root)
        except OSError as error:
            got = f"{self.root}: {error.strerror}"
            raise InvalidInput(self.field, "a folder that can be written to", got) from None

    def names(self) -> set[str]:
        below = (path for path in self.root.rglob("*") if path.is_file())
        return {
            str(path.relative_to(self.root)) for path in below if not path.name.startswith(DRAFT)
        }

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, name: str, content: bytes) -> bool:
        """Write a file if there is none; return whether there was none. A draft is written, synced
        and linked, which fails where there is such a file."""
        target = self.root / name
        draft = target.parent / f"{DRAFT}{uuid.uuid4().hex}"
        try:
            make_folder(target.parent)
            write_synced(draft, content)
            os.link(draft, target)
            sync_folder(target.parent)
        except OSError as error:
            if target.exists():  # another was first, and may have cleared the draft away
                return False
            reason = f"cannot create {name} in {self.root}: {error.strerror}"
            raise Stopped(f"{self.field}: {reason}") from None
        finally:
            with suppress(OSError):
                draft.unlink()
        return True

    def clear(self) -> None:
        """Remove the drafts of killed writers, once nothing is left to be written."""
        for draft in self.root.rglob(f"{DRAFT}*"):
            draft.unlink(missing_ok=True)


class BucketFiles:
    """Objects below a bucket's URL, or one object, as `LocalFiles`."""

    def __init__(self, url: str, field: str) -> None:
        self.url = url.rstrip("/")
        self.field = field
        self.objects = Objects.of(self.url, field)

    @cached_property
    def _read(self) -> tuple[Objects, str | None]:
        """Where the data are: below the URL or, if nothing is and it names a file, that file
        alone."""
        parent, _, name = self.url.rpartition("/")
        if not name.endswith(ENDING) or parent.endswith("/") or self.objects.entries():
            return self.objects, None
        return Objects.of(parent, self.field), name

    def data(self) -> list[Listed]:
        objects, alone = self._read
        entries = objects.entries()
        return [
            Listed(name, entry.size, entry.tag or entry.modified.isoformat())
            for name, entry in sorted(entries.items())
            if _is_data(name) and alone in (None, name)
        ]

    def open(self, listed: Listed) -> Copy:
        return _BucketCopy(self._read[0], listed)

    def check_output(self) -> None:
        """Create an object twice: the server must refuse the second."""
        path = f"{PROBE}{uuid.uuid4().hex}"
        self.objects.entries(path)  # fails where there is no bucket; a write might make one
        try:
            created, again = self.objects.create(path, b"1"), self.objects.create(path, b"2")
        finally:
            self.objects.delete([path])
        if again or not created:
            got = "one that ignores If-None-Match: of two workers both would write a part"
            raise InvalidInput(self.field, "a bucket that honours conditional writes", got)

    def names(self) -> set[str]:
        return {name for name in self.objects.entries() if not name.startswith(PROBE)}

    def read(self, name: str) -> bytes | None:
        found = self.objects.get(name, MOST_BYTES)
        return None if found is None else found.content

    def create(self, name: str, content: bytes) -> bool:
        return self.objects.create(name, content)

    def clear(self) -> None:
        """Do nothing: objects appear whole."""


class _BucketCopy(Copy):
    """A sparse file without a name: the footer, and the bytes that were needed last."""

    def __init__(self, objects: Objects, listed: Listed) -> None:
        self._objects, self._listed = objects, listed
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        super().__init__(Path(f"/dev/fd/{self._file.fileno()}"))
        self._held = 0, 0
        try:
            size = min(FOOTER_BYTES, listed.size)
            self._tail = self._fetch(listed.size - size, size)
            footer = int.from_bytes(self._tail[-8:-4], "little") + 8
            if size < footer <= listed.size:
                self._tail = self._fetch(listed.size - footer, footer)
            self._begin()
        except BaseException:
            self._file.close()
            raise

    def _begin(self) -> None:
        self._file.truncate(0)
        self._file.seek(self._listed.size - len(self._tail))
        self._file.write(self._tail)
        self._file.flush()

    def _fetch(self, first: int, size: int) -> bytes:
        try:
            content, tag = self._objects.span(self._listed.name, first, size)
        except FileNotFoundError:
            raise self._listed.change_error() from None
        if len(content) < size or (tag and tag != self._listed.stamp):
            raise self._listed.change_error()
        return content

    def need(self, first: int, end: int) -> None:
        if self._held[0] <= first and end <= self._held[1]:
            return
        self._held = 0, 0
        self._begin()
        for start in range(first, end, PIECE_BYTES):
            self._file.seek(start)
            self._file.write(self._fetch(start, min(PIECE_BYTES, end - start)))
        self._file.flush()
        self._held = first, end

    def close(self) -> None:
        self._file.close()


Files = LocalFiles | BucketFiles


def files_at(place: str, field: str) -> Files:
    """Return the files of a folder, or a bucket's URL; `field` is the option that named it.

    Raises:
        InvalidInput: if a URL is none of a bucket, or the extra `bucket` is not installed.
    """
    return BucketFiles(place, field) if is_url(place) else LocalFiles(Path(place), field)
