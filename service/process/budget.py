"""One budget of bytes for the process: bodies that are read, what is made of them, answers that nobody has read yet.

Whoever is about to hold memory takes its bytes first and gives them back when they are gone. A request that finds too
little left is answered 429 before it costs anything.
"""

import threading

from starlette.types import Scope

from service.errors import Overloaded

SCOPE_KEY = "dubito.lease"
RETRY_AFTER_S = 1


class ByteBudget:
    """A number of bytes that may be held at a time. Any thread may call it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._lock = threading.Lock()

    def acquire(self, size: int) -> None:
        """Take so many bytes.

        Raises:
            Overloaded: if so many are not left; none are taken then.
        """
        if not self.try_acquire(size):
            raise Overloaded(RETRY_AFTER_S)

    def try_acquire(self, size: int) -> bool:
        """Take so many bytes if they are left; return whether they were."""
        with self._lock:
            if self.held + size > self.most:
                return False
            self.held += size
            return True

    def force(self, size: int) -> None:
        """Take so many bytes that are held already, whether they are left or not."""
        with self._lock:
            self.held += size

    def release(self, size: int) -> None:
        """Give so many bytes back."""
        with self._lock:
            self.held -= size

    @property
    def overdrawn(self) -> bool:
        """Whether more is held than may be."""
        return self.held > self.most


class Lease:
    """What one request has taken of a budget; all of it goes back when the request is over."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.held = 0

    def acquire(self, size: int) -> None:
        """Take so many bytes for the request.

        Raises:
            Overloaded: if so many are not left.
        """
        self.budget.acquire(size)
        self.held += size

    def shrink(self, to: int) -> None:
        """Give back all that the request holds beyond so many bytes, as once its rows are one array."""
        self.release(max(0, self.held - to))

    def release(self, size: int | None = None) -> None:
        """Give so many bytes back, by default all."""
        size = self.held if size is None else size
        self.held -= size
        self.budget.release(size)


def lease_of(scope: Scope) -> Lease:
    """Return a request's lease; without a server that gives one, as in tests, it has no bound."""
    lease: Lease | None = scope.get(SCOPE_KEY)
    if lease is None:
        lease = scope[SCOPE_KEY] = Lease(ByteBudget(1 << 62))
    return lease
