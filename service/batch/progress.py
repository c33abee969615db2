"""How far a job on a data set is, in one line on standard error: rows, time left, and cost so
far."""

import sys
import time

from service.batch.job import Job

SAY_S = 0.5  # between lines on a terminal, where each takes the place of the one before
SAY_SELDOM_S = 10.0  # elsewhere


class Progress:
    """Counts, and says so now and then."""

    def __init__(self, job: Job, done: set[int], rejected: int, quiet: bool) -> None:
        """Begin with the shards that are done already."""
        self._job, self._quiet = job, quiet
        self._done = len(done)
        self._rows_before = self._rows = sum(job.shards[number].rows for number in done)
        self._at: dict[int, int] = {}
        self._began = time.monotonic()
        self._told = 0.0
        self.rejected = rejected
        self.row_draws = 0
        self.cpu_s = 0.0

    def at(self, shard: int, rows: int) -> None:
        """Note how many rows of a shard are done."""
        self._at[shard] = rows
        self._say()

    def done(self, shard: int, rejected: int, row_draws: int, cpu_s: float) -> None:
        """Note a shard that is done."""
        self._at.pop(shard, None)
        self._done += 1
        self._rows += self._job.shards[shard].rows
        self.rejected += rejected
        self.row_draws += row_draws
        self.cpu_s += cpu_s
        self._say()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def line(self) -> str:
        """Return the line."""
        rows, all_rows = self._rows + sum(self._at.values()), self._job.rows
        rate = (rows - self._rows_before) / max(self.elapsed_s, 1e-9)
        left = "" if rate == 0 else f", {rate:,.0f} rows/s, {_clock((all_rows - rows) / rate)} left"
        return (
            f"{100 * rows / all_rows:3.0f} %  {rows:,} of {all_rows:,} rows, {self._done} of "
            f"{len(self._job.shards)} parts{left}; {self.cost}"
            + (f"; {self.rejected:,} rejected" * bool(self.rejected))
        )

    @property
    def cost(self) -> str:
        """What was spent, in words."""
        return f"{self.row_draws:,} rows x draws, {self.cpu_s:,.0f} processor seconds"

    def end(self) -> None:
        """Leave the last line."""
        if not self._quiet and sys.stderr.isatty() and self._told:
            sys.stderr.write(f"\r\x1b[K{self.line()}\n")
            sys.stderr.flush()

    def _say(self) -> None:
        is_terminal = sys.stderr.isatty()
        now = time.monotonic()
        if self._quiet or now - max(self._told, self._began) < (
            SAY_S if is_terminal else SAY_SELDOM_S
        ):
            return
        self._told = now
        sys.stderr.write(f"\r\x1b[K{self.line()}" if is_terminal else f"{self.line()}\n")
        sys.stderr.flush()


def _clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
