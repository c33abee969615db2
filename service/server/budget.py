"""One budget of bytes for the process: request bodies, what is made of them, unread answers.

Memory is reserved before it is allocated. A request that does not fit is answered 429 before it
costs anything. No client may hold more than three times what would then be left for all: a lone
one three quarters, each of two three sevenths, so the next client always finds something left.
Small requests may take of the rest too.
"""

import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from service.errors import Overloaded, TooLarge

SCOPE_KEY = "dubito.reservation"
RETRY_AFTER_S = 1
TIMES_LEFT = 3  # how many times what is left a client may hold
SMALL_BYTES = 256 << 10  # of a request that counts as small


class ByteBudget:
    """A number of bytes that may be held at a time. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._of_clients: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def try_acquire(self, size: int, client: Hashable = None, small: bool = True) -> bool:
        """Take bytes if they are left and within the client's share, or small."""
        with self._lock:
            left = self.most - self.held - size
            if left < 0 or not (small or self._of_clients[client] + size <= TIMES_LEFT * left):
                return False
            self._add(size, client)
            return True

    def force(self, size: int) -> None:
        """Count bytes that are held already, whether they are left or not."""
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
    """The bytes that one request holds of a budget; all are released when the request is over."""

    def __init__(self, budget: ByteBudget, client: Hashable = None) -> None:
        self.budget = budget
        self.held = 0
        self.client = client

    @property
    def most(self) -> int:
        return self.budget.most * TIMES_LEFT // (TIMES_LEFT + 1)

    def assign(self, client: Hashable) -> None:
        """Count what is taken from now on as this client's; nothing may be held yet."""
        assert self.held == 0
        self.client = client

    def acquire(self, size: int) -> None:
        """Take bytes for the request.

        Raises:
            Overloaded: if they are not left, or are more than the client's share.
        """
        self._take(size, self.held + size)
        self.held += size

    def reserve(self, size: int, what: str) -> None:
        """Take bytes for what will be made of the request.

        Raises:
            TooLarge: if the budget can never hold them.
            Overloaded: as `acquire`.
        """
        self._check(self.held + size, what)
        self.acquire(size)

    @contextmanager
    def hold(self, size: int, what: str) -> Iterator[None]:
        """Hold bytes for a moment, in any thread and even if the request is over before.

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
        """Release what is held beyond `to` bytes, as once the rows are one array."""
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
