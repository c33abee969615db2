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
"""

import math
from typing import ClassVar

import numpy as np
from jaxtyping import Float64, Int64

from model_store.conformal.rank_tables import conformal_p_value

# upper, inclusive
EDGES = np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
FLAG_RATE_AT = 0.05
FALSE_ALARM = 0.001  # probability of an alarm, ever, while nothing drifts
LATE_ROWS = 1000  # p-values of late are those of about that many rows, older ones fading away
PRIOR_ROWS = 50  # as the urn would have them, that the bet on p-values of late adds to them
SMALL_POWERS = (0.1, 0.3, 0.7)  # of bets on small p-values, of density k p^(k - 1)
LARGE_POWER = 0.7  # of the bet on large ones, of density k (1 - p)^(k - 1)


class Martingale:
    # in addition to `gaps`, which stay
    STATE: ClassVar = ("seen", "late", "log_bets", "evidence", "largest")

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
        gain_before_N_E = np.vstack([np.zeros(len(self.log_bets)), gain_N_E[:-1]])
        put_N_E = np.vstack([self.log_bets, put_N[:, None] - gain_before_N_E])
        log_bets_N_E = np.logaddexp.accumulate(put_N_E)[1:] + gain_N_E
        log_capital_N = np.logaddexp(np.logaddexp.reduce(log_bets_N_E, axis=1), np.log(cash[1:]))
        self.log_bets = log_bets_N_E[-1]
        self.evidence = float(log_capital_N[-1])
        self.largest = max(self.largest, float(log_capital_N.max()))


def binned_gaps(ranking: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "B"]:
    """Return the gaps between sorted calibration statistics by bin of `EDGES`: the urn's first
    balls."""
    below = conformal_p_value(ranking, ranking)  # of a row in the gap below each
    p_values = np.append(below, 1.0 / (len(ranking) + 1))
    return np.bincount(EDGES.searchsorted(p_values), minlength=len(EDGES)).astype(np.float64)


def flag_rate(rows_B: Float64[np.ndarray, "B"]) -> float:
    """Return the share of binned rows whose p-values are at most `FLAG_RATE_AT`."""
    return float(rows_B[EDGES <= FLAG_RATE_AT].sum() / rows_B.sum())


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
