"""A store in a folder."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from model_store.artifacts.disk import (
    copy_synced,
    locked,
    make_folder,
    read_regular,
    replace_file,
    sync_folder,
    write_synced,
)
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.storage import (
    ALIASES,
    LAST_DELETED,
    MAX_ALIAS_BYTES,
    REPORTS,
    Files,
    Lease,
    check_is_known_name,
    check_is_new_name,
    is_name,
    is_version,
    version_number,
)
from model_store.errors import NotFound, StoreUnreachable


class Folder:
    """A storage backend on a local or mounted file system.

    A version is written to a hidden folder, synced and renamed. Aliases are small files, replaced
    by renaming. Each model has a lock for its writers. Readers need no lock.

    `Bucket` has the same methods. Paths are relative to the root and use slashes. Every method can
    raise OSError here, and StoreUnreachable in a bucket.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._had_entries = self._is_gone = False

    # Reading

    @property
    def scratch(self) -> Path:
        """A local folder for temporary files. It has enough space for a version."""
        return self.root

    def locate(self, path: str) -> str:
        """Return the local path or URL of a file, for use in messages."""
        return str(self.root / path)

    @property
    def has_listing(self) -> bool:
        """True if a listing is available without a request."""
        return not self._is_gone

    def refresh(self) -> None:
        """Raise StoreUnreachable if the folder is suddenly empty, e.g. because it was unmounted."""
        has_entries = self.root.is_dir() and any(True for _ in self.root.iterdir())
        self._had_entries |= has_entries
        self._is_gone = self._had_entries and not has_entries
        if self._is_gone:
            raise StoreUnreachable(f"the store {self.root} is gone, or empty")

    def names(self) -> list[str]:
        return [name for name in _folders(self.root) if is_name(name) and self.numbers(name)]

    def numbers(self, name: str) -> list[int]:
        folders = _folders(self._model_folder(name))
        return [int(number) for number in folders if is_version(number)]

    def aliases(self, name: str) -> dict[str, str]:
        folder = self._model_folder(name) / ALIASES
        if folder.is_symlink() or not folder.is_dir():
            return {}
        aliases = {}
        for entry in os.scandir(folder):
            if is_name(entry.name) and entry.is_file(follow_symlinks=False):
                aliases[entry.name] = _read_text(Path(entry.path))
        return aliases

    def has_file(self, path: str) -> bool:
        target = self.root.resolve() / path
        return target.is_file() and target.resolve() == target

    def read(self, path: str, limit: int) -> bytes:
        """Read a file, up to `limit` + 1 bytes. Raise NotFound if its folder is a symbolic link."""
        name = self._model_folder(path).name
        if (self.root / path).parent.is_symlink():
            raise NotFound("version", f"one of model {name}", "a symbolic link")
        return read_regular(self.root / path, limit)

    def lease(self, manifest: Manifest) -> Lease:
        return Lease(self.root, self._model_folder(manifest.name) / manifest.version)

    def discard(self, lease: Lease) -> bool:  # noqa: ARG002
        """Delete a damaged copy. Return False if the folder is the original."""
        return False

    def close(self) -> None:
        """Cancel all downloads."""

    # Writing

    def check_writable(self) -> None:
        """Raise InvalidInput if the backend cannot prevent conflicting writes."""

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Prepare for writing and clean up after any writers that were killed."""
        check_is_new_name(name)
        folder = self._model_folder(name)
        with locked(folder / ".lock"):
            for leftover in [*folder.glob(".draft-*"), *folder.glob(".deleted-*")]:
                shutil.rmtree(leftover, ignore_errors=True)
            yield

    def next_number(self, name: str) -> int:
        """Return the next version number."""
        deleted = version_number(self.read_alias(name, LAST_DELETED))
        return max([deleted, *self.numbers(name)]) + 1

    def create(self, name: str, number: int, files: Files) -> bool:
        """Write a version. Return False if another writer has taken the number."""
        target = self.root / name / str(number)
        draft = Path(mkdtemp(prefix=".draft-", dir=target.parent))
        for file, content in files.items():
            if isinstance(content, bytes):
                write_synced(draft / file, content)
            else:
                copy_synced(content, draft / file)
        draft.chmod(0o755)
        sync_folder(draft)
        draft.rename(target)
        sync_folder(target.parent)
        return True

    def read_alias(self, name: str, alias: str) -> str | None:
        """Read an alias or `LAST_DELETED` directly, bypassing a bucket's listing."""
        folder = self._model_folder(name) / ALIASES
        try:
            return "" if folder.is_symlink() else _read_text(folder / alias)
        except OSError:
            return None

    def move_alias(self, name: str, alias: str, choose: Callable[[str | None], str | None]) -> None:
        """Set an alias to `choose(current)`, unless the result is None."""
        text = choose(self.read_alias(name, alias))
        if text is not None:
            self.overwrite(f"{name}/{ALIASES}/{alias}", text.encode())

    def delete_alias(self, name: str, alias: str) -> None:
        aliases = self._model_folder(name) / ALIASES
        (aliases / alias).unlink(missing_ok=True)
        sync_folder(aliases)

    def overwrite(self, path: str, content: bytes) -> None:
        """Write a file atomically."""
        target = self.root / path
        make_folder(target.parent)
        draft = Path(mkdtemp(prefix=".draft-", dir=self._model_folder(path)))
        replace_file(target, content, draft / target.name)
        draft.rmdir()

    def delete_report(self, name: str, version: str) -> None:
        shutil.rmtree(self._model_folder(name) / REPORTS / version, ignore_errors=True)

    def delete(self, name: str, version: str) -> None:
        """Delete a version and its report."""
        self.delete_report(name, version)
        folder = self._model_folder(name)
        trash = folder / f".deleted-{version}"
        (folder / version).rename(trash)  # hides it from readers
        sync_folder(folder)
        shutil.rmtree(trash)

    def _model_folder(self, path: str) -> Path:
        name = path.split("/")[0]
        check_is_known_name(name)
        folder = self.root / name
        if folder.is_symlink():
            raise NotFound("model", "a folder", f"{name}, a symbolic link, which the store skips")
        return folder


def _folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]


def _read_text(path: Path) -> str:
    return read_regular(path, MAX_ALIAS_BYTES).decode("ascii", errors="replace").strip()
