"""Whose turn it is: work that waits, in an order in which nobody waits for all of another's large
work.

Work belongs to clients. What was done for each is on an account, and next is the client whose
account will be smallest after its next piece. Who comes begins with the smallest account of those
who wait: a pause saves nothing up, and costs nothing. So a client waits for at most one piece of
each other client, however much these have waiting.

Of one client's requests each of n that wait is owed an n-th of what is done for the client, and
next is the one that would be done first in such shares. So a small one does not wait for all large
ones before it, and small ones without end do not stop a large one. Of two of the same size the one
that came first goes first.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Piece(Generic[T]):
    """A piece of work that waits: what it costs, and its places in the turns of its client and of
    all."""

    work: T
    client: Hashable
    cost: float
    due: float  # on what the client's requests are owed each
    number: int
    after: float = 0.0  # its client's account, once it and all of the client before it are done


@dataclass(eq=False)
class _Account(Generic[T]):
    used: float
    owed: float = 0.0  # to each of the client's requests, so far
    waiting: list[Piece[T]] = field(default_factory=list)


_DUE, _AFTER = attrgetter("due", "number"), attrgetter("after", "number")


class Shares(Generic[T]):
    """Work that waits, of several clients. Costs are positive, in any unit. Callers hold a lock."""

    def __init__(self) -> None:
        self.least = 0.0  # no account of a client that waits is smaller
        self._accounts: dict[Hashable, _Account[T]] = {}
        self._length = self._number = 0

    def __len__(self) -> int:
        """How many pieces wait."""
        return self._length

    def put(self, work: T, client: Hashable, cost: float) -> None:
        """Have a piece wait; of work in several pieces the next is put when the one before it is
        done."""
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
        """Return all that waits, in the order of its turns."""
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
        """Take pieces from those that wait; those that are `free` are on no account, as nothing is
        done for them."""
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
