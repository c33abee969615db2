"""A store in a folder."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp, mkstemp

from model_store.artifacts.disk import (
    PIECE_BYTES,
    digest,
    link_file,
    make_folder,
    open_regular,
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
    AliasContent,
    Files,
    Lease,
    Original,
    Storage,
    check_is_known_name,
    check_is_new_name,
    deleted_number,
    is_name,
    is_version,
)
from model_store.errors import NotFound, StoreUnreachable


class Folder(Storage):
    """A storage backend on a local or mounted file system.

    A version is written to a hidden folder, synced and renamed. Aliases are small files, replaced
    by renaming. Each model has a lock for its writers.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._had_entries = self._is_gone = False

    @property
    def scratch(self) -> Path:
        return self.root

    def locate(self, path: str) -> str:
        return str(self.root / path)

    @property
    def has_listing(self) -> bool:
        return not self._is_gone

    def refresh(self) -> None:
        """Raise StoreUnreachable if the folder is suddenly empty, e.g. after a lost mount."""
        has_entries = self.root.is_dir() and any(True for _ in self.root.iterdir())
        self._had_entries |= has_entries
        self._is_gone = self._had_entries and not has_entries
        if self._is_gone:
            raise StoreUnreachable(f"the store {self.root} is gone, or empty")

    def names(self) -> list[str]:
        return [name for name in _folders(self.root) if is_name(name) and self.numbers(name)]

    def numbers(self, parent: str) -> list[int]:
        folder = self._model_folder(parent)
        for part in parent.split("/")[1:]:
            folder /= part
            if folder.is_symlink():
                return []
        return [int(number) for number in _folders(folder) if is_version(number)]

    def aliases(self, name: str) -> dict[str, str]:
        folder = self._model_folder(name) / ALIASES
        if folder.is_symlink() or not folder.is_dir():
            return {}
        aliases = {}
        for entry in os.scandir(folder):
            if is_name(entry.name) and entry.is_file(follow_symlinks=False):
                aliases[entry.name] = _read_text(Path(entry.path)).strip()
        return aliases

    def read(self, path: str, limit: int) -> bytes:
        name = self._model_folder(path).name
        if (self.root / path).parent.is_symlink():
            raise NotFound("version", f"one of model {name}", "a symbolic link")
        return read_regular(self.root / path, limit)

    def lease(self, manifest: Manifest) -> Lease:
        return Lease(self.root, self._model_folder(manifest.name) / manifest.version)

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        check_is_new_name(name)
        folder = self._model_folder(name)
        make_folder(folder)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in [*folder.glob(".draft-*"), *folder.glob(".deleted-*")]:
                shutil.rmtree(leftover, ignore_errors=True)
            yield

    def create(self, parent: str, files_for: Callable[[int], Files]) -> int:
        """Write a version to a hidden folder and rename it to the next free number."""
        numbers = self.numbers(parent)
        if "/" not in parent:
            numbers.append(deleted_number(self.read_alias(parent, LAST_DELETED)))
        number = max(numbers, default=0) + 1
        target = self.root / parent / str(number)
        files = files_for(number)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(prefix=".draft-", dir=self._model_folder(parent)))
        for file, content in files.items():
            if isinstance(content, Original):
                self._link_or_copy(content, draft / file)
            else:
                write_synced(draft / file, content)
        draft.chmod(0o755)
        sync_folder(draft)
        draft.rename(target)
        sync_folder(target.parent)
        return number

    def _link_or_copy(self, original: Original, target: Path) -> None:
        """Hard-link an identical published file to `target`, or write a synced copy."""
        spec = original.spec
        if any(link_file(self.root / path, target, spec) for path in original.find_duplicates()):
            return
        with open_regular(original.path) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, PIECE_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
        original.check(target.name, *digest(target, spec.size))

    def read_alias(self, name: str, alias: str) -> AliasContent | None:
        folder = self._model_folder(name) / ALIASES
        try:
            text = "" if folder.is_symlink() else _read_text(folder / alias)
        except OSError:
            return None
        return AliasContent(text.strip(), text)

    def replace_alias(self, name: str, alias: str, text: str, before: AliasContent | None) -> bool:
        if self.read_alias(name, alias) != before:
            return False
        aliases = self._model_folder(name) / ALIASES
        make_folder(aliases)
        for leftover in aliases.glob(".draft-*"):
            leftover.unlink()
        handle, draft = mkstemp(prefix=".draft-", dir=aliases)
        os.close(handle)
        replace_file(aliases / alias, text.encode(), Path(draft))
        return True

    def delete_alias(self, name: str, alias: str) -> None:
        aliases = self._model_folder(name) / ALIASES
        (aliases / alias).unlink(missing_ok=True)
        sync_folder(aliases)

    def overwrite(self, path: str, content: bytes) -> None:
        draft = Path(mkdtemp(prefix=".draft-", dir=self._model_folder(path)))
        target = self.root / path
        replace_file(target, content, draft / target.name)
        draft.rmdir()

    def delete(self, path: str) -> None:
        """Delete a report, or a version and its reports."""
        folder, target = self._model_folder(path), self.root / path
        if target.parent != folder:
            shutil.rmtree(target)
            return
        shutil.rmtree(folder / REPORTS / target.name, ignore_errors=True)
        grave = folder / f".deleted-{target.name}"
        target.rename(grave)  # hides it from readers
        sync_folder(folder)
        shutil.rmtree(grave)

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
    return read_regular(path, MAX_ALIAS_BYTES).decode("ascii", errors="replace")
