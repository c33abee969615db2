"""Back up a state folder while it is in use, or restore it.

The file contains the database, the results of finished jobs, and the input of unfinished jobs,
which start again after a restore.
"""

import fcntl
import json
import os
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from model_store.errors import InvalidInput
from model_store.state.database import FILE, Database
from model_store.state.jobs import FOLDER
from model_store.state.labels import has_state

DRAFT = "backup-"  # prefix of temporary folders
END_BYTES = 2 * tarfile.BLOCKSIZE  # zeros at the end of a tar file


def back_up(folder: Path | None, archive: BinaryIO) -> None:
    """Back up a state folder to a tar file."""
    if folder is None or not has_state(folder):
        raise InvalidInput("DUBITO_STATE", "the folder of a service's state", "none, or another")
    with (
        _temporary_folder(folder) as copy,
        tarfile.open(fileobj=archive, mode="w|") as tar,
    ):
        with (
            closing(Database(folder)) as database,
            closing(sqlite3.connect(copy / FILE)) as target,
            database.reading() as connection,
        ):
            connection.backup(target)
        tar.add(copy / FILE, FILE, filter=_private)
        with closing(sqlite3.connect(copy / FILE)) as copied:
            jobs = copied.execute(
                "SELECT id, state, outcome FROM jobs WHERE state IN ('queued', 'running', 'done')"
            )
            for name, state, outcome in jobs:
                with suppress(FileNotFoundError):  # the job was deleted or ended
                    for file in sorted((folder / FOLDER / name).iterdir()):
                        is_result = state == "done" and file.name == json.loads(outcome)
                        if file.is_file() and (is_result or state != "done"):
                            tar.add(file, f"{FOLDER}/{name}/{file.name}", filter=_private)


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Create a locked temporary folder and delete any folders left by killed backups."""
    for leftover in folder.glob(f"{DRAFT}*"):
        with suppress(OSError), _lock(leftover):  # another backup holds the lock
            shutil.rmtree(leftover, ignore_errors=True)
    with TemporaryDirectory(prefix=DRAFT, dir=folder) as temporary, _lock(Path(temporary)):
        yield Path(temporary)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _private(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode = 0o600
    return member


def restore(folder: Path | None, archive: BinaryIO) -> None:
    """Restore a state folder from a backup file.

    Raises:
        InvalidInput: if the folder is not empty, or the file is not a backup.
        StateUnusable: if the folder cannot be written to.
    """
    if folder is None or (folder.exists() and any(folder.iterdir())):
        raise InvalidInput("DUBITO_STATE", "an empty folder, or none yet", "one with files, or ''")
    before = os.umask(0o077)
    stream = _Stream(archive)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
            tar.extractall(folder, filter="data")
        if not stream.has_end() or not (folder / FILE).exists():
            raise tarfile.TarError
    except BaseException as error:
        for path in folder.iterdir() if folder.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not isinstance(error, tarfile.TarError):
            raise
        expected = "all that `dubito backup` wrote"
        raise InvalidInput("standard input", expected, "another or a truncated file") from None
    finally:
        os.umask(before)
    Database(folder).close()


class _Stream:
    """A stream that remembers its last bytes.

    This detects truncated files, which tarfile does not.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._tail = b""

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self._tail = (self._tail + content)[-END_BYTES:]
        return content

    def has_end(self) -> bool:
        while self.read(1 << 20):
            pass
        return self._tail == bytes(END_BYTES)
