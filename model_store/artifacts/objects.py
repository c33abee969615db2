"""Access to the objects in a bucket, using obstore from the `bucket` extra."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from model_store.errors import InvalidInput, StoreUnreachable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az")
PROBE = ".probe-"  # prefix of test objects
PIECE_BYTES = 1 << 20  # of a download
CONNECT_S = 5
REQUEST_S = 10  # lists and small objects
TRANSFER_S = 3600  # large objects
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


class Entry(NamedTuple):
    tag: str
    modified: datetime
    size: int  # bytes


class Content(NamedTuple):
    content: bytes
    tag: str
    version: str | None


class Objects:
    """A thread-safe client for the objects under a URL.

    Every method raises StoreUnreachable if the bucket cannot be reached or refuses the request.

    Args:
        transfers: a store with a longer timeout, for large objects.
    """

    def __init__(
        self, url: str, store: "ObjectStore", transfers: "ObjectStore | None" = None
    ) -> None:
        self.url = url
        self._store = store
        self._transfers = transfers or store
        self._is_closed = False

    @classmethod
    def from_url(cls, url: str, field: str = "DUBITO_STORE") -> "Objects":
        """Open a URL with credentials from the environment. Errors name the setting `field`."""
        check_url(url, field)
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError:
            expected = "the package of the extra `bucket` for a URL"
            raise InvalidInput(field, expected, "no such package") from None
        plain = any(os.environ.get(name, "").lower() in ("1", "true") for name in PLAIN_HTTP)

        def open_store(seconds: int) -> "ObjectStore":
            return from_url(
                url,
                client_options={
                    "allow_http": plain,
                    "connect_timeout": f"{CONNECT_S}s",
                    "timeout": f"{seconds}s",
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=seconds)},
            )

        try:
            return cls(url, open_store(REQUEST_S), open_store(TRANSFER_S))
        except BaseError as error:
            message = str(error).splitlines()[0]
            received = message if "specified" in message else "a URL that obstore rejects"
            raise InvalidInput(field, "a bucket with all that its kind needs", received) from None

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        with self._convert_errors("list"):
            entries: Any = self._store.list(prefix or None).collect()
            return {
                e["path"]: Entry(e["e_tag"] or "", e["last_modified"], e["size"]) for e in entries
            }

    def get(self, path: str, limit: int) -> Content | None:
        """Read an object, up to `limit` + 1 bytes. Return None if it does not exist."""
        with suppress(FileNotFoundError), self._convert_errors("read"):
            result = self._store.get(path)
            content = b""
            for part in result.stream():
                content += bytes(part)
                if len(content) > limit:
                    break
            meta = result.meta
            return Content(content[: limit + 1], meta["e_tag"] or "", meta["version"])
        return None

    def pieces(self, path: str) -> Iterator[bytes]:
        """Yield an object's content in chunks, or raise FileNotFoundError."""
        with self._convert_errors("read"):
            for part in self._transfers.get(path).stream(min_chunk_size=PIECE_BYTES):
                if self._is_closed:
                    raise StoreUnreachable(f"cannot read in {self.url}: it is not read any more")
                yield bytes(part)

    def span(self, path: str, first: int, size: int) -> tuple[bytes, str]:
        """Return `size` bytes from `first` and the object's tag, or raise FileNotFoundError."""
        with self._convert_errors("read"):
            result = self._transfers.get(path, options={"range": (first, first + size)})
            return bytes(result.bytes()), result.meta["e_tag"] or ""

    def close(self) -> None:
        self._is_closed = True

    def put(self, path: str, content: bytes | Path) -> None:
        with self._convert_errors("write"):
            self._transfers.put(path, content)

    def create(self, path: str, content: bytes) -> bool:
        """Write a new object. Return False if it already exists."""
        return self._put_if(path, content, "create")

    def replace(self, path: str, content: bytes, current: Content) -> bool:
        """Replace an object. Return False if it was changed by another writer."""
        numbered = {} if current.version is None else {"version": current.version}
        with suppress(FileNotFoundError):
            return self._put_if(path, content, {"e_tag": current.tag, **numbered})
        return False

    def _put_if(self, path: str, content: bytes, mode: Any) -> bool:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with suppress(AlreadyExistsError, PreconditionError), self._convert_errors("write"):
            self._store.put(path, content, mode=mode)
            return True
        return False

    def ignored_condition(self) -> str | None:
        """Return the conditional request header that the server ignores, if there is one."""
        path = f"{PROBE}{uuid4().hex}"
        self.entries(path)  # raises if the bucket is missing; a write might create it
        try:
            created, again = self.create(path, b"1"), self.create(path, b"2")
            if again or not created:
                return "If-None-Match"
            other = Content(b"", '"00000000000000000000000000000000"', None)
            is_lost, current = self.replace(path, b"3", other), self.get(path, 1)
            is_replaced = current is not None and self.replace(path, b"4", current)
            return "If-Match" if is_lost or not is_replaced else None
        finally:
            self.delete([path])

    def delete(self, paths: list[str]) -> None:
        """Delete objects in the given order, ignoring missing ones."""
        for path in paths:
            with self._convert_errors("delete"), suppress(FileNotFoundError):
                self._store.delete(path)

    @contextmanager
    def _convert_errors(self, action: str) -> Iterator[None]:
        """Convert errors from obstore and remove secrets from their messages."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except BaseError as error:
            reason = _reason(str(error))
            raise StoreUnreachable(f"cannot {action} in {self.url}: {reason}") from None


def check_url(url: str, field: str) -> None:
    """Raise InvalidInput if a URL is not a bucket's URL or contains credentials."""
    has_extra: object = False
    try:
        parts = urlsplit(url)
        has_extra = {"@", ":"} & {*parts.netloc} or parts.query or parts.fragment
        is_valid = parts.scheme in SCHEMES and parts.hostname and not has_extra
    except ValueError:
        is_valid = False
    if not is_valid:
        expected = "a folder, or a URL such as s3://bucket/prefix (s3, gs or az)"
        received = "one with more (set credentials in the environment)" if has_extra else url[:80]
        raise InvalidInput(field, expected, received)


def _reason(text: str) -> str:
    if "169.254.169.254" in text or "metadata.google" in text or "credential" in text.lower():
        return NO_CREDENTIALS
    if "BadScheme" in text or "URL scheme is not allowed" in text:
        return "the endpoint is http://, which AWS_ALLOW_HTTP=true must allow"
    match = re.search(r"status code: (\d{3})", text)
    if match is None:
        return "it cannot be reached"
    status = match.group(1)
    return STATUSES.get(status, f"the server answers {status}")
