"""A sequential test for drift between live rows and calibration rows.

A live row's p-value determines its gap between the n sorted calibration statistics. If live and
calibration rows are exchangeable, the n + 1 gaps follow a Polya urn that starts with one ball per
gap,

    P(gap of row t + 1 | earlier rows) = (1 + earlier rows in that gap) / (n + 1 + t),

for any distribution of the data. Bins of gaps follow the same law. The urn accounts for the
calibration split being a sample of n rows: a difference within its sampling error is never drift,
after any number of live rows.

A *test martingale* bets against the urn (Vovk, Gammerman and Shafer, "Algorithmic learning in a
random world", 2005, chapter 7). A bet assigns the weight w_b to bin b. A row in bin b multiplies
the bet's capital by w_b / sum_c u_c w_c, where u are the urn's probabilities; the expected factor
is 1. The capital starts as 1, in cash. After t rows, 1 / (1 + log(1 + t)) is still in cash, and the
rest has been divided among the bets. New money enters bets at all times, so drift that begins late
is detected too. The sum M_t of cash and bets is a martingale under the null hypothesis, and by
Ville's inequality

    P(M_t >= 1 / FALSE_ALARM_RATE for any t) <= FALSE_ALARM_RATE.

The bets favour small p-values (three of different strength), large p-values, and recent p-values.
"""

import math

import numpy as np
from jaxtyping import Float64, Int64

from model_store.conformal.rank_tables import conformal_p_value

# Upper edges of bins of p-values, inclusive
EDGES = np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
FLAG_RATE_FPR = 0.05
FALSE_ALARM_RATE = 0.001  # over all time, without drift
RECENT_ROWS = 1000  # time constant of the exponential forgetting
PRIOR_ROWS = 50  # from the urn, added to recent p-values
SMALL_POWERS = (0.1, 0.3, 0.7)  # bets on small p-values, density k p^(k - 1)
LARGE_POWER = 0.7  # bet on large p-values, density k (1 - p)^(k - 1)
ALARM_EVIDENCE = -math.log(FALSE_ALARM_RATE)  # nats of evidence

_ENDS = np.append(0.0, EDGES)
# Each bet's mean density over each bin
FIXED_BETS = (
    *(np.diff(_ENDS**power) / np.diff(_ENDS) for power in SMALL_POWERS),
    -np.diff((1.0 - _ENDS) ** LARGE_POWER) / np.diff(_ENDS),
)


class Martingale:
    def __init__(self, gaps: Float64[np.ndarray, "B"]) -> None:
        self.gaps = gaps  # in each bin
        self.seen = np.zeros(len(EDGES))
        self.late = np.zeros(len(EDGES))
        self.evidence = self.largest = 0.0  # log M_t
        self.log_bets = np.full(len(FIXED_BETS) + 1, -math.inf)

    @property
    def is_alarmed(self) -> bool:
        """True if there was ever enough evidence for an alarm."""
        return self.largest >= ALARM_EVIDENCE

    def update(self, bins: Int64[np.ndarray, "N"]) -> None:
        one_hot_N_B = np.zeros((len(bins), len(EDGES)))
        one_hot_N_B[np.arange(len(bins)), bins] = 1.0
        counts_B = one_hot_N_B.sum(axis=0)
        self._bet(bins, one_hot_N_B)
        self.seen += counts_B
        self.late = self.late * (1.0 - 1.0 / RECENT_ROWS) ** len(bins) + counts_B

    def _bet(self, bins: np.ndarray, one_hot_N_B: Float64[np.ndarray, "N B"]) -> None:
        urn_B = self.gaps + self.seen
        recent_B = self.late + (PRIOR_ROWS / urn_B.sum()) * urn_B
        recent_bet_B = np.divide(recent_B, urn_B, out=np.ones_like(urn_B), where=urn_B > 0)
        weights_B_E = np.stack([*FIXED_BETS, recent_bet_B], axis=1)
        urn_N_B = urn_B + one_hot_N_B.cumsum(axis=0) - one_hot_N_B  # before each row
        expected_N_E = (urn_N_B @ weights_B_E) / urn_N_B.sum(axis=1, keepdims=True)
        gain_N_E = np.log(weights_B_E[bins] / expected_N_E).cumsum(axis=0)
        cash = 1.0 / (1.0 + np.log1p(self.seen.sum() + np.arange(len(bins) + 1)))
        # Log of the cash added to each bet before each row
        stake_N = np.log((cash[:-1] - cash[1:]) / len(self.log_bets))
        # A bet's capital c follows c <- (c + stake) gain, so c / (product of gains) is a sum.
        gain_before_N_E = np.vstack([np.zeros(len(self.log_bets)), gain_N_E[:-1]])
        stake_N_E = np.vstack([self.log_bets, stake_N[:, None] - gain_before_N_E])
        log_bets_N_E = np.logaddexp.accumulate(stake_N_E)[1:] + gain_N_E
        log_capital_N = np.logaddexp(np.logaddexp.reduce(log_bets_N_E, axis=1), np.log(cash[1:]))
        self.log_bets = log_bets_N_E[-1]
        self.evidence = float(log_capital_N[-1])
        self.largest = max(self.largest, float(log_capital_N.max()))


def binned_gaps(ranking: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "B"]:
    """Count the gaps between sorted calibration statistics in each p-value bin."""
    # Each p-value belongs to a row in the gap below a statistic; the last gap is above all.
    p_values = np.append(conformal_p_value(ranking, ranking), 1.0 / (len(ranking) + 1))
    return np.bincount(EDGES.searchsorted(p_values), minlength=len(EDGES)).astype(np.float64)


def flag_rate(rows_B: Float64[np.ndarray, "B"]) -> float:
    """Compute the share of rows whose p-value is at most `FLAG_RATE_FPR`."""
    return float(rows_B[EDGES <= FLAG_RATE_FPR].sum() / rows_B.sum())
