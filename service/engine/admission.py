"""Admission: how much work may wait, in rows x draws, and whose. Health and metrics are never asked
for it.

What is too much is refused; but a client, or a request, is not refused for what others have brought
beyond their share: it is let in if there would be room for it, had all others brought at most as
much.
"""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from service import limits
from service.errors import Overloaded, TooLarge
from service.server.shares import is_within_share

REST_S = 0.002  # after an answer, so that idle work does not begin before the answer is sent
LASTING_S = 1.0  # since the last refusal: so long an overload is taken to last
# After the first refusal, or the last try: more is let in, to see if it is over.
FIRST_TRY_S, LAST_TRY_S = 8.0, 256.0
TRIED_S = 0.25  # without a refusal: that much more is not too much
LATEST = 0.1  # weight of the latest micro-batch in the rate


class Admission:
    """Counts the work that waits or runs, and refuses too much of it. For the event loop alone."""

    def __init__(self, idle: threading.Event) -> None:
        self.row_draws = 0  # waiting or in work
        self.in_work = 0  # requests
        self._of_clients: Counter[Hashable] = Counter()  # rows x draws
        # Requests in work, by their rows x draws and the bytes of their bodies
        self._sizes: Counter[tuple[int, int]] = Counter()
        self.idle = idle  # set while no request is waiting or in work
        self.idle.set()
        self._limit = limits.MAX_QUEUED_ROW_DRAWS
        self._overloaded_until = -math.inf
        self._next_try = self._patience = math.inf
        self._tried = 0  # the limit of the next try
        self._rate = 0.0  # rows x draws a second, of late

    @contextmanager
    def admitted(
        self,
        rows: int,
        draws: int,
        at_once: int,
        client: Hashable = None,
        encoding: int = 0,
        length: int = 0,
    ) -> Iterator[None]:
        """Hold a place for a client's request, of which `at_once` rows x draws count at a time.

        Before its draws a row takes as long as `encoding` more draws. Its body has `length` bytes.

        A burst may fill the queue up to `MAX_QUEUED_ROW_DRAWS`. From when it is full until nobody
        has been refused for `LASTING_S`, work beyond `OVERLOAD_ROW_DRAWS` is refused, so that those
        who are let in are answered soon. Clients who come again at once would keep that up for
        ever, so now and then, ever more rarely, ever more is let in: if that is too much as well,
        the try ends with the first refusal.

        Raises:
            TooLarge: if the request alone is more than one may be.
            Overloaded: if too much is waiting already, and the client and the request have their
                share; a lone request is always let in.
        """
        if rows * draws > limits.MAX_ROW_DRAWS:
            raise TooLarge(
                "rows x num_samples", f"at most {limits.MAX_ROW_DRAWS}", str(rows * draws)
            )
        a_row = draws + encoding
        work = min(rows * a_row, max(at_once, a_row))
        self.refuse_overload(work, client)
        self.row_draws += work
        self.in_work += 1
        self._of_clients[client] += work
        self._sizes[work, length] += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.row_draws -= work
            self.in_work -= 1
            _take_from(self._of_clients, client, work)
            _take_from(self._sizes, (work, length), 1)
            asyncio.get_running_loop().call_later(REST_S, self._rest)

    def refuse_unread(self, length: int, client: Hashable = None) -> None:
        """Raise Overloaded before a body of rows is read, if it is too much for now.

        For its bytes it is expected to bring as many rows x draws as that in work does which brings
        fewest, and no more than the largest.
        """
        of_a_byte = min((work / size for work, size in self._sizes if size), default=0.0)
        largest = max((work for work, _ in self._sizes), default=1)
        self.refuse_overload(max(1, min(round(length * of_a_byte), largest)), client)

    def refuse_overload(self, work: int, client: Hashable = None) -> None:
        """Raise Overloaded if `work` more rows x draws of a client are too much for now."""
        now = time.monotonic()
        most = self._most(now)
        if (
            self.row_draws > 0
            and self.row_draws + work > most
            and not self._is_within_share(work, client, most)
        ):
            self._overload(now)
            raise Overloaded(
                retry_after_s=max(1, math.ceil(self.row_draws / self._rate)) if self._rate else 1
            )

    def _is_within_share(self, work: int, client: Hashable, most: int) -> bool:
        """Whether there were room, had no other client, or no other request, brought more."""
        if is_within_share(self._of_clients, client, work, most):
            return True
        return (
            work + sum(count * min(other, work) for (other, _), count in self._sizes.items())
            <= most
        )

    def _most(self, now: float) -> int:
        burst = limits.MAX_QUEUED_ROW_DRAWS
        if now >= self._overloaded_until:
            self._limit = burst
        elif now >= self._next_try:
            self._limit = min(burst, max(self._tried, 2 * self._limit))
            self._next_try = now + TRIED_S
        return self._limit

    def _overload(self, now: float) -> None:
        """Note a refusal: an overload begins or goes on, or a try was one too many."""
        least = min(limits.OVERLOAD_ROW_DRAWS, limits.MAX_QUEUED_ROW_DRAWS)
        if now >= self._overloaded_until:
            self._patience, self._tried = FIRST_TRY_S, 2 * least
        elif self._limit > least:
            self._patience, self._tried = min(2.0 * self._patience, LAST_TRY_S), 2 * self._tried
        if self._limit > least or now >= self._overloaded_until:
            self._limit, self._next_try = least, now + self._patience
        self._overloaded_until = now + LASTING_S

    def note(self, row_draws: int, seconds: float) -> None:
        """Note how long work took: the time to wait that clients are told follows. Thread-safe."""
        rate = row_draws / seconds
        self._rate = rate if self._rate == 0.0 else (1.0 - LATEST) * self._rate + LATEST * rate

    def _rest(self) -> None:
        if self.in_work == 0:
            self.idle.set()


def _take_from(counter: Counter[Any], key: Hashable, count: int) -> None:
    counter[key] -= count
    if counter[key] == 0:
        del counter[key]
