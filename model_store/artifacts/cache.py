"""Copies of versions in a folder of this machine, verified when they are made, of bounded size
together.

The folder has a store's layout, so that a version in it is opened like any other. Who uses a
version holds a lock on its folder; what no one holds may be deleted to make room, first what no
alias names, then what was used longest ago.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from model_store.artifacts.disk import digest, make_folder, read_regular, write_synced
from model_store.artifacts.manifest import ENCODER, FileSpec, Manifest
from model_store.artifacts.objects import Objects
from model_store.artifacts.signature import SIGNATURE, SIGNATURE_BYTES
from model_store.artifacts.storage import MANIFEST, Lease, is_name, is_version
from model_store.errors import StoreError

LISTS = ".lists.json"
MAX_LISTS_BYTES = 1 << 24
MAX_SEAL_BYTES = 1 << 20
DRAFT = ".draft-"

Named = Mapping[str, Mapping[str, str]]


class HeldLease(Lease):
    """A copy that is not deleted while its folder is locked."""

    def __init__(self, root: Path, folder: Path, delete: Callable[[], None]) -> None:
        """Lock a copy; raises FileNotFoundError if there is none (any more)."""
        super().__init__(root, folder)
        self._delete = delete
        self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH)
            if os.fstat(self._handle).st_ino != folder.stat().st_ino:
                raise FileNotFoundError(2, "deleted meanwhile")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def discard(self) -> bool:
        self.close()
        self._delete()
        return True

    def __del__(self) -> None:
        if getattr(self, "_handle", -1) >= 0:
            self.close()


class Cache:
    """Copies of one bucket's versions. Several threads and processes may share it."""

    def __init__(self, folder: Path, url: str, max_bytes: int) -> None:
        self.root = folder / hashlib.sha256(url.encode()).hexdigest()[:16]
        self.max_bytes = max_bytes
        self._verified: set[str] = set()  # digests of the copies that this process has verified
        self._kept: str | None = None  # what is written of lists

    def lease(self, manifest: Manifest, objects: Objects, named: Named | None = None) -> Lease:
        """Return a copy of a version, verified by this process, made if there is none.

        `named` says by model what each alias names.

        Raises:
            BrokenArtifact: if what is read is not what the manifest says.
            StoreError: if there is no room for it, or the folder cannot be written to.
        """
        folder = self.root / manifest.name / manifest.version
        try:
            lease = self._find(folder, manifest)
            if lease is None:
                with self._making():  # another may have made it while this one waited
                    lease = self._find(folder, manifest)
                    lease = lease or self._make(folder, manifest, objects, named or {})
            os.utime(folder)
        except OSError as error:
            expected = f"a folder with room for {manifest.label}"
            got = error.strerror or "an error"
            raise StoreError(f"DUBITO_CACHE: expected {expected}, got: {got}") from None
        return lease

    def _make(self, folder: Path, manifest: Manifest, objects: Objects, named: Named) -> Lease:
        self._delete(folder, even_held=True)  # what is there is not this version
        itself = len(manifest.model_dump_json(indent=2).encode()) + SIGNATURE_BYTES
        self._make_room(sum(spec.size for spec in manifest.files.values()) + itself, named)
        make_folder(folder.parent)
        draft = Path(mkdtemp(prefix=DRAFT, dir=folder.parent))
        self._fill(draft, manifest, objects)
        draft.chmod(0o755)
        draft.rename(folder)
        self._verified.add(manifest.digest)
        return self._hold(folder, manifest)

    def _find(self, folder: Path, manifest: Manifest) -> Lease | None:
        try:
            lease = self._hold(folder, manifest)
            written = json.loads(read_regular(folder / MANIFEST, MAX_LISTS_BYTES))
        except (OSError, ValueError):
            return None
        is_whole = isinstance(written, dict) and written.get("digest") == manifest.digest
        if is_whole and manifest.digest not in self._verified:
            try:
                is_whole = all(
                    spec.difference(*digest(folder / file, spec.size)) is None
                    for file, spec in manifest.files.items()
                )
            except OSError:
                is_whole = False
        if not is_whole:
            lease.close()
            return None
        self._verified.add(manifest.digest)
        return lease

    def _fill(self, draft: Path, manifest: Manifest, objects: Objects) -> None:
        of_version = f"{manifest.name}/{manifest.version}"
        for file, spec in manifest.files.items():
            if file == ENCODER and self._link(draft / file, spec):
                continue
            made, size = hashlib.sha256(), 0
            try:
                with (draft / file).open("wb") as copy:
                    for part in objects.pieces(f"{of_version}/{file}"):
                        size += len(part)
                        if size > spec.size:
                            what = (
                                f"{spec.size} bytes as in the manifest, got more than {spec.size}"
                            )
                            raise manifest.broken(file, f"expected {what}")
                        made.update(part)
                        copy.write(part)
            except FileNotFoundError as error:
                raise manifest.broken(file, error.strerror or "No such file or directory") from None
            if difference := spec.difference(size, made.hexdigest()):
                raise manifest.broken(file, difference)
        for file in (SIGNATURE, MANIFEST):
            found = objects.get(f"{of_version}/{file}", MAX_SEAL_BYTES)
            if found is not None:
                write_synced(draft / file, found.content)

    def _link(self, target: Path, spec: FileSpec) -> bool:
        """Link a file of another version's copy that has this content, if there is one."""
        for _, _, folder in self._copies():
            with suppress(OSError):
                os.link(folder / target.name, target, follow_symlinks=False)
                if spec.difference(*digest(target, spec.size)) is None:
                    return True
                target.unlink()
        return False

    def read(self, path: str, limit: int) -> bytes | None:
        try:
            return read_regular(self.root / path, limit)
        except OSError:
            return None

    def _hold(self, folder: Path, manifest: Manifest) -> Lease:
        def discard() -> None:
            with self._making():
                self._verified.discard(manifest.digest)
                self._delete(folder, even_held=True)

        return HeldLease(self.root, folder, discard)

    def keep_lists(
        self, versions: dict[str, list[str]], aliases: dict[str, dict[str, str]]
    ) -> None:
        """Keep what a look at the bucket said by model, for a start without it."""
        text = json.dumps({"versions": versions, "aliases": aliases}, sort_keys=True)
        if text == self._kept:
            return
        with suppress(OSError):  # a disk without room: then the next start needs the bucket
            make_folder(self.root)
            draft = self.root / f"{DRAFT}{os.getpid()}"
            draft.write_text(text)
            draft.replace(self.root / LISTS)
            self._kept = text

    def lists(self) -> tuple[dict[str, list[str]], dict[str, dict[str, str]]] | None:
        """Return what an earlier look said by model: versions of which there is a copy, and
        aliases."""
        try:
            content = json.loads(read_regular(self.root / LISTS, MAX_LISTS_BYTES))
            versions, aliases = {}, {}
            for name, numbers in content["versions"].items():
                if is_name(name) and all(map(is_version, numbers)):
                    folder, of_name = self.root / name, content["aliases"].get(name, {})
                    if there := [n for n in numbers if (folder / n / MANIFEST).is_file()]:
                        versions[name] = there
                        aliases[name] = {str(alias): str(of) for alias, of in of_name.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return versions, aliases

    def _make_room(self, needed: int, named: Named) -> None:
        """Delete copies that nobody holds until there is room; raises StoreError if there cannot
        be."""

        def order(copy: tuple[int, int, Path]) -> tuple[bool, int]:
            used, _, folder = copy
            return folder.name in named.get(folder.parent.name, {}).values(), used

        copies = sorted(self._copies(), key=order)
        total = sum(size for _, size, _ in copies)
        for _, size, folder in copies:
            if total + needed <= self.max_bytes:
                return
            if self._delete(folder):
                total -= size
        if total + needed > self.max_bytes:
            raise StoreError(
                f"DUBITO_CACHE_BYTES: expected room for {needed} bytes of a version, got "
                f"{self.max_bytes} bytes of which {total} are in use"
            )

    def _copies(self) -> list[tuple[int, int, Path]]:
        found = []
        for folder in self.root.glob("*/*"):
            if is_version(folder.name) and folder.is_dir():
                with suppress(OSError):
                    size = sum(file.stat().st_size for file in folder.iterdir())
                    found.append((folder.stat().st_mtime_ns, size, folder))
        return found

    def _delete(self, folder: Path, even_held: bool = False) -> bool:
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return not folder.exists()
        try:
            if not even_held:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            grave = Path(mkdtemp(prefix=DRAFT, dir=folder.parent))
            folder.rename(grave / folder.name)
        except OSError:
            return False
        finally:
            os.close(handle)
        shutil.rmtree(grave, ignore_errors=True)
        return True

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Be the only one that makes and deletes copies, with what killed ones left behind cleared
        away."""
        make_folder(self.root)
        with (self.root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                for left in self.root.glob(f"*/{DRAFT}*"):
                    shutil.rmtree(left, ignore_errors=True)
