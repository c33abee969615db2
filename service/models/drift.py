"""Drift detection on live rows, using the test in `model_store.conformal.drift`.

Each process of a service tests the rows that it has predicted.
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32, Float64

from model_store.artifacts.manifest import AnyColumn, CategoricalColumn, column_width
from model_store.conformal.drift import ALARM_EVIDENCE, EDGES, Martingale, binned_gaps, flag_rate

logger = logging.getLogger("dubito")

MAX_REQUEST_ROWS = 16  # evenly spaced; rows of one request are not independent
MAX_RECENT_BYTES = 4 << 20  # of the live rows that are kept in memory to describe drift
MAX_RECENT_ROWS = 200
SIGNIFICANCE = 0.05  # of column shifts
RECENT_ROWS = 4096  # their copies are ignored if no calibration row is a copy
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

    @property
    def alarm(self) -> bool:
        return self.alarm_time is not None


class Drift:
    """A drift test for one version, from its calibration rows' sorted statistics. Thread-safe.

    Without copies among the calibration rows, copies of live rows are ignored, because the two sets
    of rows would have different distributions.
    """

    def __init__(
        self, name: str, version: str, statistics: Float64[np.ndarray, "n"], has_copies: bool
    ) -> None:
        self.name, self.version, self._has_copies = name, version, has_copies
        self._gaps = binned_gaps(statistics)
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._martingale = Martingale(self._gaps)
        self._p_value_sum = 0.0
        self._pending: list[Float64[np.ndarray, "N"]] = []  # before the next bet
        self._recent: OrderedDict[int, None] = OrderedDict()  # row digests, latest last
        self._alarm_time: float | None = None
        self._recent_rows: list[tuple[float, Float32[np.ndarray, "I"]]] = []  # latest last

    def reset(self) -> None:
        with self._lock:
            self._forget()

    def watch(self, p_values: Float64[np.ndarray, "N"], x: Float32[np.ndarray, "N I"]) -> None:
        """Add up to `MAX_REQUEST_ROWS` rows of a request with their p-values."""
        if len(x) > MAX_REQUEST_ROWS:
            selection = np.arange(MAX_REQUEST_ROWS) * len(x) // MAX_REQUEST_ROWS
            p_values, x = p_values[selection], x[selection]
        self.take(p_values, [hash(row.tobytes()) for row in x])
        max_rows = max(1, min(MAX_RECENT_ROWS, MAX_RECENT_BYTES // x[0].nbytes))
        rows = zip(p_values.tolist(), x.copy(), strict=True)
        with self._lock:
            self._recent_rows = [*self._recent_rows, *rows][-max_rows:]

    def recent_rows(self) -> list[tuple[float, Float32[np.ndarray, "I"]]]:
        """Return this process's recent rows with their p-values, most unusual first."""
        with self._lock:
            return sorted(self._recent_rows, key=lambda row: row[0])

    def take(self, p_values: Float64[np.ndarray, "N"], digests: Iterable[int]) -> None:
        """Test rows. Their digests identify copies."""
        with self._lock:
            if not self._has_copies:
                p_values = p_values[[self._is_new(digest) for digest in digests]]
            for start in range(0, len(p_values), BLOCK_ROWS):
                self._pending.append(p_values[start : start + BLOCK_ROWS])
                if sum(map(len, self._pending)) >= BLOCK_ROWS:
                    self._bet()

    def report(self) -> DriftReport:
        with self._lock:
            self._bet()
            martingale, gaps = self._martingale, self._gaps
            rows = int(martingale.seen.sum())
            return DriftReport(
                calibration_rows=int(gaps.sum()) - 1,
                rows=rows,
                flag_rate=flag_rate(martingale.late) if rows else None,
                expected_flag_rate=flag_rate(gaps),
                evidence=martingale.evidence,
                largest_evidence=martingale.largest,
                alarm_time=self._alarm_time,
                binned_rows=martingale.seen.astype(int).tolist(),
                p_value_sum=self._p_value_sum,
            )

    def _is_new(self, digest: int) -> bool:
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
        if not martingale.is_alarmed or self._alarm_time is not None:
            return
        self._alarm_time = time.time()
        logger.warning(
            "drift: live rows of model %s version %s differ from its calibration rows: "
            "evidence %.1f nats (alarm at %.1f) after %d rows; "
            "recent flag rate at .05: %.3f, expected: %.3f",
            self.name,
            self.version,
            martingale.largest,
            ALARM_EVIDENCE,
            martingale.seen.sum(),
            flag_rate(martingale.late),
            flag_rate(self._gaps),
        )


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
