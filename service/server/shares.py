"""Fair shares: the client of a request, and the order in which clients' work is done.

Each client has an account of the work done for it. The next piece of work belongs to the client
whose account will be smallest after that piece. A new client starts with the smallest account of
the waiting clients, so a pause neither saves up work nor costs any. Thus a client waits for up to
one piece of each other client, however much they have queued.

Each of one client's n waiting requests is owed 1/n of the client's work, and the next one is the
request that would finish first at these rates. So a small request does not wait for all earlier
large ones, and an endless stream of small requests does not stop a large one. Among requests of the
same size, the oldest goes first.
"""

import ipaddress
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

KEY_NAME = "dubito.key"  # key of a request's ASGI scope: the name of its valid API key
IPV6_NETWORK_BITS = 64  # of one customer, who may use any address in it

T = TypeVar("T")


def address_client(peer: tuple[str, int] | None) -> Hashable:
    """Identify a client without a key by its address; without an address it is a new client."""
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


def is_within_share(held: Mapping[Any, int], client: Hashable, work: int, most: int) -> bool:
    """Whether a client's work would fit if no other client had queued more than it."""
    whole = held.get(client, 0) + work
    others = sum(min(other, whole) for name, other in held.items() if name != client)
    return whole + others <= most


@dataclass(eq=False)
class Piece(Generic[T]):
    work: T
    client: Hashable
    cost: float
    due: float  # work owed to each of the client's pieces when this one is done
    number: int
    after: float = 0.0  # the client's account once this piece and its earlier ones are done


@dataclass(eq=False)
class _Account(Generic[T]):
    used: float
    owed: float = 0.0  # to each of the client's requests so far
    waiting: list[Piece[T]] = field(default_factory=list)


_DUE, _AFTER = attrgetter("due", "number"), attrgetter("after", "number")


class Shares(Generic[T]):
    """Waiting work of several clients. Costs are positive, in any unit. Callers hold a lock."""

    def __init__(self) -> None:
        self.least = 0.0  # the smallest account of the waiting clients
        self._accounts: dict[Hashable, _Account[T]] = {}
        self._length = self._number = 0

    def __len__(self) -> int:
        return self._length

    def put(self, work: T, client: Hashable, cost: float) -> None:
        """Queue a piece. If work has several pieces, queue the next when the last is done."""
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _Account(self.least)
        account.used = max(account.used, self.least)
        account.waiting.append(Piece(work, client, cost, account.owed + cost, self._number))
        self._number += 1
        self._length += 1

    def used(self, client: Hashable) -> float:
        """Return the account of a waiting client."""
        return self._accounts[client].used

    def turns(self) -> list[Piece[T]]:
        """Return all waiting pieces in the order in which they should be done."""
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
        """Remove pieces; `free` ones cost nothing because no work is done for them."""
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
