"""Drift detection on live rows, using the test in `model_store.conformal.drift`.

All processes of a service share one test per version (`Evidence`). Separate tests would be invalid,
because their evidence is not a martingale given the rows of the other processes.
"""

import hashlib
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt64

from model_store.artifacts.manifest import AnyColumn, CategoricalColumn, column_width
from model_store.conformal.drift import ALARM_EVIDENCE, EDGES, Martingale, binned_gaps, flag_rate
from model_store.scores.records import concatenate

logger = logging.getLogger("dubito")

MAX_REQUEST_ROWS = 16  # evenly spaced; rows of one request are not independent
MAX_RECENT_BYTES = 4 << 20  # of the live rows that are kept in memory to describe drift
MAX_RECENT_ROWS = 200
SIGNIFICANCE = 0.05  # of column shifts
RECENT_ROWS = 4096  # their copies are ignored if no calibration row is a copy
MAX_WAITING_ROWS = 1 << 16  # while the shared test is unreachable: 1 MB
BLOCK_ROWS = 64  # per bet, because a bet on one row takes as long


@dataclass(frozen=True)
class DriftReport:
    """The result of a drift test. The evidence is log M_t, in nats."""

    calibration_rows: int
    rows: int
    flag_rate: float | None  # among the latest rows
    expected_flag_rate: float
    evidence: float
    largest_evidence: float
    alarm_time: float | None = field(compare=False)  # seconds since 1970
    binned_rows: list[int]  # all rows, by bin of `EDGES`
    p_value_sum: float
    is_global: bool = True  # covers all processes

    @property
    def alarm(self) -> bool:
        return self.alarm_time is not None


@dataclass(frozen=True)
class DriftTarget:
    """A version, with the number of its calibration gaps in each bin of `EDGES`.

    If there are copies among the calibration rows, copies of live rows count like other rows.
    Without them, the two sets of rows would have different distributions.
    """

    name: str
    version: str
    gaps: Float64[np.ndarray, "B"] = field(compare=False)
    has_copies: bool = False

    @classmethod
    def from_statistics(
        cls,
        statistics: Float64[np.ndarray, "n"],
        name: str = "m",
        version: str = "1",
        has_copies: bool = False,
    ) -> "DriftTarget":
        return cls(name, version, binned_gaps(statistics), has_copies)


@dataclass(frozen=True)
class LiveRows:
    """The p-values of live rows, with digests that identify copies."""

    p_values: Float64[np.ndarray, "N"]
    digests: UInt64[np.ndarray, "N"]


class Evidence(Protocol):
    """Drift tests shared by several processes.

    Calls block, and raise OSError if the tests are unreachable.
    """

    def take(self, target: DriftTarget, rows: LiveRows) -> None: ...

    def report(self, target: DriftTarget) -> DriftReport: ...

    def reset(self, target: DriftTarget) -> None:
        """Forget all rows."""


class Drift:
    """A drift test for one model version. Thread-safe.

    If there is `evidence`, rows are also queued for the shared test until the next call of `send`.
    """

    def __init__(self, target: DriftTarget, evidence: Evidence | None = None) -> None:
        self.target = target
        self._evidence = evidence
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._martingale = Martingale(self.target.gaps)
        self._p_value_sum = 0.0
        self._pending: list[Float64[np.ndarray, "N"]] = []  # before the next bet
        self._recent: OrderedDict[int, None] = OrderedDict()  # row digests, latest last
        self._waiting: list[LiveRows] = []  # for the shared test
        self._alarm_time = 0.0  # 0 before the alarm
        self._recent_rows: deque[tuple[float, Float32[np.ndarray, "I"]]] = deque(
            maxlen=MAX_RECENT_ROWS
        )

    def reset(self) -> None:
        """Reset this test and the shared test, if there is one.

        Raises:
            OSError: if the shared test is unreachable.
        """
        with self._lock:
            self._forget()
        if self._evidence is not None:
            self._evidence.reset(self.target)

    def watch(self, p_values: Float64[np.ndarray, "N"], digests: UInt64[np.ndarray, "n"]) -> None:
        """Add a request's p-values.

        The digests of the rows identify copies of recent rows.
        """
        rows = LiveRows(p_values[select_rows(len(p_values))], digests)
        self.take(rows)
        if self._evidence is not None:
            with self._lock:
                self._waiting.append(rows)

    def keep(self, p_values: Float64[np.ndarray, "N"], x: Float32[np.ndarray, "N I"]) -> None:
        """Add a request's rows and their p-values to this process's recent rows."""
        selection = select_rows(len(x))
        max_rows = max(1, MAX_RECENT_BYTES // x[0].nbytes)
        with self._lock:
            self._recent_rows.extend(
                zip(p_values[selection].tolist(), x[selection].copy(), strict=True)
            )
            while len(self._recent_rows) > max_rows:
                self._recent_rows.popleft()

    def recent_rows(self) -> list[tuple[float, Float32[np.ndarray, "I"]]]:
        """Return this process's recent rows with their p-values, most unusual first."""
        with self._lock:
            return sorted(self._recent_rows, key=lambda row: row[0])

    def take(self, rows: LiveRows) -> None:
        with self._lock:
            p_values = rows.p_values
            if not self.target.has_copies:
                p_values = p_values[[self._is_new(digest) for digest in rows.digests.tolist()]]
            for start in range(0, len(p_values), BLOCK_ROWS):
                self._pending.append(p_values[start : start + BLOCK_ROWS])
                if sum(map(len, self._pending)) >= BLOCK_ROWS:
                    self._bet()

    def send(self) -> None:
        """Send queued rows to the shared test.

        Raises:
            OSError: if the shared test is unreachable. Up to `MAX_WAITING_ROWS` stay queued.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if self._evidence is None or not waiting:
            return
        rows: LiveRows = concatenate(waiting)
        try:
            self._evidence.take(self.target, rows)
        except OSError:
            with self._lock:
                if len(rows.p_values) <= MAX_WAITING_ROWS:
                    self._waiting.insert(0, rows)
            raise

    def report(self) -> DriftReport:
        """Return the shared report, or a local one if the shared test is unreachable."""
        if self._evidence is None:
            return self.local_report()
        try:
            self.send()
            return self._evidence.report(self.target)
        except OSError:
            return replace(self.local_report(), is_global=False)

    def local_report(self) -> DriftReport:
        with self._lock:
            self._bet()
            martingale, gaps = self._martingale, self.target.gaps
            rows = int(martingale.seen.sum())
            return DriftReport(
                calibration_rows=int(gaps.sum()) - 1,
                rows=rows,
                flag_rate=flag_rate(martingale.late) if rows else None,
                expected_flag_rate=flag_rate(gaps),
                evidence=martingale.evidence,
                largest_evidence=martingale.largest,
                alarm_time=self._alarm_time or None,
                binned_rows=martingale.seen.astype(int).tolist(),
                p_value_sum=self._p_value_sum,
            )

    def state(self) -> dict[str, np.ndarray]:
        """Return the state as arrays that `restore` accepts."""
        with self._lock:
            self._bet()
            return {
                **{name: np.array(getattr(self._martingale, name)) for name in Martingale.STATE},
                "recent": np.array(list(self._recent), dtype=np.uint64),
                "p_value_sum": np.array(self._p_value_sum),
                "alarm_time": np.array(self._alarm_time),
            }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        with self._lock:
            self._forget()
            for name in Martingale.STATE:
                value = state[name]
                setattr(self._martingale, name, float(value) if value.ndim == 0 else value.copy())
            self._recent = OrderedDict.fromkeys(state["recent"].tolist())
            self._p_value_sum = float(state["p_value_sum"])
            self._alarm_time = float(state["alarm_time"])

    def _is_new(self, digest: int) -> bool:
        """Record a digest. Return False if it is among the recent digests."""
        is_new = digest not in self._recent
        self._recent[digest] = None
        self._recent.move_to_end(digest)
        if len(self._recent) > RECENT_ROWS:
            self._recent.popitem(last=False)
        return is_new

    def _bet(self) -> None:
        if not self._pending:
            return
        p_values = np.concatenate(self._pending)
        self._pending = []
        martingale = self._martingale
        martingale.update(EDGES.searchsorted(p_values))
        self._p_value_sum += float(p_values.sum())
        if not martingale.is_alarmed or self._alarm_time:
            return
        self._alarm_time = time.time()
        if self._evidence is None:
            logger.warning(
                "drift: live rows of model %s version %s differ from its calibration rows: "
                "evidence %.1f nats (alarm at %.1f) after %d rows; "
                "recent flag rate at .05: %.3f, expected: %.3f",
                self.target.name,
                self.target.version,
                martingale.largest,
                ALARM_EVIDENCE,
                martingale.seen.sum(),
                flag_rate(martingale.late),
                flag_rate(self.target.gaps),
            )


def select_rows(rows: int) -> slice | Int64[np.ndarray, "n"]:
    if rows <= MAX_REQUEST_ROWS:
        return slice(None)
    return np.arange(MAX_REQUEST_ROWS) * rows // MAX_REQUEST_ROWS


def row_digests(x: Float32[np.ndarray, "N I"]) -> UInt64[np.ndarray, "n"]:
    """Compute the digests of a request's selected rows."""
    digests = [
        int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest())
        for row in x[select_rows(len(x))]
    ]
    return np.array(digests, dtype=np.uint64)


def column_shifts(
    columns: Sequence[AnyColumn], training: np.ndarray, live: np.ndarray
) -> tuple[dict[str, float], float]:
    """Compare each column of the live rows with the training rows.

    A shift is the largest difference between the two shares of rows below a value (the
    Kolmogorov-Smirnov distance) or in a category.

    Returns the shifts by column, the largest first, and the limit that all columns without drift
    stay below with probability 1 - `SIGNIFICANCE`, by the bounds of Dvoretzky, Kiefer and
    Wolfowitz (1956) for values and of Hoeffding (1963) for each category.
    """
    shifts, start, comparisons = {}, 0, 0
    for column in columns:
        end = start + column_width(column)
        first, second = training[:, start:end], live[:, start:end]
        if isinstance(column, CategoricalColumn):
            differences = first.mean(axis=0) - second.mean(axis=0)
            comparisons += len(differences)
        else:
            values = np.concatenate([first[:, 0], second[:, 0]])
            below = (
                np.sort(x[:, 0]).searchsorted(values, "right") / len(x) for x in (first, second)
            )
            differences = np.subtract(*below)
            comparisons += 1
        shifts[column.name], start = float(np.abs(differences).max()), end
    # Both samples' bounds share the error probability, divided among the comparisons.
    log_error = math.log(4.0 * max(comparisons, 1) / SIGNIFICANCE)
    limit = sum(math.sqrt(log_error / (2.0 * len(x))) for x in (training, live))
    return dict(sorted(shifts.items(), key=lambda item: -item[1])), limit
