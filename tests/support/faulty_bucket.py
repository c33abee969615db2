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
        self.heeds = {"create", "e_tag"}  # conditions
        self.stops_at = (
            None  # the changing request before which, and at every later one, the writer is killed
        )
        self.loses_answer_to = None
        self.changes = 0
        self.before_get = lambda path: None

    def _asked(self, what, changes=False):
        if not self.is_reachable:
            raise GenericError(
                f"Generic S3 error: HTTP error: error sending request, Authorization: {SECRET}"
            )
        if changes:
            self.changes += 1
            if self.stops_at is not None and self.changes >= self.stops_at:
                raise Killed
        self.requests[what] += 1

    def _answered(self):
        if self.changes == self.loses_answer_to:
            raise GenericError("Generic S3 error: HTTP error: operation timed out")

    def list(self, prefix=None):
        self._asked("list")
        return self.memory.list(prefix)

    def get(self, path):
        self._asked("get")
        self.before_get(path)
        return self.memory.get(path)

    def put(self, path, content, mode="overwrite"):
        self._asked("put", changes=True)
        condition = "create" if mode == "create" else "e_tag" if isinstance(mode, dict) else None
        result = self.memory.put(
            path, content, mode=mode if condition in self.heeds else "overwrite"
        )
        self._answered()
        return result

    def delete(self, path):
        self._asked("delete", changes=True)
        self.memory.delete(path)
        self._answered()

    def bucket(self, cache: Path, cache_bytes: int = 1 << 30) -> Bucket:
        return Bucket(Cache(cache, Objects(URL, self), cache_bytes))

    def store(self, cache: Path, cache_bytes: int = 1 << 30) -> ModelStore:
        return ModelStore(self.bucket(cache, cache_bytes))
