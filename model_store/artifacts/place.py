"""From what DUBITO_STORE says, a folder or a bucket's URL, to the store there."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from model_store.artifacts.folder import Folder
from model_store.artifacts.storage import Storage
from model_store.artifacts.store import ModelStore
from model_store.errors import InvalidInput

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

CACHE = Path("cache")  # where copies of a bucket's versions are, unless DUBITO_CACHE says otherwise
CACHE_BYTES = 10 << 30  # at most, unless DUBITO_CACHE_BYTES says otherwise


def is_url(place: str) -> bool:
    return "://" in place


def open_store(
    place: str | Path,
    trusted: "Ed25519PublicKey | None" = None,
    cache: Path = CACHE,
    cache_bytes: int = CACHE_BYTES,
) -> ModelStore:
    """Return the store in a folder or, with its copies in `cache`, in a bucket. Nothing is read
    yet.

    Raises:
        InvalidInput: if a URL is none of a bucket, or the extra `bucket` is not installed.
    """
    return ModelStore(_storage(place, cache, cache_bytes), trusted)


def _storage(place: str | Path, cache: Path, cache_bytes: int) -> Storage:
    if isinstance(place, Path) or not is_url(place):
        return Folder(Path(place))
    from model_store.artifacts.bucket import Bucket
    from model_store.artifacts.cache import Cache
    from model_store.artifacts.objects import Objects

    return Bucket(Objects.of(place), Cache(cache, place, cache_bytes))


def store_of_environment(place: str | None = None) -> ModelStore:
    """Return the store that DUBITO_STORE, DUBITO_CACHE and DUBITO_CACHE_BYTES say, or the one at
    `place`."""
    environment = os.environ
    given = environment.get("DUBITO_CACHE_BYTES", str(CACHE_BYTES))
    if not given.isdecimal() or int(given) < 1:
        raise InvalidInput("DUBITO_CACHE_BYTES", "a number of bytes, at least 1", repr(given[:40]))
    return open_store(
        place or environment.get("DUBITO_STORE", "models"),
        cache=Path(environment.get("DUBITO_CACHE", str(CACHE))),
        cache_bytes=int(given),
    )
