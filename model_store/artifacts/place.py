"""Open the store in a folder or at a bucket's URL."""

import os
from pathlib import Path

from model_store.artifacts.folder import Folder
from model_store.artifacts.signature import read_public_key
from model_store.artifacts.storage import Storage
from model_store.artifacts.store import ModelStore
from model_store.errors import InvalidInput

CACHE = Path("cache")  # default of DUBITO_CACHE: the folder of a bucket's copies
CACHE_BYTES = 10 << 30  # default of DUBITO_CACHE_BYTES
VERIFY_KEY_VARIABLE = "DUBITO_VERIFY_KEY_FILE"


def is_url(place: str) -> bool:
    return "://" in place


def resolve_location(place: str) -> str:
    """Return a bucket's URL, or the absolute path of a folder."""
    return place if is_url(place) else str(Path(place).resolve())


def open_store(
    place: str | Path,
    cache: str | Path = CACHE,
    cache_bytes: int = CACHE_BYTES,
    verify_key_file: str | Path | None = None,
) -> ModelStore:
    """Open the store in a folder, or in a bucket with copies in `cache`, without reading it."""
    trusted = None
    if verify_key_file is not None:
        trusted = read_public_key(Path(verify_key_file), VERIFY_KEY_VARIABLE)
    return ModelStore(_storage(place, Path(cache), cache_bytes), trusted)


def _storage(place: str | Path, cache: Path, cache_bytes: int) -> Storage:
    if isinstance(place, Path) or not is_url(place):
        return Folder(Path(place))
    from model_store.artifacts.bucket import Bucket
    from model_store.artifacts.cache import Cache
    from model_store.artifacts.objects import Objects

    return Bucket(Objects.from_url(place), Cache(cache, place, cache_bytes))


def store_from_environment(place: str | None = None) -> ModelStore:
    """Open the store at `place` or DUBITO_STORE, with DUBITO_CACHE and DUBITO_CACHE_BYTES."""
    environment = os.environ
    cache_bytes = environment.get("DUBITO_CACHE_BYTES", str(CACHE_BYTES))
    if not cache_bytes.isdecimal() or int(cache_bytes) < 1:
        raise InvalidInput(
            "DUBITO_CACHE_BYTES", "a number of bytes, at least 1", repr(cache_bytes[:40])
        )
    store = place or environment.get("DUBITO_STORE", "models")
    return open_store(store, environment.get("DUBITO_CACHE", CACHE), int(cache_bytes))
