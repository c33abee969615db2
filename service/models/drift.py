"""Drift of live rows: the rows that count, the test of `model_store.conformal.drift`, its alarm.

Processes that serve as one, workers or replicas, share one test per version (`Evidence`). A test
in each process would not do: given the rows of the others, its capital is no martingale.
"""

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt64

from model_store.conformal.drift import ALARM_EVIDENCE, EDGES, Martingale, binned_gaps, flag_rate

logger = logging.getLogger("dubito")

# Of a larger request some, evenly spaced: its rows share draws, and often their origin.
ROWS_OF_A_REQUEST = 16
# Of different rows each counts once: a probe that repeats itself is no drift.
RECENT_ROWS = 4096
MAX_WAITING_ROWS = 1 << 16  # for other processes that cannot be reached: 1 MB
BLOCK_ROWS = 64  # that are bet on at once: one row takes as long


@dataclass(frozen=True)
class DriftReport:
    """A summary of live rows. Evidence is log M_t, in nats; the alarm is of the largest so far."""

    calibration_rows: int
    rows: int
    flag_rate: float | None  # of late
    expected_flag_rate: float
    evidence: float
    largest_evidence: float
    alarm: bool
    binned_rows: list[int]  # all rows, by bin of `EDGES`
    p_value_sum: float
    # processes that serve as one; False: of this one alone, since the others cannot be reached
    of_all: bool = True


@dataclass(frozen=True)
class Watched:
    """A version whose rows are watched, and the gaps of its calibration by bin of `EDGES`."""

    name: str
    version: str
    gaps: Float64[np.ndarray, "B"] = field(compare=False)

    @classmethod
    def of_ranking(
        cls, ranking: Float64[np.ndarray, "n"], name: str = "m", version: str = "1"
    ) -> "Watched":
        return cls(name, version, binned_gaps(ranking))

    @property
    def label(self) -> str:
        return f"model {self.name} version {self.version}"


@dataclass(frozen=True)
class LiveRows:
    """Live rows in order of arrival: p-values, and digests of the rows, by which copies are
    skipped."""

    p_values: Float64[np.ndarray, "N"]
    digests: UInt64[np.ndarray, "N"] | None

    @classmethod
    def concatenate(cls, parts: "Sequence[LiveRows]") -> "LiveRows":
        digests = [part.digests for part in parts if part.digests is not None]
        return cls(
            np.concatenate([part.p_values for part in parts]),
            np.concatenate(digests) if digests else None,
        )


class Evidence(Protocol):
    """The tests that several processes share. Any call may take as long as a file, or a message.

    Raises:
        OSError: if the other processes cannot be reached.
    """

    def take(self, watched: Watched, rows: LiveRows) -> None: ...

    def report(self, watched: Watched) -> DriftReport: ...

    def reset(self, watched: Watched) -> None:
        """Forget all rows."""


class Drift:
    """Watches a version's p-values, all under one number of draws. Any thread may call it.

    With `evidence` the rows also go to the test that all processes share. They wait until `bring`,
    which is called several times a second, so that no request waits for other processes.
    """

    def __init__(self, watched: Watched, evidence: Evidence | None = None) -> None:
        self.watched = watched
        self._evidence = evidence
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._martingale = Martingale(self.watched.gaps)
        self._p_value_sum = 0.0
        self._pending: list[Float64[np.ndarray, "N"]] = []  # not bet on yet
        self._num_pending = 0  # rows
        self._recent: OrderedDict[int, None] = OrderedDict()  # digests of rows, the latest last
        self._waiting: list[LiveRows] = []  # for the shared test
        self._has_alarm = False  # and the log says so

    def reset(self) -> None:
        """Forget all rows, of all processes.

        Raises:
            OSError: if the shared test cannot be reached.
        """
        with self._lock:
            self._forget()
        if self._evidence is not None:
            self._evidence.reset(self.watched)

    def watch(
        self, p_values: Float64[np.ndarray, "N"], digests: UInt64[np.ndarray, "n"] | None = None
    ) -> None:
        """Take in the p-values of a request; given `row_digests`, of rows that are not among the
        latest."""
        rows = LiveRows(p_values[watched_rows(len(p_values))], digests)
        self.take(rows)
        if self._evidence is not None:
            with self._lock:
                self._waiting.append(rows)

    def take(self, rows: LiveRows) -> None:
        with self._lock:
            p_values = rows.p_values
            if rows.digests is not None:
                p_values = p_values[[self._is_new(digest) for digest in rows.digests.tolist()]]
            for start in range(0, len(p_values), BLOCK_ROWS):  # many are those of several requests
                self._pending.append(p_values[start : start + BLOCK_ROWS])
                self._num_pending += len(self._pending[-1])
                if self._num_pending >= BLOCK_ROWS:
                    self._bet()

    def bring(self) -> None:
        """Bring the rows that wait to the shared test; after a failure they wait for the next call,
        up to `MAX_WAITING_ROWS`.

        Raises:
            OSError: if it cannot be reached.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if self._evidence is None or not waiting:
            return
        rows = LiveRows.concatenate(waiting)
        try:
            self._evidence.take(self.watched, rows)
        except OSError:
            with self._lock:
                if len(rows.p_values) <= MAX_WAITING_ROWS:
                    self._waiting.insert(0, rows)
            raise

    def report(self) -> DriftReport:
        """Return the report of the shared test, or of this process if others cannot be reached."""
        if self._evidence is None:
            return self.own_report()
        try:
            self.bring()
            return self._evidence.report(self.watched)
        except OSError:
            return replace(self.own_report(), of_all=False)

    def own_report(self) -> DriftReport:
        """Return the report of the rows that this process answered."""
        with self._lock:
            self._bet()
            martingale, gaps = self._martingale, self.watched.gaps
            rows = int(martingale.seen.sum())
            return DriftReport(
                calibration_rows=int(gaps.sum()) - 1,
                rows=rows,
                flag_rate=flag_rate(martingale.late) if rows else None,
                expected_flag_rate=flag_rate(gaps),
                evidence=martingale.evidence,
                largest_evidence=martingale.largest,
                alarm=martingale.is_alarmed,
                binned_rows=martingale.seen.astype(int).tolist(),
                p_value_sum=self._p_value_sum,
            )

    def state(self) -> dict[str, np.ndarray]:
        """Return all that was seen as arrays, for `restore`."""
        with self._lock:
            self._bet()
            return {
                **{name: np.array(getattr(self._martingale, name)) for name in Martingale.STATE},
                "recent": np.array(list(self._recent), dtype=np.uint64),
                "p_value_sum": np.array(self._p_value_sum),
                "has_alarm": np.array(self._has_alarm),
            }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        with self._lock:
            self._forget()
            for name in Martingale.STATE:
                value = state[name]
                setattr(self._martingale, name, float(value) if value.ndim == 0 else value.copy())
            self._recent = OrderedDict.fromkeys(state["recent"].tolist())
            self._p_value_sum = float(state["p_value_sum"])
            self._has_alarm = bool(state["has_alarm"])

    def _is_new(self, digest: int) -> bool:
        """Note a row; return whether it is not among the latest different ones."""
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
        self._pending, self._num_pending = [], 0
        martingale = self._martingale
        martingale.update(EDGES.searchsorted(p_values))
        self._p_value_sum += float(p_values.sum())
        if martingale.is_alarmed and not self._has_alarm and self._evidence is None:
            logger.warning(
                "drift: live rows of %s are not like its calibration rows: evidence of %.1f nats "
                "(alarm at %.1f) after %d rows; flagged at .05 of late: %.3f, expected: %.3f",
                self.watched.label,
                martingale.largest,
                ALARM_EVIDENCE,
                martingale.seen.sum(),
                flag_rate(martingale.late),
                flag_rate(self.watched.gaps),
            )
        self._has_alarm = martingale.is_alarmed


def watched_rows(rows: int) -> slice | Int64[np.ndarray, "n"]:
    if rows <= ROWS_OF_A_REQUEST:
        return slice(None)
    return np.arange(ROWS_OF_A_REQUEST) * rows // ROWS_OF_A_REQUEST


def row_digests(x: Float32[np.ndarray, "N I"]) -> UInt64[np.ndarray, "n"]:
    """Return digests of a request's watched rows, for `Drift.watch`."""
    digests = [
        int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest())
        for row in x[watched_rows(len(x))]
    ]
    return np.array(digests, dtype=np.uint64)


def drift_content(report: DriftReport) -> dict[str, Any]:
    """Return the field `drift` of `GET /models/{name}`."""
    fields = ("rows", "flag_rate", "expected_flag_rate", "evidence", "largest_evidence")
    return {
        **{name: getattr(report, name) for name in fields},
        "alarm_at": ALARM_EVIDENCE,
        "alarm": report.alarm,
        "of_all": report.of_all,
    }
