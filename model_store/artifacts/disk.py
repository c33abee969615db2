"""Read files without following symbolic links and write files durably."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from model_store.artifacts.manifest import FileSpec
from model_store.types import Content

PIECE_BYTES = 1 << 20  # per read of a large file


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file, up to `limit` + 1 bytes."""
    with open_regular(path) as file:
        return file.read(limit + 1)


def read_verified(path: Path, spec: FileSpec) -> bytes:
    """Read a file. Raise ValueError if it is not as specified."""
    content = read_regular(path, spec.size)
    spec.check(len(content), hashlib.sha256(content).hexdigest())
    return content


def verify(path: Path, spec: FileSpec) -> None:
    """Raise ValueError if a file is not as specified."""
    spec.check(*digest(path, spec.size))


def digest(path: Path, limit: int) -> tuple[int, str]:
    """Compute the size and SHA-256 digest of a file, reading up to `limit` + 1 bytes."""
    size, digest = 0, hashlib.sha256()
    with open_regular(path) as file:
        while part := file.read(min(PIECE_BYTES, limit + 1 - size)):
            size += len(part)
            digest.update(part)
    return size, digest.hexdigest()


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without following symbolic links or blocking on a pipe."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def write_synced(path: Path, content: Content | np.ndarray) -> None:
    """Write bytes, or an array in npy format."""
    with path.open("wb") as file:
        if isinstance(content, np.ndarray):
            np.save(file, content, allow_pickle=False)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def copy_synced(source: Path, target: Path) -> None:
    with open_regular(source) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy, PIECE_BYTES)
        copy.flush()
        os.fsync(copy.fileno())


def replace_file(path: Path, content: bytes, draft: Path | None = None) -> None:
    """Replace a file atomically and durably."""
    draft = draft or path.with_name(f".draft-{path.name}")
    write_synced(draft, content)
    draft.chmod(0o644)
    draft.rename(path)
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    make_folder(path.parent)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    with suppress(OSError):  # some file systems cannot sync a folder
        os.fsync(handle)
    os.close(handle)


def folder_bytes(folder: Path) -> int:
    size = 0
    for place, _, names in os.walk(folder):  # skips folders that are renamed meanwhile
        for name in names:
            with suppress(FileNotFoundError):  # deleted by another process
                size += (Path(place) / name).lstat().st_size
    return size


def file_spec(content: bytes | Path) -> FileSpec:
    if isinstance(content, bytes):
        return FileSpec(sha256=hashlib.sha256(content).hexdigest(), size=len(content))
    size, sha256 = digest(content, content.stat().st_size)
    return FileSpec(sha256=sha256, size=size)
