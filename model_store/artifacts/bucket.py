"""A storage backend for buckets."""

import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

from model_store.artifacts.cache import Cache
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.objects import Content, Entry
from model_store.artifacts.signature import SIGNATURE
from model_store.artifacts.storage import (
    ALIASES,
    LAST_DELETED,
    MANIFEST,
    MAX_ALIAS_BYTES,
    REPORT,
    Files,
    Lease,
    check_is_new_name,
    is_name,
    is_version,
    reports_path,
    version_number,
)
from model_store.errors import InvalidInput, StoreUnreachable

CLAIM = ".claim"
MAX_LISTS = 3  # per refresh, if the bucket changes while it is listed
ABANDONED = timedelta(days=1)  # age of unfinished files; a file is written within TRANSFER_S
CACHED = (MANIFEST, REPORT, SIGNATURE)  # in memory
MAX_CACHED_OBJECTS = 64


class Bucket:
    """A bucket storage backend that keeps local copies of the versions in use.

    It has the methods of `Folder`. Conditional requests replace locks. A writer claims a number by
    creating `<path>/.claim`, which only one writer can do. It then checks that the number was never
    used, writes the files, and creates the manifest, which completes the version. An alias is only
    replaced if its tag is unchanged.
    """

    def __init__(self, cache: Cache) -> None:
        self.objects = cache.objects
        self.cache = cache
        self._listing: Listing | None = None  # from the last refresh
        self._is_writable = False
        self._local = threading.local()  # has `is_writing` in threads that need a new listing
        # The service checks the manifests of all served versions after each refresh
        self._get_cached = lru_cache(MAX_CACHED_OBJECTS)(self._get)

    @property
    def scratch(self) -> Path:
        return self.cache.root

    def locate(self, path: str) -> str:
        return f"{self.objects.url.rstrip('/')}/{path}"

    # Reading

    @property
    def has_listing(self) -> bool:
        return self._listing is not None

    def refresh(self) -> None:
        """Refresh the bucket's listing and read any aliases that changed.

        If the bucket has never been reached, fall back to the listing that the cache saved.
        """
        before = self._listing or Listing()
        try:
            for _ in range(MAX_LISTS):
                listing = Listing(self.objects.entries())
                if self._read_aliases(listing, before):
                    break
                before = listing
        except StoreUnreachable:
            saved = None if self.has_listing else self.cache.saved_listing()
            if saved is not None:
                listing = Listing()
                listing.is_saved, listing.numbers, listing.texts = True, *saved
                self._listing = listing
            raise
        self._listing = listing
        self.cache.save_listing(listing.numbers, listing.texts)

    def _read_aliases(self, listing: "Listing", before: "Listing") -> bool:
        """Read any aliases that changed. Return False if the listing is outdated."""
        is_consistent = True
        for name, tags in listing.aliases.items():
            texts = listing.texts.setdefault(name, {})
            for alias, tag in tags.items():
                if tag and before.aliases.get(name, {}).get(alias) == tag:
                    texts[alias] = before.texts[name][alias]
                    continue
                content = self.objects.get(f"{name}/{ALIASES}/{alias}", MAX_ALIAS_BYTES)
                texts[alias] = "" if content is None else _text(content)
                # Otherwise an alias moved while the objects were listed
                is_consistent &= (
                    content is not None
                    and content.tag == tag
                    and is_version(texts[alias])
                    and int(texts[alias]) in listing.numbers.get(name, ())
                )
        return is_consistent

    def _current(self, name: str = "") -> "Listing":
        if self._listing is None or getattr(self._local, "is_writing", False):
            return Listing(self.objects.entries(name))
        return self._listing

    def names(self) -> list[str]:
        return [*self._current().numbers]

    def numbers(self, name: str) -> list[int]:
        return [*self._current(name).numbers.get(name, ())]

    def aliases(self, name: str) -> dict[str, str]:
        listing = self._current(name)
        if listing is self._listing:
            return {**listing.texts.get(name, {})}
        texts = {alias: self.read_alias(name, alias) for alias in listing.aliases.get(name, ())}
        return {alias: text for alias, text in texts.items() if text is not None}

    def has_file(self, path: str) -> bool:
        return path in self._current(path.split("/")[0]).tags

    def read(self, path: str, limit: int) -> bytes:
        """Read an object. Unchanged manifests, reports and signatures are cached in memory.

        If the bucket cannot be reached, read the local copy.
        """
        listing = self._listing or Listing()
        content = self.cache.read(path, limit) if listing.is_saved else None
        if content is not None:
            return content
        tag = listing.tags.get(path) if path.endswith(CACHED) else None
        try:
            return self._get_cached(path, limit, tag) if tag else self._get(path, limit)
        except StoreUnreachable:
            copy = self.cache.read(path, limit)
            if copy is None:
                raise
            return copy

    def _get(self, path: str, limit: int, tag: str | None = None) -> bytes:  # noqa: ARG002
        current = self.objects.get(path, limit)
        if current is None:
            raise FileNotFoundError(2, "No such file or directory")
        return current.content

    def lease(self, manifest: Manifest) -> Lease:
        return self.cache.lease(manifest)

    def discard(self, lease: Lease) -> bool:
        self.cache.discard(lease)
        return True

    def close(self) -> None:
        self.objects.close()

    # Writing

    def check_writable(self) -> None:
        """Raise InvalidInput if the server ignores conditional requests."""
        ignored = None if self._is_writable else self.objects.ignored_condition()
        if ignored is not None:
            expected = "a bucket with conditional writes"
            received = f"one that ignores {ignored} (it can be read)"
            raise InvalidInput("DUBITO_STORE", expected, received)
        self._is_writable = True

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        check_is_new_name(name)
        self.check_writable()
        self._clear(name)
        self._local.is_writing = True
        try:
            yield
        finally:
            self._local.is_writing = False

    def _clear(self, name: str, now: datetime | None = None) -> None:
        """Delete incomplete versions and incomplete reports that are more than a day old."""
        entries = self.objects.entries(name)
        listing, folders = Listing(entries), defaultdict[str, list[str]](list)
        for path in entries:
            folders[path.rpartition("/")[0]].append(path)
        for folder, paths in folders.items():
            newest = max(entries[path].modified for path in paths)
            is_old = (now or datetime.now(UTC)) - newest > ABANDONED
            if is_old and not listing.is_complete(folder):
                self.objects.delete(paths)

    def next_number(self, name: str) -> int:
        listing = Listing(self.objects.entries(name))
        return max([self._highest_used(name, listing), *listing.claimed.get(name, ())]) + 1

    def _highest_used(self, name: str, listing: "Listing") -> int:
        """Return the highest version number ever used, including deleted versions.

        `LAST_DELETED` is written before the newest version is deleted, so it is read after the
        listing.
        """
        deleted = version_number(self.read_alias(name, LAST_DELETED))
        return max([deleted, *listing.numbers.get(name, ())])

    def create(self, name: str, number: int, files: Files) -> bool:
        """Claim a version number and write the version's files. Return False if it is taken."""
        path = f"{name}/{number}"
        seal_path, seal = f"{path}/{MANIFEST}", files[MANIFEST]
        assert isinstance(seal, bytes)
        new_paths = [f"{path}/{CLAIM}"]
        if not self.objects.create(new_paths[0], uuid.uuid4().hex.encode()):
            return False
        try:
            if self._highest_used(name, Listing(self.objects.entries(name))) >= number:
                return False
            for file, content in files.items():
                if content is not seal:
                    new_paths.append(f"{path}/{file}")
                    self.objects.put(new_paths[-1], content)
            # If the response is lost, the version may be complete, so keep its files
            unsealed, new_paths = new_paths, []
            is_ours = self.objects.create(seal_path, seal) or self._has_content(seal_path, seal)
            new_paths = unsealed[:1] if is_ours else unsealed
            return is_ours
        finally:
            with suppress(StoreUnreachable):  # `_clear` deletes them a day later
                self.objects.delete(new_paths[::-1])

    def _has_content(self, path: str, content: bytes) -> bool:
        """Check whether an earlier attempt already wrote this content."""
        current = self.objects.get(path, len(content))
        return current is not None and current.content == content

    def read_alias(self, name: str, alias: str) -> str | None:
        current = self.objects.get(f"{name}/{ALIASES}/{alias}", MAX_ALIAS_BYTES)
        return None if current is None else _text(current)

    def move_alias(self, name: str, alias: str, choose: Callable[[str | None], str | None]) -> None:
        path, is_moved = f"{name}/{ALIASES}/{alias}", False
        while not is_moved:
            current = self.objects.get(path, MAX_ALIAS_BYTES)
            text = choose(None if current is None else _text(current))
            if text is None:
                return
            if current is None:
                is_moved = self.objects.create(path, text.encode())
            else:
                is_moved = self.objects.replace(path, text.encode(), current)

    def delete_alias(self, name: str, alias: str) -> None:
        self.objects.delete([f"{name}/{ALIASES}/{alias}"])

    def overwrite(self, path: str, content: bytes) -> None:
        self.objects.put(path, content)

    def delete_report(self, name: str, version: str) -> None:
        path = reports_path(name, version)
        self.objects.delete([f"{path}/{REPORT}", *self.objects.entries(path)])

    def delete(self, name: str, version: str) -> None:
        path = f"{name}/{version}"
        self.objects.delete([f"{path}/{MANIFEST}", *self.objects.entries(path)])
        self.delete_report(name, version)


class Listing:
    """A parsed listing of a bucket's objects.

    Attributes:
        numbers: complete versions, by model.
        claimed: complete and unfinished versions, by model.
        aliases: the tag of each alias, by model.
        texts: the content of each alias, by model.
        tags: by path.
        is_saved: True if it was loaded from the cache.
    """

    def __init__(self, entries: dict[str, Entry] | None = None) -> None:
        self.numbers: dict[str, list[int]] = {}
        self.claimed: dict[str, set[int]] = {}
        self.aliases: dict[str, dict[str, str]] = {}
        self.texts: dict[str, dict[str, str]] = {}
        self.tags = {path: entry.tag for path, entry in (entries or {}).items()}
        self.is_saved = False
        for path, tag in self.tags.items():
            match path.split("/"):
                case [name, "aliases", alias] if is_name(name) and is_name(alias):
                    self.aliases.setdefault(name, {})[alias] = tag
                case [name, number, file] if is_name(name) and is_version(number):
                    self.claimed.setdefault(name, set()).add(int(number))
                    if file == MANIFEST:
                        self.numbers.setdefault(name, []).append(int(number))

    def is_complete(self, folder: str) -> bool:
        """Return False if the folder contains an incomplete version or report."""
        match folder.split("/"):
            case [name, number] if is_version(number):
                return int(number) in self.numbers.get(name, ())
            case [name, "reports", version] if is_version(version):
                is_current = int(version) in self.numbers.get(name, ())
                return is_current and f"{folder}/{REPORT}" in self.tags
        return True


def _text(content: Content) -> str:
    return content.content.decode("ascii", errors="replace").strip()
