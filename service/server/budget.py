"""The process's budget of memory for requests: bodies, the data made from them, unread answers.

Memory is reserved before it is allocated, so a request that does not fit is answered 429 before it
costs anything. A client may use up to three times the memory that remains for all others: three
quarters if it is alone, three sevenths if there are two. So a new client always finds some memory.
Small requests may use the remainder too.
"""

import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from service.errors import Overloaded, TooLarge

SCOPE_KEY = "dubito.reservation"
RETRY_AFTER_S = 1
TIMES_LEFT = 3  # a client may use this many times the remaining memory
SMALL_BYTES = 256 << 10  # maximum size of a small request


class ByteBudget:
    """A maximum number of bytes in use. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._of_clients: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def try_acquire(self, size: int, client: Hashable = None, small: bool = True) -> bool:
        """Take bytes if they remain and the client's share allows it, or if they are few."""
        with self._lock:
            left = self.most - self.held - size
            if left < 0 or not (small or self._of_clients[client] + size <= TIMES_LEFT * left):
                return False
            self._add(size, client)
            return True

    def force(self, size: int) -> None:
        """Count bytes that are in use already, even beyond the budget."""
        with self._lock:
            self._add(size, None)

    def release(self, size: int, client: Hashable = None) -> None:
        with self._lock:
            self._add(-size, client)

    def _add(self, size: int, client: Hashable) -> None:
        self.held += size
        self._of_clients[client] += size
        if self._of_clients[client] == 0:
            del self._of_clients[client]

    @property
    def overdrawn(self) -> bool:
        return self.held > self.most


class Reservation:
    """The bytes of one request; they are released when the request is over."""

    def __init__(self, budget: ByteBudget, client: Hashable = None) -> None:
        self.budget = budget
        self.held = 0
        self.client = client

    @property
    def most(self) -> int:
        return self.budget.most * TIMES_LEFT // (TIMES_LEFT + 1)

    def assign(self, client: Hashable) -> None:
        """Set the client before any bytes are taken."""
        assert self.held == 0
        self.client = client

    def acquire(self, size: int) -> None:
        """Take bytes for the request.

        Raises:
            Overloaded: if they do not remain, or exceed the client's share.
        """
        self._take(size, self.held + size)
        self.held += size

    def reserve(self, size: int, what: str) -> None:
        """Take bytes for data made from the request.

        Raises:
            TooLarge: if they exceed any client's share of the whole budget.
            Overloaded: as `acquire`.
        """
        self._check(self.held + size, what)
        self.acquire(size)

    @contextmanager
    def hold(self, size: int, what: str) -> Iterator[None]:
        """Hold bytes temporarily, in any thread, even if the request ends before.

        Raises:
            TooLarge, Overloaded: as `reserve`.
        """
        self._check(size, what)
        self._take(size, size)
        try:
            yield
        finally:
            self.budget.release(size, self.client)

    def shrink(self, to: int) -> None:
        """Release all but `to` bytes, for example once the rows are one array."""
        self.release(max(0, self.held - to))

    def release(self, size: int | None = None) -> None:
        """Release bytes, by default all."""
        size = self.held if size is None else size
        self.held -= size
        self.budget.release(size, self.client)

    def _check(self, total: int, what: str) -> None:
        if total > self.most:
            raise TooLarge(what, f"at most {self.most} bytes in memory", f"about {total}")

    def _take(self, size: int, total: int) -> None:
        if not self.budget.try_acquire(size, self.client, small=total <= SMALL_BYTES):
            raise Overloaded(RETRY_AFTER_S)
