"""Fair shares: who a request's client is, and in which order clients' work is done.

Nobody waits for all of another's large work. Work belongs to clients. What was done for each is on
an account, and next is the client whose account will be smallest after its next piece. A new client
begins with the smallest account of those who wait: a pause saves nothing up, and costs nothing. So
a client waits for at most one piece of each other client, however much these have waiting.

Of one client's requests each of n that wait is owed an n-th of what is done for the client, and
next is the one that would be done first in such shares. So a small one does not wait for all large
ones before it, and small ones without end do not stop a large one. Of two of the same size the one
that came first goes first.
"""

import ipaddress
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

KEY_NAME = "dubito.key"  # in a request's scope: the name of its valid key
IPV6_NETWORK_BITS = 64  # that one customer has, and may choose addresses from

T = TypeVar("T")


def address_client(peer: tuple[str, int] | None) -> Hashable:
    """Identify a client without a key by its peer; without one it is a client of its own."""
    return object() if not peer else _network(peer[0])


@lru_cache(maxsize=4096)
def _network(address: str) -> str:
    """Return the part of an address that its owner cannot choose."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, IPV6_NETWORK_BITS), strict=False))
    return address


def is_within_share(held: Mapping[Any, int], client: Hashable, work: int, most: int) -> bool:
    """Whether there were room for more work of a client, had no other brought more than it."""
    whole = held.get(client, 0) + work
    others = sum(min(other, whole) for name, other in held.items() if name != client)
    return whole + others <= most


@dataclass(eq=False)
class Piece(Generic[T]):
    work: T
    client: Hashable
    cost: float
    due: float  # its place among its client's: what each of these is owed when it is done
    number: int
    after: float = 0.0  # its client's account, once it and all of the client before it are done


@dataclass(eq=False)
class _Account(Generic[T]):
    used: float
    owed: float = 0.0  # to each of the client's requests, so far
    waiting: list[Piece[T]] = field(default_factory=list)


_DUE, _AFTER = attrgetter("due", "number"), attrgetter("after", "number")


class Shares(Generic[T]):
    """Work of several clients that waits. Costs are positive, in any unit. Callers hold a lock."""

    def __init__(self) -> None:
        self.least = 0.0  # no account of a client that waits is smaller
        self._accounts: dict[Hashable, _Account[T]] = {}
        self._length = self._number = 0

    def __len__(self) -> int:
        return self._length

    def put(self, work: T, client: Hashable, cost: float) -> None:
        """Queue a piece. Of work in several pieces, the next is put when the last is done."""
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _Account(self.least)
        account.used = max(account.used, self.least)
        account.waiting.append(Piece(work, client, cost, account.owed + cost, self._number))
        self._number += 1
        self._length += 1

    def used(self, client: Hashable) -> float:
        """Return the account of a client that waits."""
        return self._accounts[client].used

    def turns(self) -> list[Piece[T]]:
        """Return all that waits, in the order in which it is to be done."""
        found = []
        for account in self._accounts.values():
            account.waiting.sort(key=_DUE)
            after = account.used
            for piece in account.waiting:
                after += piece.cost
                piece.after = after
            found += account.waiting
        if len(self._accounts) > 1:
            found.sort(key=_AFTER)
        return found

    def take(self, pieces: Sequence[Piece[T]], free: Sequence[Piece[T]] = ()) -> None:
        """Remove pieces; those that are `free` cost nothing, as nothing is done for them."""
        gone = {piece.number for piece in (*pieces, *free)}
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
            account.waiting = [piece for piece in account.waiting if piece.number not in gone]
        self._length -= len(gone)
        if self._length == 0:
            self._accounts.clear()
            self.least = 0.0
            return
        self.least = min(account.used for account in self._accounts.values() if account.waiting)
        self._accounts = {
            c: a for c, a in self._accounts.items() if a.waiting or a.used > self.least
        }
