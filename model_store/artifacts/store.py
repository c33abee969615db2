"""The model store, which contains verified versions and their aliases."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import orjson
from pydantic import ValidationError

from model_store.artifacts.bucket import Bucket
from model_store.artifacts.cache import Cache
from model_store.artifacts.disk import file_spec, read_verified, verify
from model_store.artifacts.folder import Folder
from model_store.artifacts.manifest import (
    ALL_FILES,
    FILES,
    FORMAT_MINOR,
    FORMAT_VERSION,
    NAME_PATTERN,
    NO_DIGEST,
    TOKENIZER,
    TRAINING_ROWS,
    Description,
    Manifest,
    first_error,
    manifest_digest,
)
from model_store.artifacts.objects import Objects
from model_store.artifacts.signature import (
    MAX_SIGNATURES_BYTES,
    SIGNATURE,
    TrustedKeys,
    add_signature,
    read_trusted_keys,
    signature,
)
from model_store.artifacts.storage import (
    LAST_DELETED,
    MANIFEST,
    Lease,
    check_is_known_name,
    is_name,
    is_url,
    is_version,
    version_number,
)
from model_store.errors import (
    BrokenAlias,
    BrokenArtifact,
    InvalidInput,
    NotFound,
    UnsupportedFormat,
    list_choices,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_MANIFEST_BYTES = 1 << 20
# The encoder may be large and is loaded from its file
IN_MEMORY = (*FILES, TRAINING_ROWS, TOKENIZER)
Storage: TypeAlias = Folder | Bucket
LATEST = "latest"
CACHE = Path("cache")  # default of DUBITO_CACHE
CACHE_BYTES = 10 << 30  # default of DUBITO_CACHE_BYTES
VERIFY_KEY_VARIABLE = "DUBITO_VERIFY_KEY_FILE"


@dataclass(frozen=True)
class Artifact:
    manifest: Manifest
    files: dict[str, bytes]
    folder: Path
    lease: Lease | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Aliases:
    """A model's aliases, with the reasons why any of them are broken."""

    versions: dict[str, str]  # by alias
    problems: dict[str, str]  # reasons, for aliases that name no version


class ModelStore:
    """A store of model versions in a folder or bucket.

    A version is published completely or not at all. It never changes, except that it can be signed
    later.

    Args:
        trusted: public keys. Versions without a signature by one of them are rejected as broken.
    """

    def __init__(self, place: Path | Storage, trusted: TrustedKeys | None = None) -> None:
        self.storage: Storage = Folder(place) if isinstance(place, Path) else place
        self.trusted = trusted

    @property
    def root(self) -> Path:
        assert isinstance(self.storage, Folder)
        return self.storage.root

    # Reading

    def names(self) -> list[str]:
        return sorted(self.storage.names())

    def versions(self, name: str) -> list[str]:
        """Return a model's versions, oldest first. The list is empty for unknown models."""
        check_is_known_name(name)
        return [str(number) for number in sorted(self.storage.numbers(name))]

    def aliases(self, name: str) -> dict[str, str]:
        return self.read_aliases(name).versions

    def read_aliases(self, name: str) -> Aliases:
        """Read each alias's version number, or the reason why the alias is broken.

        A model without any alias has the problem that `latest` is missing.
        """
        check_is_known_name(name)
        # Reading aliases first includes versions that are published between the two reads.
        texts = self.storage.aliases(name)
        versions = self.versions(name)
        # An alias moved and its version was deleted between the two reads, or it is dangling.
        if not {*texts.values()} <= {*versions}:
            texts = self.storage.aliases(name)
            versions = self.versions(name)
        targets = {alias: text for alias, text in texts.items() if text in versions}
        problems = {
            alias: f"alias {alias} names version {text}, which does not exist"
            if is_version(text)
            else f"alias {alias} holds {text[:80]!r} instead of a version number"
            for alias, text in texts.items()
            if alias not in targets
        }
        if versions and not texts:
            problems[LATEST] = f"alias {LATEST} is missing"
        return Aliases(targets, problems)

    def was_deleted(self, name: str) -> bool:
        """Check whether a model was removed with `delete`."""
        deleted = self.storage.read_alias(name, LAST_DELETED)
        return deleted is not None and not self.versions(name) and not self.storage.aliases(name)

    def resolve(self, name: str, version: str = LATEST) -> str:
        """Return the version number for an alias or a version number.

        Raises:
            NotFound: if there is no such model, version or alias.
            BrokenAlias: if the alias names no version.
        """
        self._check_exists(name)
        versions = self.versions(name)
        if version in versions:
            return version
        aliases = self.read_aliases(name)
        if version in aliases.versions:
            return aliases.versions[version]
        if version in aliases.problems:
            raise BrokenAlias(f"model {name}: {aliases.problems[version]}")
        names = [*versions, *sorted(aliases.versions)]
        raise NotFound("version", f"{list_choices(names)} of model {name}", repr(version))

    def _check_exists(self, name: str) -> None:
        if not self.versions(name):
            raise NotFound("model", list_choices(self.names()), repr(name))

    def manifest(self, name: str, version: str) -> Manifest:
        """Read a version's manifest without verifying its other files.

        Raises:
            NotFound: if `version` is not a number.
            BrokenArtifact: if the manifest is missing, invalid, modified, or not signed by the
                trusted key.
            UnsupportedFormat: if the format version is unknown.
        """
        check_is_known_name(name)
        if not is_version(version):
            received = repr(version[:80])
            raise NotFound("version", f"a version number of model {name}", received)

        def broken(reason: str) -> BrokenArtifact:
            return BrokenArtifact(name, version, MANIFEST, reason)

        try:
            text = self.storage.read(f"{name}/{version}/{MANIFEST}", MAX_MANIFEST_BYTES)
            content = json.loads(text)
            orjson.dumps(content)  # responses contain parts of the manifest
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise broken(_reason(error)) from None
        fields = content if isinstance(content, dict) else {}
        written_as, minor = fields.get("format_version"), fields.get("format_minor")
        is_newer = isinstance(minor, int) and minor > FORMAT_MINOR

        def unsupported(reason: str) -> UnsupportedFormat:
            return UnsupportedFormat(
                f"model {name} version {version}: manifest.json: {reason}: read it with a Dubito "
                "that knows it, or fit the model again"
            )

        if isinstance(written_as, int) and written_as != FORMAT_VERSION:
            raise unsupported(f"format_version: expected {FORMAT_VERSION}, got {written_as}")
        try:
            manifest = Manifest.model_validate_json(text, extra="ignore" if is_newer else "forbid")
        except ValidationError as error:
            if is_newer:
                reason = f"format_minor: expected up to {FORMAT_MINOR}, got {minor}"
                raise unsupported(f"{reason} ({first_error(error)})") from None
            raise broken(first_error(error)) from None
        if (manifest.name, manifest.version) != (name, version):
            raise broken(f"it describes {manifest.label}")
        if manifest_digest(text, manifest.digest) != manifest.digest:
            raise broken("its SHA-256 is not its digest")
        if self.trusted is not None:
            self._check_signature(manifest, self.trusted)
        return manifest

    def _check_signature(self, manifest: Manifest, trusted: TrustedKeys) -> None:
        path = f"{manifest.name}/{manifest.version}/{SIGNATURE}"
        try:
            content = self.storage.read(path, MAX_SIGNATURES_BYTES)
        except FileNotFoundError:
            reason = "there is none: the version is not signed"
            raise manifest.broken(SIGNATURE, reason) from None
        except OSError as error:
            raise manifest.broken(SIGNATURE, _reason(error)) from None
        if not trusted.verify(content, manifest):
            reason = "no signature of this version by a trusted key"
            raise manifest.broken(SIGNATURE, reason)

    def open(self, name: str, version: str, files: tuple[str, ...] = IN_MEMORY) -> Artifact:
        """Verify all of a version's files and return the contents of `files`.

        Raises:
            BrokenArtifact: if a file is missing, truncated or modified.
            UnsupportedFormat: if the format version is unknown.
        """
        manifest = self.manifest(name, version)
        lease = self.storage.lease(manifest)
        try:
            return _read(manifest, lease, files)
        except BrokenArtifact:
            if not self.storage.discard(lease):
                raise
        return _read(manifest, self.storage.lease(manifest), files)  # downloaded again

    # Writing

    def publish(
        self,
        name: str,
        description: Description,
        files: Mapping[str, bytes | Path],
        alias: str = LATEST,
    ) -> Manifest:
        """Publish a new version with an alias. Raise InvalidInput for invalid names or files."""
        if not set(FILES) <= set(files) <= set(ALL_FILES):
            raise InvalidInput("files", f"{sorted(FILES)}", f"{sorted(files)}")
        specs = {file: file_spec(content) for file, content in files.items()}

        def describe(number: int) -> Manifest:
            unsigned = Manifest(
                format_version=FORMAT_VERSION,
                **description.model_dump(),
                name=name,
                version=str(number),
                created=datetime.now(UTC),
                files=specs,
                digest=NO_DIGEST,
            )
            text = manifest_digest(unsigned.model_dump_json(indent=2).encode(), NO_DIGEST)
            return unsigned.model_copy(update={"digest": text})

        with self.storage.writing(name):
            is_created = False
            while not is_created:
                number = self.storage.next_number(name)
                manifest = describe(number)
                seal = manifest.model_dump_json(indent=2).encode()
                is_created = self.storage.create(name, number, {**files, MANIFEST: seal})

            def choose(current: str | None) -> str | None:
                # Another writer may have published a newer version
                is_overtaken = version_number(current) > number and current in self.versions(name)
                return None if is_overtaken else str(number)

            self.storage.move_alias(name, alias, choose)
        return manifest

    def sign(self, name: str, version: str, key: "Ed25519PrivateKey") -> None:
        """Verify a version and add a signature to it. Existing signatures are kept."""
        self.resolve(name, version)
        with self.storage.writing(name):
            manifest = ModelStore(self.storage).open(name, version, files=()).manifest
            path, signatures = f"{name}/{version}/{SIGNATURE}", b""
            with suppress(FileNotFoundError):
                signatures = self.storage.read(path, MAX_SIGNATURES_BYTES)
            self.storage.overwrite(path, add_signature(signatures, signature(manifest, key)))

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Point an alias at a version, given by its number or another alias."""
        if not is_name(alias) or is_version(alias):
            expected = f"a name matching {NAME_PATTERN} that is not a number"
            raise InvalidInput("alias", expected, repr(alias))
        self.resolve(name, version)
        with self.storage.writing(name):
            self.storage.move_alias(name, alias, lambda _: self.resolve(name, version))
            self.resolve(name, alias)  # raises if another writer has deleted the version

    def remove_alias(self, name: str, alias: str) -> None:
        """Remove an alias. The version is not deleted."""
        if alias == LATEST:
            expected = f"an alias other than {LATEST}, which always names a version"
            raise InvalidInput("alias", expected, LATEST)
        self._check_exists(name)
        with self.storage.writing(name):
            aliases = self.storage.aliases(name)
            if alias not in aliases:
                expected = f"{list_choices(sorted(aliases))} of model {name}"
                raise NotFound("alias", expected, repr(alias))
            self.storage.delete_alias(name, alias)

    def delete(self, name: str, version: str | None = None, force: bool = False) -> list[str]:
        """Delete a version, or a model and all its versions. Return the deleted versions.

        A version with an alias is deleted only with `force`, and the alias is removed. The version
        of `latest` is deleted only with the whole model. Numbers are not used again.
        """
        self._check_exists(name)
        if version is not None:
            self.resolve(name, version)
        with self.storage.writing(name):
            versions, aliases = self.versions(name), self.aliases(name)
            deleted = [number for number in versions if version in (None, number)]
            removed_aliases = sorted(
                alias for alias, number in aliases.items() if number in deleted
            )
            if deleted == versions:
                removed_aliases = sorted(self.storage.aliases(name))  # including broken aliases
            elif LATEST in removed_aliases:
                expected = f"one that {LATEST} does not name: move {LATEST} first"
                raise InvalidInput("version", expected, f"version {aliases[LATEST]}")
            if removed_aliases and not force:
                expected = "one that no alias names (--force deletes others too)"
                received = "all versions" if version is None else f"version {deleted[0]}"
                received += f", with the aliases {', '.join(removed_aliases)}"
                raise InvalidInput("version", expected, received)
            if deleted == versions[-len(deleted) :]:
                highest = int(deleted[-1])
                self.storage.move_alias(
                    name, LAST_DELETED, lambda last: str(max(version_number(last), highest))
                )
            for alias in removed_aliases:
                self.storage.delete_alias(name, alias)
            for number in deleted:
                self.storage.delete(name, number)
        return deleted

    def keep(self, name: str, newest: int) -> list[str]:
        """Delete all but the `newest` versions and return the deleted versions.

        Versions with an alias are not deleted.
        """
        if newest < 1:
            raise InvalidInput("newest", "at least 1", str(newest))
        self._check_exists(name)
        with self.storage.writing(name):
            versions, aliases = self.versions(name), self.read_aliases(name)
            if aliases.problems:
                expected = f"aliases of model {name} that name versions, so that these are kept"
                raise InvalidInput("alias", expected, "; ".join(aliases.problems.values()))
            retained = {*versions[-newest:], *aliases.versions.values()}
            deleted = [version for version in versions if version not in retained]
            for version in deleted:
                self.storage.delete(name, version)
        return deleted


def open_store(
    place: str | Path,
    cache: str | Path = CACHE,
    cache_bytes: int = CACHE_BYTES,
    verify_key_file: str | Path | None = None,
) -> ModelStore:
    """Open the store in a folder or bucket. Downloads are cached in the folder `cache`."""
    trusted = None
    if verify_key_file is not None:
        trusted = read_trusted_keys(Path(verify_key_file), VERIFY_KEY_VARIABLE)
    if isinstance(place, Path) or not is_url(place):
        return ModelStore(Path(place), trusted)
    objects = Objects.from_url(place)
    return ModelStore(Bucket(Cache(Path(cache), objects, cache_bytes)), trusted)


def store_from_environment(place: str | None = None) -> ModelStore:
    """Open the store at `place`. The default is the DUBITO_STORE environment variable."""
    cache_bytes = os.environ.get("DUBITO_CACHE_BYTES", str(CACHE_BYTES))
    if not cache_bytes.isdecimal() or int(cache_bytes) < 1:
        received = repr(cache_bytes[:40])
        raise InvalidInput("DUBITO_CACHE_BYTES", "a number of bytes, at least 1", received)
    store = place or os.environ.get("DUBITO_STORE", "models")
    return open_store(store, os.environ.get("DUBITO_CACHE", CACHE), int(cache_bytes))


def _read(manifest: Manifest, lease: Lease, files: tuple[str, ...]) -> Artifact:
    contents = {}
    for file, spec in manifest.files.items():
        try:
            if file in files:
                contents[file] = read_verified(lease.folder / file, spec)
            else:
                verify(lease.folder / file, spec)
        except OSError as error:
            raise manifest.broken(file, _reason(error)) from None
        except ValueError as error:
            raise manifest.broken(file, str(error)) from None
    return Artifact(manifest, contents, lease.folder, lease)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "cannot be read"
    return "is not valid JSON"
