"""The model store: `<root>/<name>/<version>/`, written whole or not at all, verified when read.

A version is written to a hidden folder beside its final place, synced, and renamed; it never changes afterwards, but
may get a signature.
Aliases are one small file each, replaced by renaming. Writers of one name take turns by a lock; readers need none.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp, mkstemp
from typing import TYPE_CHECKING, BinaryIO

import orjson
from pydantic import ValidationError

from model_store.artifacts.manifest import (
    ALL_FILES,
    FILES,
    FORMAT_VERSION,
    NAME_PATTERN,
    NO_DIGEST,
    TOKENIZER,
    TRAINING_ROWS,
    Description,
    FileSpec,
    Manifest,
    manifest_digest,
)
from model_store.artifacts.signature import SIGNATURE, SIGNATURE_BYTES, is_signature, signature
from model_store.errors import BrokenArtifact, InvalidInput, NotFound, StoreError, UnsupportedFormat

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MAX_MANIFEST_BYTES = 1 << 20
PIECE_BYTES = 1 << 20  # of a file that is verified and not kept
KEPT = (*FILES, TRAINING_ROWS, TOKENIZER)  # not the encoder, which may be large: it is loaded from its file
LATEST = "latest"
LAST_DELETED = ".last-deleted"  # beside the aliases: the highest number of a version that was the newest and is gone
EVIDENCE = "evidence"  # the folder of evaluation reports: `model_store.artifacts.report`


@dataclass(frozen=True)
class Artifact:
    """A version read and verified: its manifest, and the bytes of the files that were asked for."""

    manifest: Manifest
    files: dict[str, bytes]
    folder: Path  # of what was verified and not kept


class ModelStore:
    """Models by name and version under a root folder."""

    def __init__(self, root: Path, trusted: "Ed25519PublicKey | None" = None) -> None:
        """Begin; with a public key, versions that are not signed by its private one count as broken."""
        self.root = root
        self.trusted = trusted

    # Reading

    def names(self) -> list[str]:
        """Return the names of all models with at least one version, sorted."""
        if not self.root.is_dir():
            return []
        found = [entry.name for entry in os.scandir(self.root) if _is_folder(entry) and is_name(entry.name)]
        return sorted(name for name in found if self.versions(name))

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, oldest first; empty if there is none of that name."""
        folder = self.folder(name)
        if not folder.is_dir():
            return []
        return sorted((e.name for e in os.scandir(folder) if _is_folder(e) and is_version(e.name)), key=int)

    def aliases(self, name: str) -> dict[str, str]:
        """Return the version that each alias names. `latest` is the newest version unless it was moved."""
        named = self._named(name)
        versions = self.versions(name)
        if not {*named.values()} <= {*versions}:  # moved and deleted between the two looks, or it names nothing
            named = self._named(name)
            versions = self.versions(name)
        newest = {LATEST: versions[-1]} if versions else {}
        return newest | {alias: version for alias, version in named.items() if version in versions}

    def _named(self, name: str) -> dict[str, str]:
        """Return what is written of each alias. Read before `versions`: what is published later is listed there."""
        folder = self.folder(name) / "aliases"
        named = {}
        for entry in os.scandir(folder) if folder.is_dir() and not folder.is_symlink() else ():
            if is_name(entry.name) and entry.is_file(follow_symlinks=False):
                named[entry.name] = Path(entry.path).read_text(encoding="ascii", errors="replace").strip()
        return named

    def resolve(self, name: str, version: str = LATEST) -> str:
        """Return the version number that a number or an alias names.

        Raises:
            NotFound: if there is no such model, version or alias.
        """
        versions = self.versions(name)
        if not versions:
            raise NotFound(f"model: expected one of {self.names()}, got {name!r}")
        if version in versions:
            return version
        aliases = self.aliases(name)
        if version in aliases:
            return aliases[version]
        raise NotFound(f"version: expected one of {[*versions, *sorted(aliases)]} of model {name}, got {version!r}")

    def manifest(self, name: str, version: str) -> Manifest:
        """Return the manifest of a version (a number). The files that it lists are not verified.

        Raises:
            NotFound: if `version` is not a number.
            BrokenArtifact: if the manifest is missing, not valid or not the one that was published, or if it is not
                signed by the trusted key where there is one.
            UnsupportedFormat: if it was written by a newer format than this reader's.
        """
        path = self.folder(name) / version / "manifest.json"
        if not is_version(version) or path.parent.is_symlink():
            raise NotFound(f"version: expected a version number of model {name}, got {version[:80]!r}")
        try:
            text = read_regular(path, MAX_MANIFEST_BYTES)
            content = json.loads(text)
            orjson.dumps(content)  # so that it can be given on: integers of 64 bits, no lone surrogates
        except (OSError, ValueError, TypeError, RecursionError) as error:  # the last: arrays in arrays without end
            raise BrokenArtifact(name, version, "manifest.json", _reason(error)) from None
        written_as = content.get("format_version") if isinstance(content, dict) else None
        if isinstance(written_as, int) and written_as != FORMAT_VERSION:
            raise UnsupportedFormat(
                f"model {name} version {version}: manifest.json: format_version: expected {FORMAT_VERSION}, "
                f"got {written_as}: read it with a Dubito that knows it, or fit the model again"
            )
        try:
            manifest = Manifest.model_validate_json(text)
        except ValidationError as error:
            raise BrokenArtifact(name, version, "manifest.json", first_error(error)) from None
        if (manifest.name, manifest.version) != (name, version):
            raise BrokenArtifact(
                name, version, "manifest.json", f"it describes {manifest.name} version {manifest.version}"
            )
        if manifest_digest(text, manifest.digest) != manifest.digest:
            raise BrokenArtifact(name, version, "manifest.json", "its SHA-256 is not its digest")
        if self.trusted is not None:
            self._check_signature(manifest, self.trusted)
        return manifest

    def _check_signature(self, manifest: Manifest, trusted: "Ed25519PublicKey") -> None:
        name, version = manifest.name, manifest.version
        try:
            content = read_regular(self.folder(name) / version / SIGNATURE, SIGNATURE_BYTES)
        except FileNotFoundError:
            raise BrokenArtifact(name, version, SIGNATURE, "there is none: the version is not signed") from None
        except OSError as error:
            raise BrokenArtifact(name, version, SIGNATURE, _reason(error)) from None
        if not is_signature(content, manifest, trusted):
            raise BrokenArtifact(name, version, SIGNATURE, "it is no signature of this version by the trusted key")

    def open(self, name: str, version: str, wanted: tuple[str, ...] = KEPT) -> Artifact:
        """Read a version (a number), verifying the digest of every file, and keep the bytes of `wanted`.

        Raises:
            BrokenArtifact: if a file is missing, truncated or changed.
            UnsupportedFormat: if this reader does not know its format.
        """
        manifest = self.manifest(name, version)
        folder = self.folder(name) / version
        kept = {}
        for file, spec in manifest.files.items():
            try:
                if file in wanted:
                    kept[file] = read_regular(folder / file, spec.size)
                    size, sha256 = len(kept[file]), hashlib.sha256(kept[file]).hexdigest()
                else:
                    size, sha256 = _digest(folder / file, spec.size)
            except (OSError, ValueError) as error:
                raise BrokenArtifact(name, version, file, _reason(error)) from None
            if size != spec.size:
                raise BrokenArtifact(
                    name, version, file, f"expected {spec.size} bytes as in the manifest, got {size}"
                )
            if sha256 != spec.sha256:
                raise BrokenArtifact(name, version, file, "its SHA-256 is not the manifest's")
        return Artifact(manifest, kept, folder)

    # Writing

    def publish(
        self, name: str, description: Description, files: Mapping[str, bytes | Path], alias: str = LATEST
    ) -> Manifest:
        """Publish a new version and move an alias to it: it is there whole, or not at all.

        With another alias than `latest`, that stays where it is, if there is a version before.

        A file that is given by its path is copied; if a version of any model has one of the same content, both share
        one place on the disk.

        Raises:
            InvalidInput: if the name is not fit for a model, or a file is missing or not known.
        """
        if not set(FILES) <= set(files) <= set(ALL_FILES):
            raise InvalidInput("files", f"{sorted(FILES)}", f"{sorted(files)}")
        with self.writing(name) as folder:
            version = str(max(_last_deleted(folder), *map(int, self.versions(name)), 0) + 1)
            specs = {file: _spec(content) for file, content in files.items()}
            unsigned = Manifest(
                format_version=FORMAT_VERSION,
                **description.model_dump(),
                name=name,
                version=version,
                created=datetime.now(UTC),
                files=specs,
                digest=NO_DIGEST,
            )
            before = self.aliases(name).get(LATEST)
            if alias != LATEST and before is not None:
                self._point(folder, LATEST, before)  # else it would be the newest
            digest = manifest_digest(unsigned.model_dump_json(indent=2).encode(), NO_DIGEST)
            manifest = unsigned.model_copy(update={"digest": digest})
            draft = Path(mkdtemp(prefix=".draft-", dir=folder))
            for file, content in files.items():
                if isinstance(content, bytes):
                    write_synced(draft / file, content)
                else:
                    self._share_or_copy(content, file, specs[file], draft / file)
            write_synced(draft / "manifest.json", manifest.model_dump_json(indent=2).encode())
            draft.chmod(0o755)
            sync_folder(draft)
            draft.rename(folder / version)
            sync_folder(folder)
            self._point(folder, alias, version)
        return manifest

    def _share_or_copy(self, source: Path, file: str, spec: FileSpec, target: Path) -> None:
        """Make `target` a link to a published file of this content, or a synced copy of `source`."""
        for name in self.names():
            for version in self.versions(name):
                with suppress(StoreError, OSError):  # broken, or deleted meanwhile; a file system may have no links
                    if self.manifest(name, version).files.get(file) == spec:
                        os.link(self.folder(name) / version / file, target, follow_symlinks=False)
                        if _digest(target, spec.size) == (spec.size, spec.sha256):
                            return
                        target.unlink()
        with _open_regular(source) as original, target.open("wb") as copy:
            shutil.copyfileobj(original, copy, PIECE_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
        if _digest(target, spec.size) != (spec.size, spec.sha256):
            raise InvalidInput("files", f"a {file} that stays as it is", "one that changed meanwhile")

    def sign(self, name: str, version: str, key: "Ed25519PrivateKey") -> None:
        """Sign a version (a number) that is whole, in place of an earlier signature.

        Raises:
            NotFound: if there is no such model or version.
            BrokenArtifact, UnsupportedFormat: as `open` does.
        """
        self.resolve(name, version)
        with self.writing(name) as folder:
            manifest = ModelStore(self.root).open(name, version, wanted=()).manifest
            draft = Path(mkdtemp(prefix=".draft-", dir=folder))
            write_synced(draft / SIGNATURE, signature(manifest, key))
            (draft / SIGNATURE).chmod(0o644)
            (draft / SIGNATURE).rename(folder / version / SIGNATURE)
            sync_folder(folder / version)
            draft.rmdir()

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Point an alias (`latest` too: that is a roll-back) at a version or at what another alias names.

        Raises:
            InvalidInput: if the alias is not a name, or looks like a version number.
            NotFound: if there is no such model or version.
        """
        if not is_name(alias) or is_version(alias):
            raise InvalidInput("alias", f"a name matching {NAME_PATTERN} that is not a number", repr(alias))
        self.resolve(name, version)
        with self.writing(name) as folder:
            self._point(folder, alias, self.resolve(name, version))

    def remove_alias(self, name: str, alias: str) -> None:
        """Remove an alias; the version that it names stays.

        Raises:
            InvalidInput: if it is `latest`, which always names a version.
            NotFound: if there is no such model or alias.
        """
        if alias == LATEST:
            raise InvalidInput("alias", f"another than {LATEST}, which always names a version", LATEST)
        self.resolve(name)
        with self.writing(name) as folder:
            aliases = self.aliases(name)
            if alias not in aliases:
                raise NotFound(f"alias: expected one of {sorted(aliases)} of model {name}, got {alias!r}")
            self._drop_alias(folder, alias)

    def delete(self, name: str, version: str | None = None, force: bool = False) -> list[str]:
        """Delete a version (a number), or a model with all of its versions; return the versions that are gone.

        What an alias names is deleted with `force` alone. Such an alias is removed, but `latest` moves: to the newest
        version before the one that is gone, else to the newest that is left. No later version gets a deleted number.

        Raises:
            InvalidInput: if an alias names it and `force` is not given.
            NotFound: if there is no such model or version.
        """
        self.resolve(name, version or LATEST)
        with self.writing(name) as folder:
            versions, aliases = self.versions(name), self.aliases(name)
            gone = [found for found in versions if version in (None, found)]
            left = [found for found in versions if found not in gone]
            named = sorted(alias for alias, of in aliases.items() if of in gone)
            if named and not force:
                what = f"version {version}" if version else f"all of {name}: version {', '.join(versions)}"
                raise InvalidInput(
                    "version", "one that no alias names (--force deletes others too)", f"{what}; {_and(named)}"
                )
            if gone == versions[-len(gone) :]:
                self._point(folder, LAST_DELETED, str(max(_last_deleted(folder), *map(int, gone))))
            if left and LATEST in named:
                before = [found for found in left if int(found) < int(aliases[LATEST])]
                self._point(folder, LATEST, (before or left)[-1])
            for alias in named:
                if alias != LATEST:
                    self._drop_alias(folder, alias)
            for found in sorted(gone, key=lambda found: found == aliases[LATEST]):  # it is served to the last
                self._bury(folder, found)
        return gone

    def keep(self, name: str, newest: int) -> list[str]:
        """Delete all versions but the newest ones and those that an alias names; return what was deleted.

        Raises:
            InvalidInput: if `newest` is less than 1.
            NotFound: if there is no such model.
        """
        if newest < 1:
            raise InvalidInput("newest", "at least 1", str(newest))
        self.resolve(name)
        with self.writing(name) as folder:
            versions = self.versions(name)
            kept = {*versions[-newest:], *self.aliases(name).values()}
            deleted = [version for version in versions if version not in kept]
            for version in deleted:
                self._bury(folder, version)
        return deleted

    def folder(self, name: str) -> Path:
        """Return a model's folder; raises NotFound for what cannot be one."""
        if not is_name(name):
            raise NotFound(f"model: expected a name matching {NAME_PATTERN}, got {name[:80]!r}")
        folder = self.root / name
        if folder.is_symlink():
            raise NotFound(f"model: {name} is a symbolic link, which the store does not follow")
        return folder

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Hold the name's lock, with what killed writers left behind cleared away."""
        if not is_name(name):
            raise InvalidInput("name", f"a name matching {NAME_PATTERN}", repr(name[:80]))
        folder = self.folder(name)
        make_folder(folder)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in [*folder.glob(".draft-*"), *folder.glob(".deleted-*")]:
                shutil.rmtree(left, ignore_errors=True)
            yield folder

    def _bury(self, folder: Path, version: str) -> None:
        shutil.rmtree(folder / EVIDENCE / version, ignore_errors=True)
        grave = folder / f".deleted-{version}"
        (folder / version).rename(grave)  # gone at once, whatever happens next
        sync_folder(folder)
        shutil.rmtree(grave)

    def _drop_alias(self, folder: Path, alias: str) -> None:
        (folder / "aliases" / alias).unlink(missing_ok=True)
        sync_folder(folder / "aliases")

    def _point(self, folder: Path, alias: str, version: str) -> None:
        aliases = folder / "aliases"
        make_folder(aliases)
        for left in aliases.glob(".draft-*"):
            left.unlink()
        handle, draft = mkstemp(prefix=".draft-", dir=aliases)
        os.close(handle)
        write_synced(Path(draft), version.encode())
        Path(draft).chmod(0o644)
        Path(draft).rename(aliases / alias)
        sync_folder(aliases)


def first_error(error: ValidationError) -> str:
    """Return pydantic's first complaint as `field: message`, without an echo of the value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field}: {first['msg']}" if field else str(first["msg"])


def is_name(text: str) -> bool:
    """Whether a text may name a model, an alias or a file."""
    return re.fullmatch(NAME_PATTERN[1:-1], text) is not None


def is_version(text: str) -> bool:
    """Whether a text is a version number."""
    return re.fullmatch(r"[1-9][0-9]{0,8}", text) is not None


def _last_deleted(folder: Path) -> int:
    """Return the number that a later version must be above; 0 where no newest version was deleted."""
    try:
        text = read_regular(folder / "aliases" / LAST_DELETED, 9).decode("ascii", errors="replace")
    except FileNotFoundError:
        return 0
    return int(text) if is_version(text) else 0


def _and(aliases: list[str]) -> str:
    return f"{', '.join(aliases)} name{'s' if len(aliases) == 1 else ''} it"


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes (and one more, to see that it is longer)."""
    with _open_regular(path) as file:
        return file.read(limit + 1)


def _spec(content: bytes | Path) -> FileSpec:
    """Return the size and digest of a file's content, given whole or by its path."""
    if isinstance(content, bytes):
        return FileSpec(sha256=hashlib.sha256(content).hexdigest(), size=len(content))
    size, sha256 = _digest(content, content.stat().st_size)
    return FileSpec(sha256=sha256, size=size)


def _digest(path: Path, limit: int) -> tuple[int, str]:
    """Return the size and SHA-256 of a file as `read_regular` would read it, of which little is kept at a time."""
    size, digest = 0, hashlib.sha256()
    with _open_regular(path) as file:
        while part := file.read(min(PIECE_BYTES, limit + 1 - size)):
            size += len(part)
            digest.update(part)
    return size, digest.hexdigest()


def _open_regular(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def _reason(error: Exception) -> str:
    """Say what is wrong with a file, without its path."""
    return (error.strerror or "cannot be read") if isinstance(error, OSError) else "is not valid JSON"


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_folder(path: Path) -> None:
    """Make a folder and those above it unless they are there, and wait until they are on the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk, where the file system can do that."""
    handle = os.open(path, os.O_RDONLY)
    with suppress(OSError):  # some file systems cannot sync a folder
        os.fsync(handle)
    os.close(handle)
