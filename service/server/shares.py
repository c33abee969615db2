"""Fair shares: identify the client of a request, and order the work of several clients.

Each client has an account of the work done for it. The next piece belongs to the client whose
account will be smallest after it. A new client starts with the smallest account of the waiting
clients, so a pause neither saves nor costs anything. A client therefore waits for at most one piece
of each other client.

Within a client, each of n waiting requests is owed an n-th of the client's work, and the request
that would finish first at that rate is next. A small request does not wait for all large ones
before it, and a stream of small requests does not block a large one. Requests of equal size keep
their order.
"""

import ipaddress
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

KEY_NAME = "dubito.key"  # in a request's scope: the name of its valid key
IPV6_NETWORK_BITS = 64  # a customer can choose any address within such a network

T = TypeVar("T")


def address_client(peer: tuple[str, int] | None) -> Hashable:
    """Identify a client without a key by its address; without an address it is unique."""
    return object() if not peer else _network(peer[0])


@lru_cache(maxsize=4096)
def _network(address: str) -> str:
    """Return the part of an address that its user cannot choose."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, IPV6_NETWORK_BITS), strict=False))
    return address


def is_within_share(
    work_by_client: Mapping[Any, int], client: Hashable, work: int, limit: int
) -> bool:
    """Return whether the work fits if no other client counts for more than this one."""
    total = work_by_client.get(client, 0) + work
    others = sum(min(w, total) for name, w in work_by_client.items() if name != client)
    return total + others <= limit


@dataclass(eq=False)
class Piece(Generic[T]):
    work: T
    client: Hashable
    cost: float
    due: float  # owed to each of the client's requests when this one is done
    number: int
    after: float = 0.0  # the client's account when this piece is done


@dataclass(eq=False)
class _Account(Generic[T]):
    used: float
    owed: float = 0.0  # to each of the client's requests so far
    waiting: list[Piece[T]] = field(default_factory=list)


_DUE, _AFTER = attrgetter("due", "number"), attrgetter("after", "number")


class Shares(Generic[T]):
    """Waiting work of several clients. Costs are positive, in any unit. Callers hold a lock."""

    def __init__(self) -> None:
        self.min_account = 0.0  # smallest account of a waiting client
        self._accounts: dict[Hashable, _Account[T]] = {}
        self._length = self._number = 0

    def __len__(self) -> int:
        return self._length

    def put(self, work: T, client: Hashable, cost: float) -> None:
        """Queue a piece. If work has several pieces, queue the next when the previous is done."""
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _Account(self.min_account)
        account.used = max(account.used, self.min_account)
        account.waiting.append(Piece(work, client, cost, account.owed + cost, self._number))
        self._number += 1
        self._length += 1

    def used(self, client: Hashable) -> float:
        """Return the account of a waiting client."""
        return self._accounts[client].used

    def turns(self) -> list[Piece[T]]:
        """Return all waiting pieces in the order of execution."""
        pieces: list[Piece[T]] = []
        for account in self._accounts.values():
            account.waiting.sort(key=_DUE)
            after = account.used
            for piece in account.waiting:
                after += piece.cost
                piece.after = after
            pieces += account.waiting
        if len(self._accounts) > 1:
            pieces.sort(key=_AFTER)
        return pieces

    def take(self, pieces: Sequence[Piece[T]], free: Sequence[Piece[T]] = ()) -> None:
        """Remove pieces and charge their clients; `free` pieces cost nothing."""
        removed = {piece.number for piece in (*pieces, *free)}
        waited = {
            client: len(self._accounts[client].waiting)
            for client in {piece.client for piece in pieces}
        }
        for piece in pieces:
            account = self._accounts[piece.client]
            account.used += piece.cost
            account.owed += piece.cost / waited[piece.client]
        for client in {piece.client for piece in (*pieces, *free)}:
            account = self._accounts[client]
            account.waiting = [piece for piece in account.waiting if piece.number not in removed]
        self._length -= len(removed)
        if self._length == 0:
            self._accounts.clear()
            self.min_account = 0.0
            return
        self.min_account = min(
            account.used for account in self._accounts.values() if account.waiting
        )
        self._accounts = {
            c: a for c, a in self._accounts.items() if a.waiting or a.used > self.min_account
        }
