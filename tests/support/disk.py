"""Simulate crashes, power failures and full disks in one folder.

`crashing_disk(folder, crash_at=n)` raises `Crash` at the n-th change of the folder and at every
later one. An interrupted write stores half the content. The folder then contains, by kind of loss:

    killed         all completed changes: the process ended
    content lost   the same, but files without fsync are empty
    entries lost   also without files and renames in folders without fsync
    disk full      all changes except this one, which raised OSError

Deletions are always durable.
"""

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

LOSSES = ("killed", "content lost", "entries lost")
DISK_FULL = "disk full"


class Crash(BaseException):
    """The simulated process has ended. Do not catch this."""


class Disk:
    """Count changes below a folder, and track what a power failure would lose."""

    def __init__(self, root: Path, crash_at: int | None, loss: str) -> None:
        self.root, self.crash_at, self.loss = root, crash_at, loss
        self.calls = 0
        self.real = {
            name: getattr(os, name)
            for name in ("open", "mkdir", "rename", "replace", "chmod", "unlink")
        }
        self.real |= {"rmdir": os.rmdir, "fsync": os.fsync, "io.open": io.open}
        self.unsynced: set[int] = set()  # files, by inode
        # The folder's inode and a function that undoes the change.
        self.entries: list[tuple[int, Callable[[Path], None]]] = []

    def step(self) -> None:
        """Count the next change, and fail if it is the chosen one."""
        self.calls += 1
        if self.loss == DISK_FULL and self.calls == self.crash_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.loss != DISK_FULL and self.crash_at is not None and self.calls >= self.crash_at:
            raise Crash

    def lose(self) -> None:
        if self.loss == "entries lost":
            for folder, undo in reversed(self.entries):
                paths = [
                    path
                    for path in (self.root, *self.root.rglob("*"))
                    if path.lstat().st_ino == folder
                ]
                if paths:
                    undo(paths[0])
        if self.loss in ("content lost", "entries lost"):
            for path in self.root.rglob("*"):
                if path.is_file() and path.lstat().st_ino in self.unsynced:
                    os.truncate(path, 0)

    # Replacements of functions in `os` and `io`

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        if not flags & os.O_CREAT:
            return self.real["open"](path, flags, mode, dir_fd=dir_fd)
        self.step()
        handle = self.real["open"](path, flags, mode, dir_fd=dir_fd)
        self._record_creation(Path(path))
        self.unsynced.add(os.fstat(handle).st_ino)
        return handle

    def open_file(self, path, mode="r", *arguments, **options):
        if not isinstance(path, Path | str) or not {"w", "a"} & {*mode}:
            return self.real["io.open"](path, mode, *arguments, **options)
        self.step()
        is_new = not Path(path).exists()
        file = self.real["io.open"](path, mode, *arguments, **options)
        if is_new:
            self._record_creation(Path(path))
        self.unsynced.add(os.fstat(file.fileno()).st_ino)
        return UnbufferedFile(file, self)

    def mkdir(self, path, *arguments, **options):
        self.step()
        self.real["mkdir"](path, *arguments, **options)
        self._record_creation(Path(path))

    def rename(self, source, target, **options):
        self.step()
        source, target = Path(source), Path(target)
        replaced = target.read_bytes() if target.is_file() else None
        self.real["rename"](source, target, **options)

        def undo(folder: Path) -> None:
            if not (folder / target.name).exists():
                return
            self.real["rename"](folder / target.name, folder / source.name)
            if replaced is not None:
                (folder / target.name).write_bytes(replaced)

        self._record_undo(target.parent, undo)

    def chmod(self, path, *arguments, **options):
        self.step()
        self.real["chmod"](path, *arguments, **options)

    def unlink(self, path, **options):
        self.step()
        self.real["unlink"](path, **options)

    def rmdir(self, path, **options):
        self.step()
        self.real["rmdir"](path, **options)

    def fsync(self, handle):
        self.step()
        inode = os.fstat(handle).st_ino
        self.unsynced.discard(inode)
        self.entries = [(folder, undo) for folder, undo in self.entries if folder != inode]

    def _record_creation(self, path: Path) -> None:
        def undo(folder: Path) -> None:
            created = folder / path.name
            if created.is_dir():
                shutil.rmtree(created)
            else:
                created.unlink(missing_ok=True)

        self._record_undo(path.parent, undo)

    def _record_undo(self, folder: Path, undo: Callable[[Path], None]) -> None:
        self.entries.append((folder.stat().st_ino, undo))


class UnbufferedFile:
    """A file opened for writing, without buffering."""

    def __init__(self, file, disk: Disk) -> None:
        self.file, self.disk = file, disk

    def write(self, content) -> int:
        try:
            self.disk.step()
        except Crash:
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            raise
        self.disk.unsynced.add(os.fstat(self.file.fileno()).st_ino)
        return self.file.write(content)

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@contextmanager
def crashing_disk(root: Path, crash_at: int | None = None, loss: str = "killed") -> Iterator[Disk]:
    """Run a block on a disk that crashes at change `crash_at` (None: never), then apply `loss`.

    The block suppresses the crash. `Disk.calls` is the number of changes.
    """
    disk = Disk(root, crash_at, loss)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "mkdir", "rename", "chmod", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, getattr(disk, name))
        patch.setattr(os, "replace", disk.rename)
        patch.setattr(io, "open", disk.open_file)
        with suppress(Crash, OSError) if crash_at is not None else suppress(Crash):
            yield disk
    disk.lose()
