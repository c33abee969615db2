"""Fresh posterior draws, made ahead: they do not depend on any input, so no request need wait for
them."""

import secrets
import threading
from collections import deque

import numpy as np

from model_store.inference.model import Model
from model_store.inference.noise import MAX_SEED
from model_store.inference.runtime import HELD_BYTES, DrawSet

PIECE_DRAWS = 50  # made at a time, between looks at whether a request is in work
READY_BYTES = 64 << 20  # of all ready sets together
PATIENCE_S = 0.05  # how long a piece waits for an idle moment before it is made all the same


def fresh_seed() -> int:
    return secrets.randbelow(MAX_SEED + 1)


class Reservoir:
    """Draw sets of fresh seeds, kept ready by a thread; each is handed out once.

    It fills up when half are gone: making draws drives the network out of the processor's cache, so
    it had better happen once for several requests. It works while no request does, but waits no
    longer when three quarters are gone: requests that never pause are then served by one core while
    another makes draws.
    """

    def __init__(self, model: Model, depth: int, idle: threading.Event) -> None:
        self.model = model
        self.num_draws = model.manifest.noise.default_draws
        self.depth = min(depth, READY_BYTES // (self.num_draws * model.runtime.draw_bytes))
        self._idle = idle
        self.ready: deque[DrawSet] = deque()  # the newest last
        self._wanted = threading.Event()
        self._closed = False
        if self.depth > 0:
            self._wanted.set()
            self._thread = threading.Thread(target=self._fill, name="draw-reservoir", daemon=True)
            self._thread.start()

    def take(self, num_draws: int) -> DrawSet:
        """Return draws of a fresh seed: a ready set, cut or continued to the number wanted."""
        try:
            ready = self.ready.pop()  # the newest, which the processor's cache may still hold
        except IndexError:
            return self.model.runtime.draw_set(fresh_seed(), num_draws)
        if len(self.ready) <= self.depth // 2:
            self._wanted.set()
        theta = ready.theta
        if theta is None or num_draws * self.model.runtime.draw_bytes > HELD_BYTES:
            return self.model.runtime.draw_set(ready.seed, num_draws)
        if num_draws <= len(theta):
            return DrawSet(ready.seed, num_draws, theta[:num_draws])
        more = self.model.runtime.draw(ready.seed, len(theta), num_draws - len(theta))
        return DrawSet(ready.seed, num_draws, np.concatenate([theta, more]))

    def close(self) -> None:
        """End the thread; draws that were taken stay good."""
        self._closed = True
        self._wanted.set()

    def join(self) -> None:
        """Wait until the thread has ended: a process that ends while it draws would abort."""
        if self.depth > 0:
            self._thread.join()

    def _fill(self) -> None:
        while not self._closed:
            if len(self.ready) < self.depth:
                self._make_one()
            else:
                self._wanted.clear()
                if len(self.ready) >= self.depth and not self._closed:
                    self._wanted.wait()

    def _make_one(self) -> None:
        seed = fresh_seed()
        pieces = []
        for first in range(0, self.num_draws, PIECE_DRAWS):
            if len(self.ready) > self.depth // 4:
                self._idle.wait(PATIENCE_S)
            if self._closed:
                return
            draws = min(PIECE_DRAWS, self.num_draws - first)
            pieces.append(self.model.runtime.draw(seed, first, draws))
        self.ready.append(DrawSet(seed, self.num_draws, np.concatenate(pieces)))
