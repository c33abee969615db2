"""Drift: whether the rows of live requests still look like the rows that the flag was calibrated
on.

A live row falls into one of the n + 1 gaps between the n sorted calibration statistics; which one
is what its p-value says. If live and calibration rows are exchangeable, gaps follow a Polya urn
that begins with a ball for each gap,

    P(gap of row t + 1 | the rows before) = (1 + rows before in that gap) / (n + 1 + t),

whatever the data are. So do bins of gaps. With the urn for its null hypothesis a test knows that
the calibration is itself a sample of n rows: what differs from it by no more than that is no drift,
however many rows are seen.

Against the urn a *test martingale* bets (Vovk, Gammerman and Shafer, "Algorithmic learning in a
random world", 2005, chapter 7). A bet gives bin b the weight w_b, and a row in bin b multiplies its
capital by w_b / sum_c u_c w_c, u being the urn's probabilities: by 1 in expectation. Capital starts
as 1, in cash; 1 / (1 + log(1 + t)) of it is still in cash after t rows, and what leaves it is
shared among the bets. So at any time some bets have just begun, and drift that begins late is found
as well. The sum M_t of cash and bets is a martingale under the null, and by Ville's inequality

    P(M_t >= 1 / FALSE_ALARM for any t) <= FALSE_ALARM.

Bets are on small p-values, in three degrees, on large ones, and on the p-values of late.

Processes that serve as one, workers or replicas, bring their rows to one urn (`SharedDrift`). A
martingale of each would not do: an urn that has seen fewer rows is not the urn of all, so that
given the others' rows none of them is a martingale any more, and neither is their mean.

One client alone makes no alarm of all: beside M_t there is a martingale for each group of clients,
    of all rows but
theirs, and once two groups have sent rows enough an alarm needs all of these too. Which rows are
left out depends on who sent them and not on their p-values, so each is a martingale; and since an
alarm needs M_t as well, its probability stays what it is.
"""

import copy
import hashlib
import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt64

from model_store.conformal.rank_tables import conformal_p_value

logger = logging.getLogger("dubito")

EDGES = np.array(
    [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
)  # upper ends, inclusive
FLAG_RATE_AT = 0.05
FALSE_ALARM = 0.001  # probability of an alarm, ever, while nothing drifts
ROWS_OF_A_REQUEST = (
    16  # of a larger request so many, evenly spaced: its rows share draws, and often their origin
)
LATE_ROWS = 1000  # p-values of late are those of about so many rows, older ones fading away
PRIOR_ROWS = 50  # as the urn would have them, that the bet on p-values of late adds to them
SMALL_POWERS = (0.1, 0.3, 0.7)  # of bets on small p-values, of density k p^(k - 1)
LARGE_POWER = 0.7  # of the bet on large ones, of density k (1 - p)^(k - 1)
RECENT_ROWS = (
    4096  # different ones, each of which counts once: a probe that repeats itself is no drift
)
MOST_WAITING = 1 << 16  # rows that are kept for others who cannot be reached: 1.5 MB
BLOCK_ROWS = 64  # that are bet on at once: one row takes as long
GROUPS = (
    16  # of clients: the first have one each, and whoever comes later counts as one with another
)
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
    """A version whose rows are watched: the gaps of its calibration, by bin of `EDGES`, and what
    the log calls it."""

    name: str
    version: str
    gaps: Float64[np.ndarray, "B"] = field(compare=False)

    @classmethod
    def of_ranking(
        cls, ranking: Float64[np.ndarray, "n"], name: str = "m", version: str = "1"
    ) -> "Watched":
        """Return it, given the sorted calibration statistics that p-values are ranks among."""
        below = conformal_p_value(ranking, ranking)  # of a row in the gap below each
        p_values = np.append(below, 1.0 / (len(ranking) + 1))
        return cls(
            name,
            version,
            np.bincount(EDGES.searchsorted(p_values), minlength=len(EDGES)).astype(np.float64),
        )

    @property
    def label(self) -> str:
        """What the log calls it."""
        return f"model {self.name} version {self.version}"


@dataclass(frozen=True)
class LiveRows:
    """Live rows that are watched, in the order in which they came.

    `digests` are of the rows themselves, of which copies are passed over, and `clients` of who sent
    them.
    """

    p_values: Float64[np.ndarray, "N"]
    digests: UInt64[np.ndarray, "N"] | None
    clients: UInt64[np.ndarray, "N"]

    @classmethod
    def concatenate(cls, parts: "Sequence[LiveRows]") -> "LiveRows":
        """Return the rows of several requests as one; all have digests, or none."""
        digests = [part.digests for part in parts if part.digests is not None]
        return cls(
            np.concatenate([part.p_values for part in parts]),
            np.concatenate(digests) if digests else None,
            np.concatenate([part.clients for part in parts]),
        )


class Martingale:
    """The urn, the capital bet against it, and what was seen."""

    STATE: ClassVar = (
        "seen",
        "late",
        "log_bets",
        "evidence",
        "largest",
    )  # beside `gaps`, which stay

    def __init__(self, gaps: Float64[np.ndarray, "B"]) -> None:
        self.gaps = gaps  # of the calibration
        self.seen = np.zeros(len(EDGES))
        self.late = np.zeros(len(EDGES))
        self.evidence = self.largest = 0.0  # log M_t
        self.log_bets = np.full(len(FIXED_BETS) + 1, -math.inf)

    @property
    def has_enough(self) -> bool:
        """Whether there was ever evidence enough for an alarm."""
        return self.largest >= ALARM_AT

    def take_in(self, bins: Int64[np.ndarray, "N"]) -> None:
        """Bet on rows by the bins of their p-values, and take them in."""
        fell_N_B = np.zeros((len(bins), len(EDGES)))
        fell_N_B[np.arange(len(bins)), bins] = 1.0
        counts_B = fell_N_B.sum(axis=0)
        self._bet(bins, fell_N_B)
        self.seen += counts_B
        self.late = self.late * (1.0 - 1.0 / LATE_ROWS) ** len(bins) + counts_B

    def _bet(self, bins: np.ndarray, fell_N_B: Float64[np.ndarray, "N B"]) -> None:
        urn_B = self.gaps + self.seen
        late_B = self.late + (PRIOR_ROWS / urn_B.sum()) * urn_B
        on_late_B = np.divide(late_B, urn_B, out=np.ones_like(urn_B), where=urn_B > 0)
        weights_B_E = np.stack([*FIXED_BETS, on_late_B], axis=1)
        urn_N_B = urn_B + fell_N_B.cumsum(axis=0) - fell_N_B  # before each row
        expected_N_E = (urn_N_B @ weights_B_E) / urn_N_B.sum(axis=1, keepdims=True)
        gain_N_E = np.log(weights_B_E[bins] / expected_N_E).cumsum(axis=0)
        cash = 1.0 / (1.0 + np.log1p(self.seen.sum() + np.arange(len(bins) + 1)))
        put_N = np.log((cash[:-1] - cash[1:]) / len(self.log_bets))  # on each bet, before each row
        # A bet's capital c follows c <- (c + put) gain; c over all gains so far is a sum.
        put_N_E = put_N[:, None] - np.concatenate(
            [np.zeros((1, len(self.log_bets))), gain_N_E[:-1]]
        )
        log_bets_N_E = (
            np.logaddexp.accumulate(np.concatenate([self.log_bets[None], put_N_E]))[1:] + gain_N_E
        )
        log_capital_N = np.logaddexp(np.logaddexp.reduce(log_bets_N_E, axis=1), np.log(cash[1:]))
        self.log_bets = log_bets_N_E[-1]
        self.evidence = float(log_capital_N[-1])
        self.largest = max(self.largest, float(log_capital_N.max()))


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
        """Begin anew, as if no row had been seen."""
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
        """Take in rows."""
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
        """Return what this process has seen: the same, unless it brings its rows to others'."""
        return self.report()

    def report(self) -> DriftReport:
        """Return what was seen so far."""
        with self._lock:
            if self._waiting:
                self._take_in()
            rows, late = int(self._all.seen.sum()), self._all.late
            of_several = self._is_of_several()
            return DriftReport(
                calibration_rows=int(self._gaps.sum()) - 1,
                rows=rows,
                flag_rate=_flag_rate(late) if rows else None,
                expected_flag_rate=_flag_rate(self._gaps),
                evidence=self._all.evidence,
                largest_evidence=self._all.largest,
                alarm=self._all.has_enough and of_several,
                one_client=self._all.has_enough and not of_several,
                binned_rows=self._all.seen.astype(int).tolist(),
                p_value_sum=self._p_value_sum,
            )

    def _is_of_several(self) -> bool:
        """Whether the evidence does not come from one client alone, where there are others."""
        counting = [group for group, count in self._rows.items() if count >= CLIENT_ROWS]
        return len(counting) < 2 or all(self._without[group].has_enough for group in counting)

    def state(self) -> dict[str, np.ndarray]:
        """Return all that was seen, as arrays, for `restore`."""
        with self._lock:
            if self._waiting:
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
        """Go on from what `state` returned, of this or another process."""
        with self._lock:
            groups = state["groups"].tolist()
            every = [Martingale(self._gaps) for _ in range(1 + len(groups))]
            for number, martingale in enumerate(every):
                for name in Martingale.STATE:
                    value = state[name][number]
                    setattr(martingale, name, float(value) if value.ndim == 0 else value.copy())
            self._all, self._without = every[0], dict(zip(groups, every[1:], strict=True))
            self._rows = Counter(dict(zip(groups, state["rows"].tolist(), strict=True)))
            self._groups = {
                client: number for number, client in enumerate(state["clients"].tolist())
            }
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
                "(alarm at %.1f) "
                "after %d rows; flagged at .05 of late: %.3f, expected: %.3f",
                self.watched.label,
                self._all.largest,
                ALARM_AT,
                self._all.seen.sum(),
                _flag_rate(self._all.late),
                _flag_rate(self._gaps),
            )
        self._alarmed = alarm


def _flag_rate(rows_B: Float64[np.ndarray, "B"]) -> float:
    """Return the share of binned rows whose p-values are at most `FLAG_RATE_AT`."""
    return float(rows_B[EDGES <= FLAG_RATE_AT].sum() / rows_B.sum())


def watched_rows(rows: int) -> slice | Int64[np.ndarray, "n"]:
    """Return which rows of a request are watched."""
    return (
        slice(None)
        if rows <= ROWS_OF_A_REQUEST
        else np.arange(ROWS_OF_A_REQUEST) * rows // ROWS_OF_A_REQUEST
    )


def row_digests(x: Float32[np.ndarray, "N I"]) -> UInt64[np.ndarray, "n"]:
    """Return digests of a request's watched rows, for `Drift.watch`."""
    return np.array([_digest(row.tobytes()) for row in x[watched_rows(len(x))]], dtype=np.uint64)


def live_rows(
    p_values: Float64[np.ndarray, "N"], digests: UInt64[np.ndarray, "n"] | None, client: Hashable
) -> LiveRows:
    """Return those rows of a client's request that are watched, given `row_digests`."""
    p_values = p_values[watched_rows(len(p_values))]
    return LiveRows(
        p_values, digests, np.full(len(p_values), _client_digest(client), dtype=np.uint64)
    )


@lru_cache(maxsize=4096)
def _client_digest(client: Hashable) -> int:
    return _digest(repr(client).encode())


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


class Evidence(Protocol):
    """Where the evidence of several processes is put together. Any call may take as long as a file,
    or a message."""

    def take(self, watched: Watched, rows: LiveRows) -> None:
        """Take in rows."""

    def report(self, watched: Watched) -> DriftReport:
        """Return what all have seen so far."""

    def reset(self, watched: Watched) -> None:
        """Begin anew."""


class SharedDrift:
    """Watches the rows that this process answers, and brings them to the evidence of all.

    Rows wait until `bring`, which is called several times a second, so that no request waits for
    the others.
    """

    def __init__(self, watched: Watched, evidence: Evidence) -> None:
        self.watched = watched
        self._evidence = evidence
        self._own = Drift(
            watched, logs=False
        )  # of rows that this process answered, for its metrics
        self._lock = threading.Lock()
        self._waiting: list[LiveRows] = []

    def watch(
        self,
        p_values: Float64[np.ndarray, "N"],
        digests: UInt64[np.ndarray, "n"] | None = None,
        client: Hashable = None,
    ) -> None:
        """Take in the p-values of a client's request; as `Drift.watch`."""
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

    def report(self) -> DriftReport:
        """Return what all have seen so far; what this process has seen where the others' evidence
        cannot be had."""
        try:
            self.bring()
            return self._evidence.report(self.watched)
        except OSError:
            return replace(self._own.report(), of_all=False)

    def own_report(self) -> DriftReport:
        """Return what this process has seen."""
        return self._own.report()

    def reset(self) -> None:
        """Begin anew, for all.

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
    return {
        "rows": report.rows,
        "flag_rate": report.flag_rate,
        "expected_flag_rate": report.expected_flag_rate,
        "evidence": report.evidence,
        "largest_evidence": report.largest_evidence,
        "alarm_at": ALARM_AT,
        "alarm": report.alarm,
        "one_client": report.one_client,
        "of_all": report.of_all,
    }


def _power_weights(power: float) -> Float64[np.ndarray, "B"]:
    """Return the mean of the density k p^(k - 1) over each bin."""
    ends = np.append(0.0, EDGES)
    return np.diff(ends**power) / np.diff(ends)


def _reflected_weights(power: float) -> Float64[np.ndarray, "B"]:
    """Return the mean of the density k (1 - p)^(k - 1) over each bin."""
    ends = np.append(0.0, EDGES)
    return -np.diff((1.0 - ends) ** power) / np.diff(ends)


ALARM_AT = -math.log(FALSE_ALARM)  # nats of evidence
FIXED_BETS = (*(_power_weights(power) for power in SMALL_POWERS), _reflected_weights(LARGE_POWER))
