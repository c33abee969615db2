"""Fair queueing between clients.

Each client has an account of its finished work. The next piece of work belongs to the client whose
account will be smallest after it. A new client starts with the smallest account of all waiting
clients. A client therefore waits for at most one piece of each other client.

Within a client, the n waiting requests share its work equally, and the request that would finish
first is next. Small requests can overtake large ones, but cannot block them. Requests of equal size
keep their order.
"""

import ipaddress
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

KEY_NAME = "dubito.key"  # in a request's ASGI scope: name of the valid key
IPV6_NETWORK_BITS = 64  # the usual size of a customer's network

T = TypeVar("T")


def address_client(peer: tuple[str, int] | None) -> Hashable:
    """Identify a client by its address. Clients without an address are all distinct."""
    return object() if not peer else _network(peer[0])


@lru_cache(maxsize=4096)
def _network(address: str) -> str:
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
    """Check whether work would fit if every other client used no more than this one."""
    total = work_by_client.get(client, 0) + work
    other_work = sum(min(w, total) for name, w in work_by_client.items() if name != client)
    return total + other_work <= limit


@dataclass(eq=False)
class Piece(Generic[T]):
    work: T
    client: Hashable
    cost: float
    due: float  # `_Account.per_request` after this piece
    number: int
    after: float = 0.0  # the client's account after this piece


@dataclass(eq=False)
class _Account(Generic[T]):
    used: float
    per_request: float = 0.0  # finished work per waiting request
    waiting: list[Piece[T]] = field(default_factory=list)


_DUE, _AFTER = attrgetter("due", "number"), attrgetter("after", "number")


class Shares(Generic[T]):
    """A fair queue for the work of several clients, with costs in any unit. Not thread-safe."""

    def __init__(self) -> None:
        self.min_account = 0.0  # smallest account of a waiting client
        self._accounts: dict[Hashable, _Account[T]] = {}
        self._length = self._number = 0

    def __len__(self) -> int:
        return self._length

    def put(self, work: T, client: Hashable, cost: float) -> None:
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _Account(self.min_account)
        account.used = max(account.used, self.min_account)
        account.waiting.append(Piece(work, client, cost, account.per_request + cost, self._number))
        self._number += 1
        self._length += 1

    def used(self, client: Hashable) -> float:
        return self._accounts[client].used

    def turns(self) -> list[Piece[T]]:
        """Return all pieces of work in order of execution."""
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
        """Remove pieces of work and charge their clients for all but the `free` ones."""
        removed = {piece.number for piece in (*pieces, *free)}
        accounts = {piece.client: self._accounts[piece.client] for piece in (*pieces, *free)}
        waited = {client: len(account.waiting) for client, account in accounts.items()}
        for piece in pieces:
            accounts[piece.client].used += piece.cost
            accounts[piece.client].per_request += piece.cost / waited[piece.client]
        for account in accounts.values():
            account.waiting = [piece for piece in account.waiting if piece.number not in removed]
        self._length -= len(removed)
        if self._length == 0:
            self._accounts.clear()
            self.min_account = 0.0
            return
        self.min_account = min(a.used for a in self._accounts.values() if a.waiting)
        self._accounts = {
            c: a for c, a in self._accounts.items() if a.waiting or a.used > self.min_account
        }
