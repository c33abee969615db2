"""Whether the rows of live requests still look like the rows that the flag was calibrated on: who
brings rows to the test of `model_store.conformal.drift`, and its alarm.

Processes that serve as one, workers or replicas, bring their rows to one urn (`SharedDrift`). A
martingale of each would not do: an urn that has seen fewer rows is not the urn of all, so that
given the others' rows none of them is a martingale any more, and neither is their mean.

One client alone raises no alarm. Next to M_t there is a martingale for each group of clients, of
all rows but theirs, and once two groups have sent enough rows an alarm needs all of these too.
Which rows are left out depends on who sent them and not on their p-values, so each is a martingale;
and since an alarm needs M_t as well, its probability stays what it is.
"""

import copy
import hashlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt64

from model_store.conformal.drift import ALARM_AT, EDGES, Martingale, binned_gaps, flag_rate

logger = logging.getLogger("dubito")

# Of a larger request some, evenly spaced: its rows share draws, and often their origin.
ROWS_OF_A_REQUEST = 16
# Of different rows each counts once: a probe that repeats itself is no drift.
RECENT_ROWS = 4096
MOST_WAITING = 1 << 16  # rows that are kept for others who cannot be reached: 1.5 MB
BLOCK_ROWS = 64  # that are bet on at once: one row takes as long
GROUPS = 16  # of clients: the first have one each, later ones share
CLIENT_ROWS = 50  # after which a group of clients counts as another than the rest


@dataclass(frozen=True)
class DriftReport:
    """What was seen of live rows. Evidence is log M_t, in nats; the alarm is of the largest so far.

    `one_client` says that there was evidence enough, but that it comes from the rows of one client
    alone: no alarm.
    """

    calibration_rows: int
    rows: int
    flag_rate: float | None  # of late
    expected_flag_rate: float
    evidence: float
    largest_evidence: float
    alarm: bool
    one_client: bool
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
    """Live rows in the order in which they came: p-values, digests of the rows, by which copies are
    passed over, and digests of their clients."""

    p_values: Float64[np.ndarray, "N"]
    digests: UInt64[np.ndarray, "N"] | None
    clients: UInt64[np.ndarray, "N"]

    @classmethod
    def concatenate(cls, parts: "Sequence[LiveRows]") -> "LiveRows":
        digests = [part.digests for part in parts if part.digests is not None]
        return cls(
            np.concatenate([part.p_values for part in parts]),
            np.concatenate(digests) if digests else None,
            np.concatenate([part.clients for part in parts]),
        )


class Drift:
    """Watches a version's p-values, all under one number of draws. Several threads may call it at
    once."""

    def __init__(self, watched: Watched, logs: bool = True) -> None:
        """Begin; with `logs` an alarm is also a line of the log."""
        self.watched = watched
        self._logs = logs
        self._gaps = watched.gaps
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._all = Martingale(self._gaps)
            self._without: dict[int, Martingale] = {}  # by group of clients, of all rows but theirs
            self._rows: Counter[int] = Counter()  # by group
            self._groups: dict[int, int] = {}  # of the first clients
            self._p_value_sum = 0.0
            self._waiting: list[Float64[np.ndarray, "N"]] = []
            self._waiting_groups: list[int] = []  # of each row
            self._alarmed = False  # and the log says so
            self._recent: OrderedDict[int, None] = OrderedDict()  # digests of rows, the latest last

    def watch(
        self,
        p_values: Float64[np.ndarray, "N"],
        digests: UInt64[np.ndarray, "n"] | None = None,
        client: Hashable = None,
    ) -> None:
        """Take in the p-values of a client's request; given `row_digests`, of rows that did not
        come of late."""
        self.take(live_rows(p_values, digests, client))

    def take(self, rows: LiveRows) -> None:
        with self._lock:
            p_values, clients = rows.p_values, rows.clients
            if rows.digests is not None:
                is_new = [self._is_new(digest) for digest in rows.digests.tolist()]
                p_values, clients = p_values[is_new], clients[is_new]
            for start in range(0, len(p_values), BLOCK_ROWS):  # many are those of several requests
                here = slice(start, start + BLOCK_ROWS)
                self._waiting.append(p_values[here])
                self._waiting_groups += [self._group(client) for client in clients[here].tolist()]
                if len(self._waiting_groups) >= BLOCK_ROWS:
                    self._take_in()

    def own_report(self) -> DriftReport:
        return self.report()

    def report(self) -> DriftReport:
        with self._lock:
            self._take_in()
            rows, late = int(self._all.seen.sum()), self._all.late
            of_several = self._is_of_several()
            return DriftReport(
                calibration_rows=int(self._gaps.sum()) - 1,
                rows=rows,
                flag_rate=flag_rate(late) if rows else None,
                expected_flag_rate=flag_rate(self._gaps),
                evidence=self._all.evidence,
                largest_evidence=self._all.largest,
                alarm=self._all.has_enough and of_several,
                one_client=self._all.has_enough and not of_several,
                binned_rows=self._all.seen.astype(int).tolist(),
                p_value_sum=self._p_value_sum,
            )

    def _is_of_several(self) -> bool:
        """Whether the evidence is not that of one client alone."""
        counting = [group for group, count in self._rows.items() if count >= CLIENT_ROWS]
        return len(counting) < 2 or all(self._without[group].has_enough for group in counting)

    def state(self) -> dict[str, np.ndarray]:
        """Return all that was seen as arrays, for `restore`."""
        with self._lock:
            self._take_in()
            groups = sorted(self._without)
            every = [self._all, *(self._without[group] for group in groups)]
            return {
                "groups": np.array(groups, dtype=np.int64),
                "rows": np.array([self._rows[group] for group in groups], dtype=np.int64),
                **{name: np.array([getattr(m, name) for m in every]) for name in Martingale.STATE},
                "clients": np.array(list(self._groups), dtype=np.uint64),
                "recent": np.array(list(self._recent), dtype=np.uint64),
                "p_value_sum": np.array([self._p_value_sum]),
                "alarmed": np.array([self._alarmed]),
            }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        with self._lock:
            groups = state["groups"].tolist()
            every = [Martingale(self._gaps) for _ in range(1 + len(groups))]
            for number, martingale in enumerate(every):
                for name in Martingale.STATE:
                    value = state[name][number]
                    setattr(martingale, name, float(value) if value.ndim == 0 else value.copy())
            self._all, self._without = every[0], dict(zip(groups, every[1:], strict=True))
            self._rows = Counter(dict(zip(groups, state["rows"].tolist(), strict=True)))
            self._groups = {client: n for n, client in enumerate(state["clients"].tolist())}
            self._recent = OrderedDict.fromkeys(state["recent"].tolist())
            self._p_value_sum = float(state["p_value_sum"][0])
            self._alarmed = bool(state["alarmed"][0])
            self._waiting, self._waiting_groups = [], []

    def _group(self, client: int) -> int:
        if client not in self._groups and len(self._groups) < GROUPS:
            self._groups[client] = len(self._groups)
        return self._groups.get(client, client % GROUPS)

    def _is_new(self, digest: int) -> bool:
        """Note a row; return whether it is not among the latest different ones."""
        is_new = digest not in self._recent
        self._recent[digest] = None
        self._recent.move_to_end(digest)
        if len(self._recent) > RECENT_ROWS:
            self._recent.popitem(last=False)
        return is_new

    def _take_in(self) -> None:
        if not self._waiting:
            return
        p_values, groups = np.concatenate(self._waiting), np.array(self._waiting_groups)
        self._waiting, self._waiting_groups = [], []
        bins = EDGES.searchsorted(p_values)
        for group in np.unique(groups).tolist():
            if group not in self._without:  # until now it sent none
                self._without[group] = copy.deepcopy(self._all)
            self._rows[group] += int(np.count_nonzero(groups == group))
        self._all.take_in(bins)
        for group, martingale in self._without.items():
            others = bins[groups != group]
            if len(others) > 0:
                martingale.take_in(others)
        self._p_value_sum += float(p_values.sum())
        alarm = self._all.has_enough and self._is_of_several()
        if alarm and not self._alarmed and self._logs:
            logger.warning(
                "drift: live rows of %s are not like its calibration rows: evidence of %.1f nats "
                "(alarm at %.1f) after %d rows; flagged at .05 of late: %.3f, expected: %.3f",
                self.watched.label,
                self._all.largest,
                ALARM_AT,
                self._all.seen.sum(),
                flag_rate(self._all.late),
                flag_rate(self._gaps),
            )
        self._alarmed = alarm


def watched_rows(rows: int) -> slice | Int64[np.ndarray, "n"]:
    if rows <= ROWS_OF_A_REQUEST:
        return slice(None)
    return np.arange(ROWS_OF_A_REQUEST) * rows // ROWS_OF_A_REQUEST


def row_digests(x: Float32[np.ndarray, "N I"]) -> UInt64[np.ndarray, "n"]:
    """Return digests of a request's watched rows, for `Drift.watch`."""
    return np.array([_digest(row.tobytes()) for row in x[watched_rows(len(x))]], dtype=np.uint64)


def live_rows(
    p_values: Float64[np.ndarray, "N"], digests: UInt64[np.ndarray, "n"] | None, client: Hashable
) -> LiveRows:
    """Return those rows of a client's request that are watched, given `row_digests`."""
    p_values = p_values[watched_rows(len(p_values))]
    clients = np.full(len(p_values), _client_digest(client), dtype=np.uint64)
    return LiveRows(p_values, digests, clients)


@lru_cache(maxsize=4096)
def _client_digest(client: Hashable) -> int:
    return _digest(repr(client).encode())


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


class Evidence(Protocol):
    """Where the evidence of several processes is put together. Any call may take as long as a file,
    or a message."""

    def take(self, watched: Watched, rows: LiveRows) -> None: ...

    def report(self, watched: Watched) -> DriftReport: ...

    def reset(self, watched: Watched) -> None:
        """Forget all rows."""


class SharedDrift:
    """Watches the rows that this process answers, and brings them to the evidence of all.

    Rows wait until `bring`, which is called several times a second, so that no request waits for
    the others.
    """

    def __init__(self, watched: Watched, evidence: Evidence) -> None:
        self.watched = watched
        self._evidence = evidence
        # Of rows that this process answered, for its metrics
        self._own = Drift(watched, logs=False)
        self._lock = threading.Lock()
        self._waiting: list[LiveRows] = []

    def watch(
        self,
        p_values: Float64[np.ndarray, "N"],
        digests: UInt64[np.ndarray, "n"] | None = None,
        client: Hashable = None,
    ) -> None:
        rows = live_rows(p_values, digests, client)
        self._own.take(rows)
        with self._lock:
            self._waiting.append(rows)

    def bring(self) -> None:
        """Bring what waits to the evidence of all; what cannot be brought is tried again, unless it
        is too much.

        Raises:
            OSError: if it cannot.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        rows = LiveRows.concatenate(waiting)
        try:
            self._evidence.take(self.watched, rows)
        except OSError:
            with self._lock:
                if len(rows.p_values) <= MOST_WAITING:
                    self._waiting.insert(0, rows)
            raise

    def own_report(self) -> DriftReport:
        return self._own.report()

    def report(self) -> DriftReport:
        """Return what all have seen; what this process has seen where others cannot be reached."""
        try:
            self.bring()
            return self._evidence.report(self.watched)
        except OSError:
            return replace(self._own.report(), of_all=False)

    def reset(self) -> None:
        """Forget all rows, of all processes.

        Raises:
            OSError: if the evidence of all cannot be reached.
        """
        self._own.reset()
        with self._lock:
            self._waiting = []
        self._evidence.reset(self.watched)


AnyDrift = Drift | SharedDrift


def drift_content(report: DriftReport) -> dict[str, Any]:
    """Return what `GET /models/{name}` says of drift."""
    shown = ("rows", "flag_rate", "expected_flag_rate", "evidence", "largest_evidence")
    return {
        **{name: getattr(report, name) for name in shown},
        "alarm_at": ALARM_AT,
        "alarm": report.alarm,
        "one_client": report.one_client,
        "of_all": report.of_all,
    }
