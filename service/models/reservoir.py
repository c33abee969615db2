"""Prepared posterior draws."""

import secrets
import threading
from collections import deque

import numpy as np

from model_store.inference.model import Model
from model_store.inference.noise import MAX_SEED
from model_store.inference.runtime import MAX_DRAW_SET_BYTES, DrawSet

PIECE_DRAWS = 50  # computed between checks for active requests
READY_BYTES = 64 << 20  # of all ready sets together
MAX_IDLE_WAIT_S = 0.05  # before a piece is computed despite active requests


def fresh_seed() -> int:
    return secrets.randbelow(MAX_SEED + 1)


class Reservoir:
    """A supply of fresh draw sets, prepared in a thread. Each set is used once.

    The thread refills the reservoir if it is half empty, because computing draws evicts the network
    from the processor's cache. It runs while the service is idle or, if three quarters of the sets
    are used, concurrently with requests.
    """

    def __init__(self, model: Model, depth: int, idle: threading.Event) -> None:
        self.model = model
        self.num_draws = model.manifest.noise.default_draws
        self.depth = min(depth, READY_BYTES // (self.num_draws * model.runtime.draw_bytes))
        self._idle = idle
        self.ready: deque[DrawSet] = deque()  # newest last
        self._wakeup = threading.Event()
        self._closed = False
        if self.depth > 0:
            self._wakeup.set()
            self._thread = threading.Thread(target=self._fill, name="draw-reservoir", daemon=True)
            self._thread.start()

    def take(self, num_draws: int) -> DrawSet:
        """Take a prepared set and adjust its size, or compute a set if none is ready."""
        try:
            ready = self.ready.pop()  # the newest may still be in the processor's cache
        except IndexError:
            return self.model.runtime.draw_set(fresh_seed(), num_draws)
        if len(self.ready) <= self.depth // 2:
            self._wakeup.set()
        theta = ready.theta
        if theta is None or num_draws * self.model.runtime.draw_bytes > MAX_DRAW_SET_BYTES:
            return self.model.runtime.draw_set(ready.seed, num_draws)
        if num_draws <= len(theta):
            return DrawSet(ready.seed, num_draws, theta[:num_draws])
        extra = self.model.runtime.draw(ready.seed, len(theta), num_draws - len(theta))
        return DrawSet(ready.seed, num_draws, np.concatenate([theta, extra]))

    def close(self) -> None:
        """Ask the thread to stop."""
        self._closed = True
        self._wakeup.set()

    def join(self) -> None:
        """Wait for the thread to end, because otherwise the process could abort at exit."""
        if self.depth > 0:
            self._thread.join()

    def _fill(self) -> None:
        while not self._closed:
            if len(self.ready) < self.depth:
                self._add_set()
            else:
                self._wakeup.clear()
                if len(self.ready) >= self.depth and not self._closed:
                    self._wakeup.wait()

    def _add_set(self) -> None:
        seed = fresh_seed()
        pieces = []
        for first in range(0, self.num_draws, PIECE_DRAWS):
            if len(self.ready) > self.depth // 4:
                self._idle.wait(MAX_IDLE_WAIT_S)
            if self._closed:
                return
            draws = min(PIECE_DRAWS, self.num_draws - first)
            pieces.append(self.model.runtime.draw(seed, first, draws))
        self.ready.append(DrawSet(seed, self.num_draws, np.concatenate(pieces)))
