"""Models in a bucket: files first, then the manifest, which makes them a version; what decides
races is the server.

A writer claims a number by creating `<path>/.claim`, which only one can, looks whether the number
was given and taken back meanwhile, writes the files and creates the manifest. Aliases are replaced
if their tag is still what it was. So the server must know both conditions, which `check_writable`
tries.

Files of versions are read from copies in a folder of this machine (`model_store.artifacts.cache`).
"""

import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from model_store.artifacts.cache import Cache
from model_store.artifacts.disk import PIECE_BYTES, open_regular
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.objects import Content, Entry, Objects
from model_store.artifacts.storage import (
    ALIASES,
    EVIDENCE,
    LAST_DELETED,
    MANIFEST,
    MAX_ALIAS_BYTES,
    REPORT,
    Lease,
    Original,
    Storage,
    Written,
    check_is_known_name,
    check_is_new_name,
    is_name,
    is_version,
    seal_of,
)
from model_store.errors import InvalidInput, StoreUnreachable

CLAIM = ".claim"
PROBE = ".probe-"  # with something of a writer's own
LOOKS = 3  # at a bucket that changes meanwhile
ABANDONED = timedelta(days=1)  # after which what is no version is what a killed writer left
# In which a writer must be done, so that none loses what it has written so far
PUBLICATION = timedelta(hours=12)
REMEMBERED_BYTES = 1 << 18  # largest object that is kept in memory
REMEMBERED = 64  # objects


class Bucket(Storage):
    def __init__(self, objects: Objects, cache: Cache) -> None:
        self.objects = objects
        self.cache = cache
        self._lists: Lists | None = None  # of the last look
        self._remembered: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # by path and tag
        # aliases, by path and tag, that name no version
        self._dangling: set[tuple[str, str]] = set()
        self._is_writable = False
        self._lock = threading.Lock()  # of what is remembered, held for moments

    @property
    def scratch(self) -> Path:
        return self.cache.root

    def place(self, path: str) -> str:
        return f"{self.objects.url.rstrip('/')}/{path}"

    # Reading

    @property
    def was_seen(self) -> bool:
        return self._lists is not None

    def look(self) -> None:
        """List the bucket, in one request for each thousand objects, and read aliases that have
        changed.

        Where the bucket cannot be reached before it ever was, what the cache has from an earlier
        time counts.
        """
        before = self._lists or Lists()
        try:
            for _ in range(LOOKS):
                lists = Lists.of(self.objects.entries())
                if self._read_aliases(lists, before):
                    break
                before = lists
        except StoreUnreachable:
            if self._lists is None and (kept := self.cache.lists()) is not None:
                lists = Lists()
                lists.versions, lists.texts = kept
                lists.is_kept, self._lists = True, lists
            raise
        self._dangling &= {*lists.tags.items()}
        self._lists = lists
        self.cache.keep_lists(lists.versions, lists.texts)

    def _read_aliases(self, lists: "Lists", before: "Lists") -> bool:
        """Read what aliases say that have changed since `before`; return whether it goes with the
        lists."""
        goes_together = True
        for name, tags in lists.aliases.items():
            for alias, tag in tags.items():
                path = f"{name}/{ALIASES}/{alias}"
                if tag and before.aliases.get(name, {}).get(alias) == tag:
                    text = before.texts[name][alias]
                else:
                    found = self.objects.get(path, MAX_ALIAS_BYTES)
                    goes_together = goes_together and found is not None and found.tag == tag
                    text = "" if found is None else _text(found.content)
                lists.texts.setdefault(name, {})[alias] = text
                if text not in lists.versions.get(name, ()) and (path, tag) not in self._dangling:
                    # Published since the first objects were listed, or deleted
                    self._dangling.add((path, tag))
                    goes_together = False
        return goes_together

    def _now(self, name: str | None = None) -> "Lists":
        if name is not None:
            check_is_known_name(name)
        return self._lists or Lists.of(self.objects.entries(name or ""))

    def names(self) -> list[str]:
        return [*self._now().versions]

    def versions(self, name: str) -> list[str]:
        return [*self._now(name).versions.get(name, ())]

    def aliases(self, name: str) -> dict[str, str]:
        lists = self._now(name)
        if lists is self._lists:
            return {**lists.texts.get(name, {})}
        found = {alias: self.written(name, alias) for alias in lists.aliases.get(name, ())}
        return {alias: written.text for alias, written in found.items() if written is not None}

    def reports(self, name: str, version: str) -> list[int]:
        return [*self._now(name).reports.get((name, version), ())]

    def has(self, path: str) -> bool:
        return path in self._now(path.split("/")[0]).tags

    def read(self, path: str, limit: int) -> bytes:
        """Return an object's content, or what is remembered of it since it was listed; without the
        bucket, a copy."""
        tag = "" if self._lists is None else self._lists.tags.get(path, "")
        content = self._recall(path, tag)
        if content is None and self._lists is not None and self._lists.is_kept:
            content = self.cache.read(path, limit)
        if content is not None:
            return content
        try:
            found = self.objects.get(path, limit)
        except StoreUnreachable:
            copy = self.cache.read(path, limit)
            if copy is None:
                raise
            return copy
        if found is None:
            raise FileNotFoundError(2, "No such file or directory")
        self._remember(path, found)
        return found.content

    def _recall(self, path: str, tag: str) -> bytes | None:
        with self._lock:
            if not tag or (path, tag) not in self._remembered:
                return None
            self._remembered.move_to_end((path, tag))
            return self._remembered[path, tag]

    def _remember(self, path: str, found: Content) -> None:
        if found.tag and len(found.content) <= REMEMBERED_BYTES:
            with self._lock:
                self._remembered[path, found.tag] = found.content
                while len(self._remembered) > REMEMBERED:
                    self._remembered.popitem(last=False)

    def lease(self, manifest: Manifest) -> Lease:
        named = None if self._lists is None else self._lists.texts
        return self.cache.lease(manifest, self.objects, named)

    def close(self) -> None:
        self.objects.close()

    # Writing

    def check_writable(self) -> None:
        """Create an object twice, and replace it with a wrong tag: the server must refuse the
        second and the third."""
        if self._is_writable:
            return
        path = f"{PROBE}{uuid.uuid4().hex}"
        # A server that makes a bucket for any writer says here that there is none
        self.objects.entries(path)
        try:
            created = self.objects.create(path, b"1")
            again = self.objects.create(path, b"2")
            replaced = self.objects.replace(path, b"3", '"00000000000000000000000000000000"')
            found = self.objects.get(path, 1)
            moved = found is not None and self.objects.replace(path, b"4", found.tag, found.version)
        finally:
            self.objects.delete([path])
        if not created or again or replaced or not moved:
            what = "one that does not replace an object by its ETag"
            if again:
                lost = "of two writers both would publish the same number"
                what = f"one that ignores If-None-Match: {lost}"
            elif replaced:
                what = "one that ignores If-Match: aliases that two writers move would be lost"
            expected = "a bucket that honours conditional writes"
            raise InvalidInput("DUBITO_STORE", expected, f"{what} (it can be read)")
        self._is_writable = True

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Write to a model, where what killed writers left a day ago is deleted; no other writer is
        kept out."""
        check_is_new_name(name)
        self.check_writable()
        self._clear(name)
        yield

    def _clear(self, name: str, now: datetime | None = None) -> None:
        """Delete files that are older than a day and of no version, or of no report of one."""
        entries = self.objects.entries(name)
        lists, others = Lists.of(entries), dict[str, list[str]]()
        for path in entries:
            folder, _, _ = path.rpartition("/")
            match folder.split("/")[1:]:
                case [version] if is_version(version):
                    is_there = version in lists.versions.get(name, ())
                case ["evidence", version, number] if is_version(number):
                    of_version = lists.reports.get((name, version), ())
                    is_there = version in lists.versions.get(name, ()) and int(number) in of_version
                case _:
                    is_there = True
            if not is_there:
                others.setdefault(folder, []).append(path)
        for paths in others.values():
            newest = max(entries[path].modified for path in paths)
            if (now or datetime.now(UTC)) - newest > ABANDONED:
                self.objects.delete(paths)

    def last_number(self, parent: str) -> int:
        """Return the highest number that is given or claimed, or of versions was deleted."""
        lists = Lists.of(self.objects.entries(parent))
        return max(*lists.numbers.get(parent, ()), self._highest_given(parent, lists), 0)

    def _highest_given(self, parent: str, lists: "Lists") -> int:
        """Return the highest number that was given, of versions also of those that are gone since.

        To delete the newest version is to write its number first, and else a newer one is left: so
        no number that was ever given is above this.
        """
        name, *of_reports = parent.split("/")
        if of_reports:
            return max(lists.reports.get((name, of_reports[-1]), ()), default=0)
        deleted = self.written(name, LAST_DELETED)  # after the list
        last = int(deleted.text) if deleted is not None and is_version(deleted.text) else 0
        return max(last, *map(int, lists.versions.get(name, ())), 0)

    def create(self, path: str, files: Mapping[str, bytes | Original]) -> bool:
        """Claim the number, write the files, and last of all the seal."""
        (parent, _, number), seal = path.rpartition("/"), seal_of(path)
        if not self.objects.create(f"{path}/{CLAIM}", uuid.uuid4().hex.encode()):
            return False
        begun = datetime.now(UTC)
        written = [f"{path}/{CLAIM}"]
        try:
            if self._highest_given(parent, Lists.of(self.objects.entries(parent))) >= int(number):
                return False
            for file, content in files.items():
                if file != seal:
                    written.append(f"{path}/{file}")
                    self._put(written[-1], content)
            if datetime.now(UTC) - begun > PUBLICATION:
                reason = f"it took longer than {PUBLICATION}"
                raise StoreUnreachable(f"cannot write in {self.objects.url}: {reason}")
            sealed = files[seal]
            assert isinstance(sealed, bytes)
            # Where no answer comes it may be sealed, and then needs its files
            unsealed, written = written, []
            last = f"{path}/{seal}"
            is_ours = self.objects.create(last, sealed) or self._is(last, sealed)
            written = unsealed[:1] if is_ours else unsealed
            return is_ours
        finally:
            with suppress(StoreUnreachable):  # then they are left until a day is over
                self.objects.delete(written[::-1])

    def _is(self, path: str, content: bytes) -> bool:
        """Whether an object is this: sent again after its answer was lost it is there already."""
        found = self.objects.get(path, len(content))
        return found is not None and found.content == content

    def _put(self, path: str, content: bytes | Original) -> None:
        if isinstance(content, bytes):
            self.objects.put(path, content)
            return
        digest, size = sha256(), 0

        def pieces() -> Iterator[bytes]:
            nonlocal size
            with open_regular(content.path) as file:
                while part := file.read(8 * PIECE_BYTES):
                    digest.update(part)
                    size += len(part)
                    yield part

        self.objects.put(path, pieces())
        content.check(content.path.name, size, digest.hexdigest())

    def written(self, name: str, alias: str) -> Written | None:
        found = self.objects.get(f"{name}/{ALIASES}/{alias}", MAX_ALIAS_BYTES)
        return None if found is None else Written(_text(found.content), found.tag, found.version)

    def replace(self, name: str, alias: str, text: str, before: Written | None) -> bool:
        path, content = f"{name}/{ALIASES}/{alias}", text.encode()
        if before is None:
            return self.objects.create(path, content)
        return self.objects.replace(path, content, before.tag, before.version)

    def overwrite(self, path: str, content: bytes) -> None:
        self.objects.put(path, content)

    def drop_alias(self, name: str, alias: str) -> None:
        self.objects.delete([f"{name}/{ALIASES}/{alias}"])

    def delete(self, path: str) -> None:
        self.objects.delete([f"{path}/{seal_of(path)}"])
        name, _, rest = path.partition("/")
        reports = [] if "/" in rest else [*self.objects.entries(f"{name}/{EVIDENCE}/{rest}")]
        self.objects.delete([*self.objects.entries(path), *reports])


class Lists:
    """What a list of objects says of models."""

    def __init__(self) -> None:
        self.versions: dict[str, list[str]] = {}  # by model, those that have a manifest
        self.aliases: dict[str, dict[str, str]] = {}  # by model the tag of each
        # By model what each alias says, where it was read
        self.texts: dict[str, dict[str, str]] = {}
        self.reports: dict[tuple[str, str], list[int]] = {}  # by model and version
        # By model, or path of reports: all of which there is anything
        self.numbers: dict[str, set[int]] = {}
        self.tags: dict[str, str] = {}  # by path
        self.is_kept = False  # of an earlier process

    @classmethod
    def of(cls, entries: dict[str, Entry]) -> "Lists":
        """Return what objects say; those that are not of the layout say nothing."""
        lists = cls()
        for path, entry in entries.items():
            lists.tags[path] = entry.tag
            match path.split("/"):
                case [name, "aliases", alias] if is_name(name) and is_name(alias):
                    lists.aliases.setdefault(name, {})[alias] = entry.tag
                case [name, version, file] if is_name(name) and is_version(version):
                    lists.numbers.setdefault(name, set()).add(int(version))
                    if file == MANIFEST:
                        lists.versions.setdefault(name, []).append(version)
                case [name, "evidence", of, number, file] if is_name(name) and is_version(number):
                    lists.numbers.setdefault(f"{name}/{EVIDENCE}/{of}", set()).add(int(number))
                    if file == REPORT:
                        lists.reports.setdefault((name, of), []).append(int(number))
        return lists


def _text(content: bytes) -> str:
    return content.decode("ascii", errors="replace").strip()
