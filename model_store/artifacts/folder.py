"""Models in a folder: a version is written to a hidden folder next to its final place, synced, and
renamed.

Aliases are one small file each, replaced by renaming. Writers of one name take turns by a lock.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp, mkstemp

from model_store.artifacts.disk import (
    PIECE_BYTES,
    digest,
    make_folder,
    open_regular,
    read_regular,
    sync_folder,
    write_synced,
)
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.storage import (
    ALIASES,
    EVIDENCE,
    LAST_DELETED,
    MAX_ALIAS_BYTES,
    Lease,
    Original,
    Storage,
    Written,
    check_is_known_name,
    check_is_new_name,
    is_name,
    is_version,
)
from model_store.errors import NotFound, StoreUnreachable


class Folder(Storage):
    def __init__(self, root: Path) -> None:
        self.root = root
        self._had_something = self._is_gone = False

    @property
    def scratch(self) -> Path:
        return self.root

    def place(self, path: str) -> str:
        return str(self.root / path)

    @property
    def was_seen(self) -> bool:
        return not self._is_gone

    def look(self) -> None:
        """Look whether there still is something, if there was: a mount that is gone leaves an empty
        folder, or none."""
        has_something = self.root.is_dir() and any(True for _ in self.root.iterdir())
        self._had_something |= has_something
        self._is_gone = self._had_something and not has_something
        if self._is_gone:
            raise StoreUnreachable(f"the store {self.root} is gone, or empty")

    def names(self) -> list[str]:
        if not self.root.is_dir():
            return []
        found = [name for name in _folders(self.root) if is_name(name)]
        return [name for name in found if self.versions(name)]

    def versions(self, name: str) -> list[str]:
        folder = self.folder(name)
        return [found for found in _folders(folder) if is_version(found)] if folder.is_dir() else []

    def aliases(self, name: str) -> dict[str, str]:
        folder = self.folder(name) / ALIASES
        if folder.is_symlink() or not folder.is_dir():
            return {}
        found = {}
        for entry in os.scandir(folder):
            if is_name(entry.name) and entry.is_file(follow_symlinks=False):
                content = read_regular(Path(entry.path), MAX_ALIAS_BYTES)
                found[entry.name] = content.decode("ascii", errors="replace").strip()
        return found

    def reports(self, name: str, version: str) -> list[int]:
        folder = self.folder(name) / EVIDENCE / version
        if folder.is_symlink() or folder.parent.is_symlink() or not folder.is_dir():
            return []
        return [int(found) for found in _folders(folder) if is_version(found)]

    def read(self, path: str, limit: int) -> bytes:
        name, *_ = path.split("/")
        self.folder(name)
        if (self.root / path).parent.is_symlink():
            raise NotFound("version", f"one of model {name}", "a symbolic link")
        return read_regular(self.root / path, limit)

    def has(self, path: str) -> bool:
        return (self.root / path).is_file()

    def lease(self, manifest: Manifest) -> Lease:
        """Return the version's folder. Another process may delete it, though one that has read it
        goes on."""
        return Lease(self.root, self.folder(manifest.name) / manifest.version)

    def close(self) -> None: ...

    def check_writable(self) -> None: ...

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        check_is_new_name(name)
        folder = self.folder(name)
        make_folder(folder)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in [*folder.glob(".draft-*"), *folder.glob(".deleted-*")]:
                shutil.rmtree(left, ignore_errors=True)
            yield

    def last_number(self, parent: str) -> int:
        name, *of_reports = parent.split("/")
        if of_reports:
            return max(self.reports(name, of_reports[-1]), default=0)
        deleted = self.written(name, LAST_DELETED)
        last = int(deleted.text) if deleted is not None and is_version(deleted.text) else 0
        return max(last, *map(int, self.versions(name)), 0)

    def create(self, path: str, files: Mapping[str, bytes | Original]) -> bool:
        """Write to a draft that becomes the folder of `path`; under the lock its number is free."""
        target = self.root / path
        folder = self.folder(path.split("/")[0])
        if target.is_dir() and not target.is_symlink():
            return False
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(prefix=".draft-", dir=folder))
        for file, content in files.items():
            if isinstance(content, Original):
                self._share_or_copy(content, draft / file)
            else:
                write_synced(draft / file, content)
        draft.chmod(0o755)
        sync_folder(draft)
        draft.rename(target)
        sync_folder(target.parent)
        return True

    def _share_or_copy(self, original: Original, target: Path) -> None:
        """Make `target` a link to a published file of this content, or a synced copy."""
        spec = original.spec
        for alike in original.alike:
            with suppress(OSError):  # deleted meanwhile; a file system may have no links
                os.link(self.root / alike, target, follow_symlinks=False)
                if spec.difference(*digest(target, spec.size)) is None:
                    return
                target.unlink()
        with open_regular(original.path) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, PIECE_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
        original.check(target.name, *digest(target, spec.size))

    def written(self, name: str, alias: str) -> Written | None:
        folder = self.folder(name) / ALIASES
        try:
            content = b"" if folder.is_symlink() else read_regular(folder / alias, MAX_ALIAS_BYTES)
        except OSError:
            return None
        text = content.decode("ascii", errors="replace")
        return Written(text.strip(), text)

    def replace(self, name: str, alias: str, text: str, before: Written | None) -> bool:
        if self.written(name, alias) != before:
            return False
        aliases = self.folder(name) / ALIASES
        make_folder(aliases)
        for left in aliases.glob(".draft-*"):
            left.unlink()
        handle, draft = mkstemp(prefix=".draft-", dir=aliases)
        os.close(handle)
        write_synced(Path(draft), text.encode())
        Path(draft).chmod(0o644)
        Path(draft).rename(aliases / alias)
        sync_folder(aliases)
        return True

    def overwrite(self, path: str, content: bytes) -> None:
        target = self.root / path
        draft = Path(mkdtemp(prefix=".draft-", dir=self.folder(path.split("/")[0])))
        write_synced(draft / target.name, content)
        (draft / target.name).chmod(0o644)
        (draft / target.name).rename(target)
        sync_folder(target.parent)
        draft.rmdir()

    def drop_alias(self, name: str, alias: str) -> None:
        aliases = self.folder(name) / ALIASES
        (aliases / alias).unlink(missing_ok=True)
        sync_folder(aliases)

    def delete(self, path: str) -> None:
        """Rename a version away, then delete it and its reports; or delete a report."""
        target = self.root / path
        name, *_, number = path.split("/")
        folder = self.folder(name)
        if target.parent != folder:
            shutil.rmtree(target)
            return
        shutil.rmtree(folder / EVIDENCE / number, ignore_errors=True)
        grave = folder / f".deleted-{number}"
        target.rename(grave)  # gone at once, whatever happens next
        sync_folder(folder)
        shutil.rmtree(grave)

    def folder(self, name: str) -> Path:
        check_is_known_name(name)
        folder = self.root / name
        if folder.is_symlink():
            raise NotFound("model", "a folder", f"{name}, a symbolic link, which the store skips")
        return folder


def _folders(folder: Path) -> list[str]:
    return [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
