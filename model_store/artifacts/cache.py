"""A size-limited local cache for the versions in a bucket."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp, mkstemp
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from model_store.artifacts.disk import (
    folder_bytes,
    locked,
    make_folder,
    open_regular,
    read_regular,
    verify,
    write_synced,
)
from model_store.artifacts.manifest import Manifest, Name
from model_store.artifacts.objects import Objects
from model_store.artifacts.signature import SIGNATURE, SIGNATURE_BYTES
from model_store.artifacts.storage import MANIFEST, Lease
from model_store.errors import StoreError

LISTING = ".lists.json"
MAX_LISTING_BYTES = 1 << 24
MAX_SEAL_BYTES = 1 << 20
DRAFT = ".draft-"


class SavedListing(BaseModel):
    versions: dict[Name, list[Annotated[int, Field(ge=1)]]]
    aliases: dict[Name, dict[str, str]]


class Cache:
    """A cache of verified versions from a bucket. It uses the store's folder layout.

    Threads and processes can share the folder. To free space, the cache deletes unlocked copies:
    first those without an alias, then the least recently used ones.
    """

    def __init__(self, folder: Path, objects: Objects, max_bytes: int) -> None:
        self.root = folder / hashlib.sha256(objects.url.encode()).hexdigest()[:16]
        self.objects = objects
        self.max_bytes = max_bytes
        self._aliases: dict[str, dict[str, str]] = {}  # from the last listing
        self._verified: set[str] = set()  # digests
        self._saved_listing = ""

    def lease(self, manifest: Manifest) -> Lease:
        """Return a verified copy of a version, downloading it if necessary.

        Raises:
            BrokenArtifact: if the bucket's files do not match the manifest.
            StoreError: if the folder is full or not writable.
        """
        folder = self.root / manifest.name / manifest.version
        try:
            lease = self._find(folder, manifest)
            if lease is None:
                # Another thread or process may have made the copy.
                with locked(folder.parent / f".lock-{folder.name}"):
                    lease = self._find(folder, manifest) or self._download(folder, manifest)
            os.utime(folder)
        except OSError as error:
            expected = f"a folder with room for {manifest.label}"
            received = error.strerror or "an error"
            raise StoreError(f"DUBITO_CACHE: expected {expected}, got: {received}") from None
        return lease

    def read(self, path: str, limit: int) -> bytes | None:
        try:
            return read_regular(self.root / path, limit)
        except OSError:
            return None

    def save_listing(
        self, versions: dict[str, list[int]], aliases: dict[str, dict[str, str]]
    ) -> None:
        """Save a listing so that the service can start while the bucket is unreachable."""
        self._aliases = aliases
        text = SavedListing.model_construct(versions=versions, aliases=aliases).model_dump_json()
        if text == self._saved_listing:
            return
        with suppress(OSError):  # the disk may be full
            make_folder(self.root)
            # Processes of several containers share the folder and can have equal numbers.
            handle, draft = mkstemp(prefix=DRAFT, dir=self.root)
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(draft).replace(self.root / LISTING)
            self._saved_listing = text

    def saved_listing(self) -> tuple[dict[str, list[int]], dict[str, dict[str, str]]] | None:
        """Return the saved aliases and the saved versions that have a local copy."""
        content = self.read(LISTING, MAX_LISTING_BYTES)
        try:
            saved = SavedListing.model_validate_json(content or b"")
        except ValidationError:
            return None
        versions = {}
        for name, numbers in saved.versions.items():
            copied = [n for n in numbers if (self.root / name / f"{n}" / MANIFEST).is_file()]
            if copied:
                versions[name] = copied
        self._aliases = saved.aliases
        return versions, saved.aliases

    def _find(self, folder: Path, manifest: Manifest) -> Lease | None:
        try:
            lease = self._lock(folder)
        except OSError:
            return None
        if not self._is_valid(folder, manifest):
            lease.close()
            return None
        self._verified.add(manifest.digest)
        return lease

    def _lock(self, folder: Path) -> Lease:
        """Lock a copy to prevent its deletion. Raise OSError if it does not exist."""
        lock = open_regular(folder / MANIFEST)
        lease = Lease(self.root, folder, lock)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.fstat(lock.fileno()).st_ino != (folder / MANIFEST).stat().st_ino:
            raise FileNotFoundError(2, "deleted")
        return lease

    def discard(self, lease: Lease) -> None:
        lease.close()
        with self._cleaning():
            self._delete(lease.folder, even_locked=True)

    def _is_valid(self, folder: Path, manifest: Manifest) -> bool:
        try:
            copied = Manifest.model_validate_json(read_regular(folder / MANIFEST, MAX_SEAL_BYTES))
            if copied.digest != manifest.digest or manifest.digest in self._verified:
                return copied.digest == manifest.digest
            for file, spec in manifest.files.items():
                verify(folder / file, spec)
        except (OSError, ValueError):
            return False
        return True

    def _download(self, folder: Path, manifest: Manifest) -> Lease:
        seals = len(manifest.model_dump_json(indent=2).encode()) + SIGNATURE_BYTES
        with self._cleaning():
            self._delete(folder, even_locked=True)  # another version, or a damaged copy
            self._make_room(sum(spec.size for spec in manifest.files.values()) + seals)
            draft = Path(mkdtemp(prefix=DRAFT, dir=folder.parent))
            (draft / MANIFEST).touch()
            lease = self._lock(draft)
            for file, spec in manifest.files.items():  # reserve the space
                (draft / file).touch()
                os.truncate(draft / file, spec.size)
        try:
            path = f"{manifest.name}/{manifest.version}"
            for file in manifest.files:
                self._download_file(draft / file, f"{path}/{file}", manifest)
            for file in (SIGNATURE, MANIFEST):
                seal = self.objects.get(f"{path}/{file}", MAX_SEAL_BYTES)
                if seal is not None:
                    write_synced(draft / file, seal.content)
            draft.chmod(0o755)
            draft.rename(folder)
        except BaseException:
            self.discard(lease)
            raise
        self._verified.add(manifest.digest)
        lease.folder = folder
        return lease

    def _download_file(self, target: Path, path: str, manifest: Manifest) -> None:
        file, sha256, size = target.name, hashlib.sha256(), 0
        spec = manifest.files[file]
        try:
            with target.open("r+b") as copy:
                for piece in self.objects.pieces(path):
                    size += len(piece)
                    if size > spec.size:
                        expected = f"{spec.size} bytes as in the manifest"
                        raise manifest.broken(file, f"expected {expected}, got more than that")
                    sha256.update(piece)
                    copy.write(piece)
        except FileNotFoundError as error:
            raise manifest.broken(file, error.strerror or "No such file or directory") from None
        try:
            spec.check(size, sha256.hexdigest())
        except ValueError as error:
            raise manifest.broken(file, str(error)) from None

    def _make_room(self, needed: int) -> None:
        """Delete unlocked copies until `needed` bytes are free. Otherwise raise StoreError."""

        def order(copy: Path) -> tuple[bool, int]:
            aliased_versions = self._aliases.get(copy.parent.name, {}).values()
            return copy.name in aliased_versions, copy.stat().st_mtime_ns  # of the last lease

        total = folder_bytes(self.root)
        for copy in sorted(self.root.glob("*/[1-9]*"), key=order):
            if total + needed <= self.max_bytes:
                return
            size = folder_bytes(copy)
            if self._delete(copy):
                total -= size
        if total + needed > self.max_bytes:
            raise StoreError(
                f"DUBITO_CACHE_BYTES: expected room for {needed} bytes of a version, got "
                f"{self.max_bytes} bytes of which {total} are in use"
            )

    def _delete(self, folder: Path, even_locked: bool = False) -> bool:
        """Delete a copy. Return False if it is locked by a reader."""
        with ExitStack() as stack:
            try:
                if not even_locked and (folder / MANIFEST).exists():
                    lock = stack.enter_context(open_regular(folder / MANIFEST))
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                trash = Path(mkdtemp(prefix=DRAFT, dir=folder.parent))
                folder.rename(trash / folder.name)
            except OSError:
                return not folder.exists()
        shutil.rmtree(trash, ignore_errors=True)
        return True

    @contextmanager
    def _cleaning(self) -> Iterator[None]:
        with locked(self.root / ".lock"):
            try:
                yield
            finally:
                for leftover in self.root.glob(f"*/{DRAFT}*"):
                    self._delete(leftover)
                for leftover in self.root.glob(f"{DRAFT}*"):
                    leftover.unlink(missing_ok=True)
