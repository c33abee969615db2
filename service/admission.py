"""Admission: how much work may wait, in rows x draws. Health and metrics are never asked for it."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from service.problems import Overloaded, TooLarge
from service.settings import Settings

REST_S = 0.002  # after an answer, so that idle work does not begin before the answer is sent
LASTING_S = 1.0  # since the last refusal: so long an overload is taken to last
LATEST = 0.1  # weight of the latest micro-batch in the rate


class Admission:
    """Counts the work that waits or is done, and refuses what is too much. For the event loop's thread alone."""

    def __init__(self, settings: Settings, idle: threading.Event) -> None:
        """Begin; `idle` is set while no request is waiting or in work."""
        self.settings = settings
        self.row_draws = 0  # waiting or in work
        self.in_work = 0  # requests
        self.idle = idle
        self.idle.set()
        self._overloaded_until = -math.inf
        self._rate = 0.0  # rows x draws a second, of late

    @contextmanager
    def admitted(self, rows: int, draws: int, at_once: int) -> Iterator[None]:
        """Hold a place for a request's work, of which `at_once` rows x draws count at a time.

        A burst may fill the queue up to `max_queued_row_draws`. From when it is full until nobody has been refused
        for `LASTING_S`, work beyond `overload_row_draws` is refused, so that those who are let in are answered soon.

        Raises:
            TooLarge: if the request alone is more than one may be.
            Overloaded: if too much is waiting already; a lone request is always let in.
        """
        if rows * draws > self.settings.max_row_draws:
            raise TooLarge(f"rows x num_samples: expected at most {self.settings.max_row_draws}, got {rows * draws}")
        work = min(rows * draws, max(at_once, draws))
        self.refuse_overload(work)
        self.row_draws += work
        self.in_work += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.row_draws -= work
            self.in_work -= 1
            asyncio.get_running_loop().call_later(REST_S, self._rest)

    def refuse_overload(self, work: int = 1) -> None:
        """Raise Overloaded if so many further rows x draws are too much for now."""
        now = time.monotonic()
        most = self.settings.max_queued_row_draws
        if now < self._overloaded_until:
            most = min(most, self.settings.overload_row_draws)
        if self.row_draws > 0 and self.row_draws + work > most:
            self._overloaded_until = now + LASTING_S
            raise Overloaded(retry_after_s=max(1, math.ceil(self.row_draws / self._rate)) if self._rate else 1)

    def note(self, row_draws: int, seconds: float) -> None:
        """Note how long work took: what clients are told to wait goes by it. Any thread may call it."""
        rate = row_draws / seconds
        self._rate = rate if self._rate == 0.0 else (1.0 - LATEST) * self._rate + LATEST * rate

    def _rest(self) -> None:
        if self.in_work == 0:
            self.idle.set()
