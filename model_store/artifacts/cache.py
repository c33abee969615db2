"""A size-limited local cache for the versions in a bucket."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from model_store.artifacts.disk import (
    Inode,
    file_sizes,
    link_file,
    locked,
    make_folder,
    open_regular,
    read_regular,
    replace_file,
    write_synced,
)
from model_store.artifacts.manifest import ENCODER, Manifest, Name
from model_store.artifacts.objects import Objects
from model_store.artifacts.signature import SIGNATURE, SIGNATURE_BYTES
from model_store.artifacts.storage import MANIFEST, Lease
from model_store.errors import StoreError

LISTING = ".lists.json"
MAX_LISTING_BYTES = 1 << 24
MAX_SEAL_BYTES = 1 << 20
DRAFT = ".draft-"
LOCK = ".lock"

Aliases = Mapping[str, Mapping[str, str]]  # the version of each alias, by model


class SavedListing(BaseModel):
    versions: dict[Name, list[Annotated[int, Field(ge=1)]]]
    aliases: dict[Name, dict[str, str]]


class Copy(NamedTuple):
    last_used: int  # nanoseconds
    sizes: dict[Inode, int]  # bytes
    folder: Path


class Cache:
    """A cache of versions from a bucket. It uses the store's folder layout.

    Threads and processes can share the folder. Downloads run one after another. To free space, the
    cache deletes unlocked copies: first those without an alias, then the least recently used ones.
    """

    def __init__(self, folder: Path, objects: Objects, max_bytes: int) -> None:
        self.root = folder / hashlib.sha256(objects.url.encode()).hexdigest()[:16]
        self.objects = objects
        self.max_bytes = max_bytes
        self._aliases: Aliases = {}  # from the last listing
        self._saved_listing = ""

    def lease(self, manifest: Manifest) -> Lease:
        """Return a locked copy of a version, downloading it if necessary.

        `ModelStore.open` verifies its files again, and discards the copy if it is damaged.

        Raises:
            BrokenArtifact: if the bucket's files do not match the manifest.
            StoreError: if the folder is full or not writable.
        """
        folder = self.root / manifest.name / manifest.version
        try:
            lease = self._find(folder, manifest)
            if lease is None:
                with locked(self.root / LOCK):
                    # Another thread or process may have made the copy.
                    lease = self._find(folder, manifest) or self._download(folder, manifest)
            os.utime(folder)
        except OSError as error:
            expected = f"a folder with room for {manifest.label}"
            received = error.strerror or "an error"
            raise StoreError(f"DUBITO_CACHE: expected {expected}, got: {received}") from None
        return lease

    def discard(self, lease: Lease) -> None:
        """Delete a damaged copy."""
        lease.close()
        with locked(self.root / LOCK):
            shutil.rmtree(lease.folder, ignore_errors=True)

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
        with suppress(OSError), locked(self.root / f"{LISTING}.lock"):  # the disk may be full
            replace_file(self.root / LISTING, text.encode())
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
        """Lock a version's copy to prevent its deletion. Return None if there is none."""
        try:
            lock = open_regular(folder / MANIFEST)
            lease = Lease(self.root, folder, lock)
            fcntl.flock(lock, fcntl.LOCK_SH)
            is_current = os.path.samestat(os.fstat(lock.fileno()), (folder / MANIFEST).stat())
            copied = Manifest.model_validate_json(lock.read(MAX_SEAL_BYTES))
        except (OSError, ValueError):
            return None
        return lease if is_current and copied.digest == manifest.digest else None

    def _download(self, folder: Path, manifest: Manifest) -> Lease:
        for leftover in self.root.glob(f"*/{DRAFT}*"):  # of a killed process
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # another version, or a damaged copy
        seals = len(manifest.model_dump_json(indent=2).encode()) + SIGNATURE_BYTES
        self._make_room(sum(spec.size for spec in manifest.files.values()) + seals)
        make_folder(folder.parent)
        draft, path = Path(mkdtemp(prefix=DRAFT, dir=folder.parent)), folder.relative_to(self.root)
        try:
            encoders = [copy.folder / ENCODER for copy in self._copies()]
            for file, spec in manifest.files.items():
                is_shared = file == ENCODER and any(
                    link_file(encoder, draft / ENCODER, spec) for encoder in encoders
                )
                if not is_shared:
                    self._download_file(draft / file, f"{path}/{file}", manifest)
            for file in (SIGNATURE, MANIFEST):
                seal = self.objects.get(f"{path}/{file}", MAX_SEAL_BYTES)
                if seal is not None:
                    write_synced(draft / file, seal.content)
            draft.chmod(0o755)
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        lease = self._find(folder, manifest)
        if lease is None:
            raise manifest.broken(MANIFEST, "it changed during the download")
        return lease

    def _download_file(self, target: Path, path: str, manifest: Manifest) -> None:
        file, sha256, size = target.name, hashlib.sha256(), 0
        spec = manifest.files[file]
        try:
            with target.open("wb") as copy:
                for piece in self.objects.pieces(path):
                    size += len(piece)
                    if size > spec.size:
                        expected = f"{spec.size} bytes as in the manifest"
                        raise manifest.broken(file, f"expected {expected}, got more than that")
                    sha256.update(piece)
                    copy.write(piece)
        except FileNotFoundError as error:
            raise manifest.broken(file, error.strerror or "No such file or directory") from None
        if difference := spec.difference(size, sha256.hexdigest()):
            raise manifest.broken(file, difference)

    def _make_room(self, needed: int) -> None:
        """Delete unlocked copies until `needed` bytes are free. Otherwise raise StoreError."""

        def order(copy: Copy) -> tuple[bool, int]:
            aliased_versions = self._aliases.get(copy.folder.parent.name, {}).values()
            return copy.folder.name in aliased_versions, copy.last_used

        remaining = sorted(self._copies(), key=order)
        for copy in [*remaining]:
            if _total_size(remaining) + needed <= self.max_bytes:
                return
            if self._delete(copy.folder):
                remaining.remove(copy)
        total = _total_size(remaining)
        if total + needed > self.max_bytes:
            raise StoreError(
                f"DUBITO_CACHE_BYTES: expected room for {needed} bytes of a version, got "
                f"{self.max_bytes} bytes of which {total} are in use"
            )

    def _copies(self) -> list[Copy]:
        copies = []
        for folder in self.root.glob("*/[1-9]*"):
            with suppress(OSError):
                copies.append(Copy(folder.stat().st_mtime_ns, file_sizes(folder), folder))
        return copies

    def _delete(self, folder: Path) -> bool:
        """Delete a copy. Return False if it is locked by a reader."""
        try:
            with open_regular(folder / MANIFEST) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        except FileNotFoundError:  # incomplete
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            return False
        return True


def _total_size(copies: list[Copy]) -> int:
    """Return the total size of all cached files, counting hard-linked files once."""
    return sum({inode: size for copy in copies for inode, size in copy.sizes.items()}.values())
