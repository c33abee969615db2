"""Objects of a bucket by path: the few requests that a store makes, over obstore, and what went
wrong in plain words.

obstore, of the extra `bucket`, is imported only where there is a URL. What it says of an error may
repeat a request with what is secret in it, so nothing of that is passed on but the server's status.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from model_store.errors import InvalidInput, StoreUnreachable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az")
PIECE_BYTES = 1 << 20  # of an object that is written to a file
CONNECT_S = 5
REQUEST_S = 10  # of a list or a small object
TRANSFER_S = 3600  # of a large one
RETRIES = 2
PLAIN_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP")
STATUSES = {
    "400": "the server does not understand it (400)",
    "401": "the credentials are not accepted (401)",
    "403": "the credentials are not accepted, or do not allow it (403)",
    "404": "there is no such bucket (404)",
}
NO_CREDENTIALS = (
    "there are no credentials in the environment, and none came from the machine's own service"
)


@dataclass(frozen=True)
class Entry:
    tag: str
    modified: datetime
    size: int  # bytes


class Content(NamedTuple):
    """What was read of an object, its tag, and its version where the bucket numbers them."""

    content: bytes
    tag: str
    version: str | None


class Objects:
    """The objects below a URL. Its methods may be called from several threads at once.

    Every method raises StoreUnreachable where the bucket cannot be reached or refuses.
    """

    def __init__(
        self, url: str, store: "ObjectStore", transfers: "ObjectStore | None" = None
    ) -> None:
        """Begin with obstore's store, and one that has more time for large objects."""
        self.url = url
        self._store = store
        self._transfers = transfers or store
        self._is_closed = False

    @classmethod
    def of(cls, url: str, field: str = "DUBITO_STORE") -> "Objects":
        """Return the objects of a URL, with credentials and endpoint as obstore finds them in the
        environment; `field` is the setting or option that gave it."""
        check_url(url, field)
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError:
            raise InvalidInput(
                field, "the package of the extra `bucket` for a URL", "none of it"
            ) from None
        plain = any(os.environ.get(name, "").lower() in ("1", "true") for name in PLAIN_HTTP)
        stores = []
        for seconds in (REQUEST_S, TRANSFER_S):
            try:
                store = from_url(
                    url,
                    client_options={
                        "allow_http": plain,
                        "connect_timeout": f"{CONNECT_S}s",
                        "timeout": f"{seconds}s",
                    },
                    retry_config={
                        "max_retries": RETRIES,
                        "retry_timeout": timedelta(seconds=seconds),
                    },
                )
            except BaseError as error:
                said = (
                    str(error).splitlines()[0]
                    if "specified" in str(error)
                    else "one that obstore refuses"
                )
                raise InvalidInput(field, "a bucket with all that its kind needs", said) from None
            stores.append(store)
        return cls(url, *stores)

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        with self._plain_errors("list"):
            found: Iterable[Any] = self._store.list(prefix or None).collect()
            return {
                entry["path"]: Entry(entry["e_tag"] or "", entry["last_modified"], entry["size"])
                for entry in found
            }

    def get(self, path: str, limit: int) -> Content | None:
        """Return at most `limit` bytes of an object, and one more where it is longer; None if there
        is none."""
        try:
            with self._plain_errors("read"):
                result = self._store.get(path)
                content = b""
                for part in result.stream():
                    content += bytes(part)
                    if len(content) > limit:
                        break
                return Content(
                    content[: limit + 1], result.meta["e_tag"] or "", result.meta["version"]
                )
        except FileNotFoundError:
            return None

    def pieces(self, path: str) -> Iterator[bytes]:
        """Return an object in pieces; raises FileNotFoundError if there is none."""
        with self._plain_errors("read"):
            for part in self._transfers.get(path).stream(min_chunk_size=PIECE_BYTES):
                if self._is_closed:
                    raise StoreUnreachable(f"cannot read in {self.url}: it is not read any more")
                yield bytes(part)

    def span(self, path: str, first: int, size: int) -> tuple[bytes, str]:
        """Return `size` bytes of an object from byte `first` on, and the object's tag; raises
        FileNotFoundError."""
        with self._plain_errors("read"):
            result = self._transfers.get(path, options={"range": (first, first + size)})
            return bytes(result.bytes()), result.meta["e_tag"] or ""

    def close(self) -> None:
        """End what is read in pieces, so that a process that ends need not wait for it."""
        self._is_closed = True

    def put(self, path: str, content: "bytes | Iterator[bytes]") -> None:
        with self._plain_errors("write"):
            self._transfers.put(path, content)

    def create(self, path: str, content: bytes) -> bool:
        """Write an object if there is none; return whether there was none."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with self._plain_errors("write"):
                self._store.put(path, content, mode="create")
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def replace(self, path: str, content: bytes, tag: str, version: str | None = None) -> bool:
        """Write an object that has a tag, and a version where there are any; return whether it
        had."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with self._plain_errors("write"):
                self._store.put(
                    path,
                    content,
                    mode={"e_tag": tag} if version is None else {"e_tag": tag, "version": version},
                )
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            return False
        return True

    def delete(self, paths: list[str]) -> None:
        """Delete objects, in order; those that are not there count as deleted."""
        for path in paths:
            with self._plain_errors("delete"):
                try:
                    self._store.delete(path)
                except FileNotFoundError:
                    continue

    @contextmanager
    def _plain_errors(self, what: str) -> Iterator[None]:
        """Say what went wrong; what other writers did is passed on as it is."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except BaseError as error:
            reason, is_refused = _reason(str(error))
            raise StoreUnreachable(f"cannot {what} in {self.url}: {reason}", is_refused) from None


def check_url(url: str, field: str = "DUBITO_STORE") -> None:
    """Raise InvalidInput for what is no URL of a bucket, or has what is secret in it."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in SCHEMES and bool(parts.hostname)
        holds_more = (
            "@" in parts.netloc or ":" in parts.netloc or bool(parts.query or parts.fragment)
        )
    except ValueError:
        is_whole, holds_more = False, False
    expected = "a folder, or a URL such as s3://bucket/prefix (s3, gs or az)"
    if holds_more:
        raise InvalidInput(
            field, f"{expected} with nothing else, credentials in the environment", "more"
        )
    if not is_whole:
        raise InvalidInput(field, expected, repr(url[:80]))


def _reason(text: str) -> tuple[str, bool]:
    """Return what is wrong, in words of our own, and whether it is that the server refuses."""
    if "169.254.169.254" in text or "metadata.google" in text or "credential" in text.lower():
        return NO_CREDENTIALS, True
    if "BadScheme" in text or "URL scheme is not allowed" in text:
        return "the endpoint is http://, which AWS_ALLOW_HTTP=true must allow", True
    found = re.search(r"status code: (\d{3})", text)
    if found is None:
        return "it cannot be reached", False
    status = found.group(1)
    return STATUSES.get(status, f"the server answers {status}"), status in STATUSES
