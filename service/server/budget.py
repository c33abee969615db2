"""A process's memory budget for request bodies, decoded rows and unsent answers.

A request that does not fit gets 429. A client can reserve up to three times the bytes that remain
free: one client three quarters, two clients three sevenths each. Small requests can also use the
rest.
"""

import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from model_store.errors import TooLarge
from service.errors import Overloaded

SCOPE_KEY = "dubito.reservation"
RETRY_AFTER_S = 1
MAX_SHARE = 3  # ratio of a client's bytes to the free bytes
SMALL_BYTES = 256 << 10  # maximum of a small request


class ByteBudget:
    """A thread-safe limit on the bytes in use."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._client_bytes: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def try_acquire(self, size: int, client: Hashable = None, small: bool = True) -> bool:
        """Try to reserve bytes within the budget and, unless `small`, the client's share."""
        with self._lock:
            left = self.max_bytes - self.used_bytes - size
            if left < 0 or not (small or self._client_bytes[client] + size <= MAX_SHARE * left):
                return False
            self._add(size, client)
            return True

    def force(self, size: int) -> None:
        """Count bytes that are already allocated, even beyond the limit."""
        with self._lock:
            self._add(size, None)

    def release(self, size: int, client: Hashable = None) -> None:
        with self._lock:
            self._add(-size, client)

    def _add(self, size: int, client: Hashable) -> None:
        self.used_bytes += size
        self._client_bytes[client] += size
        if self._client_bytes[client] == 0:
            del self._client_bytes[client]


@dataclass(eq=False)
class Reservation:
    """The memory reserved for one request."""

    budget: ByteBudget
    client: Hashable = None  # constant after the first reservation
    used_bytes: int = 0

    @property
    def max_bytes(self) -> int:
        return self.budget.max_bytes * MAX_SHARE // (MAX_SHARE + 1)

    def acquire(self, size: int) -> None:
        """Reserve bytes until the end of the request, or raise Overloaded."""
        self._take(size, self.used_bytes + size)
        self.used_bytes += size

    def reserve(self, size: int, field: str) -> None:
        """Reserve bytes for data from a field. Raise TooLarge if no client could have so many."""
        self._check(self.used_bytes + size, field)
        self.acquire(size)

    @contextmanager
    def hold(self, size: int, field: str) -> Iterator[None]:
        """Reserve bytes like `reserve` for a `with` block, which can outlast the request."""
        self._check(size, field)
        self._take(size, size)
        try:
            yield
        finally:
            self.budget.release(size, self.client)

    def shrink(self, to: int) -> None:
        """Release all bytes beyond `to`."""
        self.release(max(0, self.used_bytes - to))

    def release(self, size: int | None = None) -> None:
        """Release bytes, by default all."""
        size = self.used_bytes if size is None else size
        self.used_bytes -= size
        self.budget.release(size, self.client)

    def _check(self, total: int, field: str) -> None:
        if total > self.max_bytes:
            raise TooLarge(field, f"at most {self.max_bytes} bytes in memory", f"about {total}")

    def _take(self, size: int, total: int) -> None:
        if not self.budget.try_acquire(size, self.client, small=total <= SMALL_BYTES):
            raise Overloaded(RETRY_AFTER_S)
