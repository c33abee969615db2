"""An in-memory bucket that counts requests and injects faults."""

from collections import Counter
from pathlib import Path

from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from model_store.artifacts.bucket import Bucket
from model_store.artifacts.cache import Cache
from model_store.artifacts.objects import Objects
from model_store.artifacts.store import ModelStore

URL = "s3://bucket/prefix"
SECRET = "a-secret-that-nobody-may-see"


class Killed(BaseException):
    """The simulated process has ended. Do not catch this."""


class FaultyBucket:
    """A replacement of obstore's store in `Objects`."""

    def __init__(self):
        self.memory = MemoryStore()
        self.requests = Counter()
        self.is_reachable = True
        self.conditions = {"create", "e_tag"}  # supported conditions
        self.kill_at = None  # number of the first change that kills the writer
        self.lose_response_at = None  # number of the change whose response is lost
        self.changes = 0
        self.before_get = lambda path: None

    def _count(self, kind, is_change=False):
        if not self.is_reachable:
            raise GenericError(
                f"Generic S3 error: HTTP error: error sending request, Authorization: {SECRET}"
            )
        if is_change:
            self.changes += 1
            if self.kill_at is not None and self.changes >= self.kill_at:
                raise Killed
        self.requests[kind] += 1

    def _respond(self):
        if self.changes == self.lose_response_at:
            raise GenericError("Generic S3 error: HTTP error: operation timed out")

    def list(self, prefix=None):
        self._count("list")
        return self.memory.list(prefix)

    def get(self, path):
        self._count("get")
        self.before_get(path)
        return self.memory.get(path)

    def put(self, path, content, mode="overwrite"):
        self._count("put", is_change=True)
        condition = "create" if mode == "create" else "e_tag" if isinstance(mode, dict) else None
        result = self.memory.put(
            path, content, mode=mode if condition in self.conditions else "overwrite"
        )
        self._respond()
        return result

    def delete(self, path):
        self._count("delete", is_change=True)
        self.memory.delete(path)
        self._respond()

    def bucket(self, cache: Path, cache_bytes: int = 1 << 30) -> Bucket:
        return Bucket(Cache(cache, Objects(URL, self), cache_bytes))

    def store(self, cache: Path, cache_bytes: int = 1 << 30) -> ModelStore:
        return ModelStore(self.bucket(cache, cache_bytes))
