"""One budget of bytes for the process: bodies that are read, what is made of them, answers that
nobody has read yet.

Whoever is about to hold memory takes its bytes first and gives them back when they are gone. A
request that finds too little left is answered 429 before it costs anything. No client may hold more
than three times what would then be left for all: a lone one three quarters, each of two three
sevenths, and whoever comes next finds something left. What is small may take of the rest too.
"""

import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

from service.errors import Overloaded, TooLarge

SCOPE_KEY = "dubito.lease"
RETRY_AFTER_S = 1
TIMES_LEFT = 3  # how many times what is left a client may hold
SMALL_BYTES = 256 << 10  # of a request that counts as small


class ByteBudget:
    """A number of bytes that may be held at a time. Any thread may call it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._of_clients: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def try_acquire(self, size: int) -> bool:
        """Take so many bytes if they are left; return whether they were."""
        with self._lock:
            if self.held + size > self.most:
                return False
            self.held += size
            return True

    def try_acquire_share(self, size: int, client: Hashable, small: bool) -> bool:
        """Take so many bytes for a client if they are left and of its share, or small; return
        whether."""
        with self._lock:
            left = self.most - self.held - size
            if left < 0 or not (small or self._of_clients[client] + size <= TIMES_LEFT * left):
                return False
            self.held += size
            self._of_clients[client] += size
            return True

    def force(self, size: int) -> None:
        """Take so many bytes that are held already, whether they are left or not."""
        with self._lock:
            self.held += size

    def release(self, size: int) -> None:
        """Give so many bytes back."""
        with self._lock:
            self.held -= size

    def release_share(self, size: int, client: Hashable) -> None:
        """Give so many bytes of a client back."""
        with self._lock:
            self.held -= size
            self._of_clients[client] -= size
            if self._of_clients[client] == 0:
                del self._of_clients[client]

    @property
    def overdrawn(self) -> bool:
        """Whether more is held than may be."""
        return self.held > self.most


class Lease:
    """What one request has taken of a budget; all of it goes back when the request is over."""

    def __init__(self, budget: ByteBudget, client: Hashable = None) -> None:
        self.budget = budget
        self.held = 0
        self._client = client

    @property
    def most(self) -> int:
        """How many bytes a request may take when nothing else is held."""
        return self.budget.most * TIMES_LEFT // (TIMES_LEFT + 1)

    def belongs_to(self, client: Hashable) -> None:
        """From now on count what is taken as this client's; nothing may be held yet."""
        assert self.held == 0
        self._client = client

    def acquire(self, size: int) -> None:
        """Take so many bytes for the request.

        Raises:
            Overloaded: if so many are not left, or are more than the client's share.
        """
        if not self.budget.try_acquire_share(size, self._client, self.held + size <= SMALL_BYTES):
            raise Overloaded(RETRY_AFTER_S)
        self.held += size

    def reserve(self, size: int, what: str) -> None:
        """Take so many bytes for what will be made of the request.

        Raises:
            TooLarge: if there are never so many.
            Overloaded: as `acquire`.
        """
        if self.held + size > self.most:
            raise TooLarge(
                f"{what}: expected at most {self.most} bytes in memory, got about "
                f"{self.held + size}"
            )
        self.acquire(size)

    @contextmanager
    def beside(self, size: int, what: str) -> Iterator[None]:
        """Hold so many bytes for the moment, in whatever thread and even if the request is over
        before.

        Raises:
            TooLarge, Overloaded: as `reserve`.
        """
        if size > self.most:
            raise TooLarge(
                f"{what}: expected at most {self.most} bytes in memory, got about {size}"
            )
        if not self.budget.try_acquire_share(size, self._client, size <= SMALL_BYTES):
            raise Overloaded(RETRY_AFTER_S)
        try:
            yield
        finally:
            self.budget.release_share(size, self._client)

    def shrink(self, to: int) -> None:
        """Give back all that the request holds beyond so many bytes, as once its rows are one
        array."""
        self.release(max(0, self.held - to))

    def release(self, size: int | None = None) -> None:
        """Give so many bytes back, by default all."""
        size = self.held if size is None else size
        self.held -= size
        self.budget.release_share(size, self._client)


def lease_of(scope: Scope) -> Lease:
    """Return a request's lease; without a server that gives one, as in tests, it has no bound."""
    lease: Lease | None = scope.get(SCOPE_KEY)
    if lease is None:
        lease = scope[SCOPE_KEY] = Lease(ByteBudget(1 << 62))
    return lease
