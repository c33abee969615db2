"""Admission control, which limits the number of queued rows x draws.

If the queue is full, a request is still admitted within its fair share: if it would fit after every
other client, or every other request, were reduced to its size.
"""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from model_store.errors import TooLarge
from service import limits
from service.errors import Overloaded
from service.server.shares import is_within_share

BATCH_ROW_DRAWS = 6_400  # rows x draws of a micro-batch; the most that one request counts
IDLE_DELAY_S = 0.002  # before idle work begins, so that answers are sent first
OVERLOAD_HOLD_S = 1.0  # from the last rejection to the end of an overload
RATE_WEIGHT = 0.1  # of the latest micro-batch in the rate


class Admission:
    """Limits the queued and running work. Use it only in the event loop."""

    def __init__(self, idle: threading.Event) -> None:
        self.row_draws = 0  # waiting or running
        self.active_requests = 0
        self._row_draws_by_client: Counter[Hashable] = Counter()
        # Active requests by rows x draws and body bytes
        self._request_sizes: Counter[tuple[int, int]] = Counter()
        self.idle = idle  # set while no request is active
        self.idle.set()
        self._overload_end = -math.inf
        self._rate = 0.0  # recent rows x draws per second

    @contextmanager
    def admit(
        self,
        rows: int,
        draws: int,
        client: Hashable = None,
        encoding_draws: int = 0,
        body_bytes: int = 0,
    ) -> Iterator[None]:
        """Admit a request for the duration of the context.

        The queue can grow to `MAX_QUEUED_ROW_DRAWS`. If it is full, the limit drops to
        `OVERLOAD_ROW_DRAWS`, which keeps the latency low, until `OVERLOAD_HOLD_S` after the last
        rejection.

        Raise TooLarge beyond `MAX_ROW_DRAWS`, or Overloaded if the queue is full and the request
        exceeds its fair share. `encoding_draws` is the cost of the encoder per row.
        """
        if rows * draws > limits.MAX_ROW_DRAWS:
            expected = f"at most {limits.MAX_ROW_DRAWS}"
            raise TooLarge("rows x num_samples", expected, str(rows * draws))
        draws_per_row = draws + encoding_draws
        work = min(rows * draws_per_row, max(BATCH_ROW_DRAWS, draws_per_row))
        self.refuse_overload(work, client)
        self.row_draws += work
        self.active_requests += 1
        self._row_draws_by_client[client] += work
        self._request_sizes[work, body_bytes] += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.row_draws -= work
            self.active_requests -= 1
            _subtract(self._row_draws_by_client, client, work)
            _subtract(self._request_sizes, (work, body_bytes), 1)
            asyncio.get_running_loop().call_later(IDLE_DELAY_S, self._set_idle)

    def refuse_unread(self, body_bytes: int, client: Hashable = None) -> None:
        """Reject a request before reading its body if its estimated work is too large.

        The estimate assumes the fewest rows x draws per byte of all active requests, and at most
        the work of the largest active request.
        """
        ratios = (work / size for work, size in self._request_sizes if size)
        row_draws_per_byte = min(ratios, default=0.0)
        largest = max((work for work, _ in self._request_sizes), default=1)
        estimate = max(1, min(round(body_bytes * row_draws_per_byte), largest))
        self.refuse_overload(estimate, client)

    def refuse_overload(self, work: int, client: Hashable = None) -> None:
        """Raise Overloaded if a client's additional rows x draws exceed the current limit."""
        limit, time_s = limits.MAX_QUEUED_ROW_DRAWS, time.monotonic()
        if time_s < self._overload_end:
            limit = min(limits.OVERLOAD_ROW_DRAWS, limit)
        if (
            self.row_draws > 0
            and self.row_draws + work > limit
            and not self._is_within_share(work, client, limit)
        ):
            self._overload_end = time_s + OVERLOAD_HOLD_S
            wait_s = math.ceil(self.row_draws / self._rate) if self._rate else 1
            raise Overloaded(retry_after_s=max(1, wait_s))

    def _is_within_share(self, work: int, client: Hashable, limit: int) -> bool:
        if is_within_share(self._row_draws_by_client, client, work, limit):
            return True
        sizes = self._request_sizes.items()
        return work + sum(count * min(size, work) for (size, _), count in sizes) <= limit

    def record_rate(self, row_draws: int, seconds: float) -> None:
        """Update the rate from which `Retry-After` is estimated. Thread-safe."""
        rate = row_draws / seconds
        self._rate = (
            rate if self._rate == 0.0 else (1.0 - RATE_WEIGHT) * self._rate + RATE_WEIGHT * rate
        )

    def _set_idle(self) -> None:
        if self.active_requests == 0:
            self.idle.set()


def _subtract(counter: Counter[Any], key: Hashable, count: int) -> None:
    counter[key] -= count
    if counter[key] == 0:
        del counter[key]
