"""Progress bars, replaced by log lines outside a terminal."""

import time
from typing import Any

from tqdm import tqdm

from training import log

LINE_S = 30.0  # between lines


class Bar(tqdm):  # type: ignore[misc]
    def __init__(self, total: int, unit: str, quiet: bool, **options: Any) -> None:
        disable = True if quiet else None  # None disables the bar outside a terminal
        super().__init__(total=total, unit=unit, disable=disable, dynamic_ncols=True, **options)
        self._logs_lines = self.disable and not quiet
        self._last_line_s = time.monotonic()

    def report(self, status: str) -> None:
        self.set_postfix_str(status, refresh=False)
        time_s = time.monotonic()
        if self._logs_lines and time_s - self._last_line_s >= LINE_S:
            self._last_line_s = time_s
            log.info("%s", status)
