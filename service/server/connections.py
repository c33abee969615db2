"""Limits that connections share: the turns of each client and the number of connections.

A client is an API key or an address, and has a limited number of turns at a time. A request without
a turn waits in its connection, unparsed. While several clients are active, each gets only a few
turns, so that no client delays the others for long.

A client can use three quarters of `max_connections`. At the limit, the service closes the longest
idle connection of the client with most connections. If no connection is idle, a new connection can
only request health and metrics.
"""

import asyncio
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Literal

from service.server.budget import ByteBudget

if TYPE_CHECKING:
    from service.auth.keys import KeyRing
    from service.server.protocol import HttpConnection

logger = logging.getLogger("dubito")

MAX_OVER_LIMIT = 100  # connections beyond the limit, for health requests and lingering
ACTIVE_S = 1.0  # a client stays active for this long after its last request began
MAX_FAILED_KEYS = 20  # per address and `FAILED_KEYS_S`
FAILED_KEYS_S = 60

Kind = Literal["request", "health", "refusal", "read"]
Account = tuple[Kind, Hashable]  # kind of request, and client
# Number of simultaneous turns, and their longest duration in seconds. The engine divides long work.
ALONE, SHARED = (64, 0.02), (6, 0.1)
# A read takes up to 256 kB. While other clients are active, a client uploads up to 32 MB/s.
READ_ALONE, READ_SHARED = (1, 0.001), (1, 0.008)
FIXED = {"health": (2, 0.1), "refusal": (1, 0.01)}

_KEY = re.compile(rb"(?i)\r\n(?:x-api-key:|authorization:[ \t]*bearer )[ \t]*([!-~]+)")


class Turn:
    """A client's right to process a request, which ends after `max_s` seconds."""

    def __init__(self, turns: "Turns", account: Account, max_s: float) -> None:
        self._turns, self._account = turns, account
        self.kind = account[0]
        loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = loop.call_later(max_s, self.end)

    def end(self, _: object = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._turns.release(self._account)


class Turns:
    """Limits how many turns each client has at once."""

    def __init__(self) -> None:
        self._running: Counter[Account] = Counter()
        self._waiting: dict[Account, deque[Callable[[Turn], None]]] = {}
        self._active: dict[Hashable, float] = {}  # time of the latest request, oldest first

    def begin(self, account: Account, callback: Callable[[Turn], None]) -> Turn | None:
        """Begin a turn if one is free. Otherwise, queue the callback and return None."""
        kind, client = account
        if kind == "request":
            self._active.pop(client, None)
            self._active[client] = asyncio.get_running_loop().time()
        max_turns, max_s = self._limits(account)
        if self._running[account] < max_turns:
            self._running[account] += 1
            return Turn(self, account, max_s)
        self._waiting.setdefault(account, deque()).append(callback)
        return None

    def release(self, account: Account) -> None:
        self._running[account] -= 1
        waiting = self._waiting.get(account, ())
        max_turns, max_s = self._limits(account)
        while waiting and self._running[account] < max_turns:
            self._running[account] += 1
            turn = Turn(self, account, max_s)
            asyncio.get_running_loop().call_soon(waiting.popleft(), turn)
        if not waiting:
            self._waiting.pop(account, None)
        if not self._running[account]:
            del self._running[account]

    def _limits(self, account: Account) -> tuple[int, float]:
        kind, client = account
        if kind in FIXED:
            return FIXED[kind]
        start_s = asyncio.get_running_loop().time() - ACTIVE_S
        while self._active and self._active[oldest := next(iter(self._active))] < start_s:
            del self._active[oldest]
        has_others = len(self._active) > (client in self._active)
        if kind == "read":
            return READ_SHARED if has_others else READ_ALONE
        return SHARED if has_others else ALONE


class Connections:
    def __init__(
        self,
        receive_s: float,
        max_connections: int,
        budget: ByteBudget,
        health_paths: Iterable[str] = (),
        ring: "KeyRing | None" = None,
    ) -> None:
        self.receive_s = receive_s
        self.max_connections = max_connections
        self.budget = budget
        self.health_paths = frozenset(health_paths)  # available beyond `max_connections`
        self.ring = ring
        self.turns = Turns()
        self.open: set[HttpConnection] = set()
        self.clients: Counter[Hashable] = Counter()  # open connections per client
        self.waiting: dict[HttpConnection, None] = {}  # idle or receiving, longest first
        self.over_limit: dict[HttpConnection, None] = {}  # over the limit, oldest first
        self.unread: dict[HttpConnection, None] = {}  # with unread answers, oldest first
        self.receiving = 0  # connections that receive a body
        names = b"|".join(re.escape(path.encode()) for path in self.health_paths)
        self._health = re.compile(rb"(?:GET|HEAD) [^ ?]*(?:%b)[? ]" % names)
        self._failed_keys: Counter[Hashable] = Counter()  # per address until `_failed_keys_end`
        self._failed_keys_end = 0.0

    def add(self, connection: "HttpConnection") -> None:
        """Register a new connection, closing an idle one if the limit is reached."""
        max_per_client = self.max_connections - self.max_connections // 4
        if self.clients[connection.client] >= max_per_client:
            has_room = self._evict(connection.client)
        else:
            has_room = len(self.open) < self.max_connections or self._evict()
        if has_room:
            self.open.add(connection)
            self.clients[connection.client] += 1
            self.waiting[connection] = None
            return
        self.over_limit[connection] = None
        if len(self.over_limit) > MAX_OVER_LIMIT:
            next(iter(self.over_limit)).evict()

    def _evict(self, client: Hashable = None) -> bool:
        candidates = [c for c in self.waiting if client is None or c.client == client]
        if candidates:  # max() returns the first, which has waited longest
            max(candidates, key=lambda c: self.clients[c.client]).evict()
        return bool(candidates)

    def forget(self, connection: "HttpConnection") -> None:
        if connection in self.open:
            self.open.remove(connection)
            self.clients[connection.client] -= 1
            if not self.clients[connection.client]:
                del self.clients[connection.client]
        for connections in (self.waiting, self.over_limit, self.unread):
            connections.pop(connection, None)

    def identify(self, head: bytes, address: Hashable) -> Account:
        """Return the account for the request's key if it is valid, else for its address."""
        if self._health.match(head):
            return "health", address
        match = None if self.ring is None else _KEY.search(head)
        if self.ring is None or match is None:
            return "request", address
        keys = self.ring.keys
        key = keys.find(match[1])
        if key is not None and not key.has_expired:
            return "request", ("key", key.name)
        is_refused = not keys.api_is_open and self._has_failed_too_often(address)
        return "refusal" if is_refused else "request", address

    def _has_failed_too_often(self, address: Hashable) -> bool:
        time_s = asyncio.get_running_loop().time()
        if time_s >= self._failed_keys_end:
            self._failed_keys.clear()
            self._failed_keys_end = time_s + FAILED_KEYS_S
        self._failed_keys[address] += 1
        count = self._failed_keys[address] - MAX_FAILED_KEYS
        if count == 1:
            logger.warning("%s sent %s wrong keys; refusing more", address, MAX_FAILED_KEYS)
        return count > 0

    def relieve(self) -> None:
        """Abort connections with unread answers, oldest first, until the budget suffices."""
        while self.budget.used_bytes > self.budget.max_bytes and self.unread:
            next(iter(self.unread)).abort()
