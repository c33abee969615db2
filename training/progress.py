"""How far long work is: a bar in a terminal, and elsewhere a line now and then."""

import time
from typing import Any

from tqdm import tqdm

from training import log

LINE_S = 30.0  # between lines


class Bar(tqdm):  # type: ignore[misc]
    def __init__(self, total: int, unit: str, quiet: bool, **options: Any) -> None:
        disable = True if quiet else None  # None: where nobody looks
        super().__init__(total=total, unit=unit, disable=disable, dynamic_ncols=True, **options)
        self._says_lines = self.disable and not quiet
        self._said = time.monotonic()

    def say(self, reached: str) -> None:
        self.set_postfix_str(reached, refresh=False)
        now = time.monotonic()
        if self._says_lines and now - self._said >= LINE_S:
            self._said = now
            log.info("%s", reached)
