"""Mergeable sums over Monte Carlo draws and jackknife standard errors.

Axes: K draws, N rows, G groups of draws. *C is an axis of classes, an axis of two scales of a
target, or absent. *U is the axis of scales, or absent. Draw k belongs to group k mod G; the sums
contain each group's means. Sums over disjoint draws merge exactly, so draws can be split over time,
threads or machines. Up to G draws, each group has one draw.

Groups are the last axis. There, numpy adds pairwise in an order that depends only on their number.
Along any other axis, the order depends on the number of rows, so a row would get different bits
alone than in a batch.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float64, Int64

Sums = Float64[np.ndarray, "*shape G"]
GROUPS = 100
# For standard errors of disagreement. With fewer groups, they are more than 20 % too small for rows
# whose draws rarely disagree.
MIN_SPREAD_GROUPS = 5


@dataclass(frozen=True, eq=False)
class DrawSums:
    """The sums of predictions and uncertainties in each group of draws."""

    num_draws: Int64[np.ndarray, "G"]
    prediction: Float64[np.ndarray, "N *C G"]  # group mean
    squared_deviations: Float64[np.ndarray, "N *C G"]  # sum of squares about the group mean
    uncertainty: Float64[np.ndarray, "N *U G"]  # group mean

    @classmethod
    def from_draws(
        cls,
        prediction: Float64[np.ndarray, "N *C K"],
        uncertainty: Float64[np.ndarray, "N *U K"],
        first_draw: int = 0,
        groups: int = GROUPS,
    ) -> "DrawSums":
        """Sum the predictions and uncertainties of consecutive draws into G groups."""
        num_draws = uncertainty.shape[-1]
        if num_draws > groups:
            half = groups * (-(-num_draws // groups) // 2)
            first = prediction[..., :half], uncertainty[..., :half]
            rest = prediction[..., half:], uncertainty[..., half:]
            rest_sums = cls.from_draws(*rest, first_draw + half, groups)
            return cls.from_draws(*first, first_draw, groups).merge(rest_sums)
        num_draws_G = np.ones(num_draws, dtype=np.int64)
        if first_draw % groups > 0:
            order = (first_draw + np.arange(num_draws)) % groups
            num_draws_G = np.bincount(order)
            prediction = _scatter(prediction, order, len(num_draws_G))
            uncertainty = _scatter(uncertainty, order, len(num_draws_G))
        return cls(num_draws_G, prediction, np.zeros(prediction.shape), uncertainty)

    def merge(self, other: "DrawSums") -> "DrawSums":
        """Merge with sums over other draws for the same rows."""
        groups = max(len(self.num_draws), len(other.num_draws))
        if len(self.num_draws) < groups:
            return self._pad_to(groups).merge(other)
        other = other._pad_to(groups)
        num_draws_G = self.num_draws + other.num_draws
        share_G = other.num_draws / np.maximum(num_draws_G, 1)
        difference = other.prediction - self.prediction
        return DrawSums(
            num_draws_G,
            self.prediction + share_G * difference,
            self.squared_deviations
            + other.squared_deviations
            + (self.num_draws * share_G) * difference**2,
            self.uncertainty + share_G * (other.uncertainty - self.uncertainty),
        )

    def _pad_to(self, groups: int) -> "DrawSums":
        missing = groups - len(self.num_draws)
        if missing == 0:
            return self
        padded = (np.pad(a, [*[(0, 0)] * (a.ndim - 1), (0, missing)]) for a in self._arrays)
        return DrawSums(np.pad(self.num_draws, (0, missing)), *padded)

    @property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.prediction, self.squared_deviations, self.uncertainty

    def component(self, index: int) -> "DrawSums":
        return DrawSums(self.num_draws, *(values[:, index] for values in self._arrays))

    def drop_empty_groups(self) -> "DrawSums":
        has_draws = self.num_draws > 0
        if has_draws.all():
            return self
        parts = (np.compress(has_draws, values, axis=-1) for values in self._arrays)
        return DrawSums(self.num_draws[has_draws], *parts)


class Average:
    """Averages over draws, with jackknife standard errors.

    The jackknife recomputes a score without each group. Let p be a mean over draws, q_j the mean of
    group j, and r_j the group's draws divided by all other draws (`odds_G`). The mean without group
    j is p - r_j (q_j - p).
    """

    def __init__(self, num_draws_G: Int64[np.ndarray, "G"]) -> None:
        self.num_draws_G = num_draws_G
        self.num_draws = int(num_draws_G.sum())
        self.has_single_draws = self.num_draws == len(num_draws_G)

    @cached_property
    def odds_G(self) -> Float64[np.ndarray, "G"]:
        """The ratio of each group's draws to all other draws. Requires at least two groups."""
        return self.num_draws_G / (self.num_draws - self.num_draws_G)

    def __call__(self, values: Sums) -> Float64[np.ndarray, "*shape"]:
        # Dividing after summing gives exactly 1 for probabilities of 1.
        weighted = values if self.has_single_draws else values * self.num_draws_G
        return np.add.reduce(weighted, axis=-1) / self.num_draws

    def leave_one_out_variances(
        self, variance: Float64[np.ndarray, "*shape"], square: Sums, deviation: Sums
    ) -> Sums:
        """Compute the variance over draws with each group left out.

        Args:
            variance: of all draws; the mean of `square`.
            square: the group's mean squared deviation from the overall mean.
            deviation: the group's mean minus the overall mean.
        """
        # About the overall mean, the variance without the group is v - r (square - v). The mean
        # without the group differs from the overall mean by r * deviation.
        reduced = (1.0 + self.odds_G) * variance[..., None]
        reduced -= self.odds_G * square
        reduced -= np.square(self.odds_G * deviation)
        return np.maximum(reduced, 0.0, out=reduced)

    def jackknife_bias(self, loss: Sums) -> Float64[np.ndarray, "*shape"]:
        """Estimate the size of a score's downward bias to first order.

        `loss` is the decrease of the score without each group. Terms with mean 0 over draws can be
        omitted.
        """
        bias: np.ndarray = np.add.reduce(loss * (1.0 - self.num_draws_G / self.num_draws), axis=-1)
        return np.maximum(bias, 0.0)

    def standard_error(self, change: Sums) -> Float64[np.ndarray, "*shape"]:
        """Compute a score's standard error from its changes when each group is left out.

        This is the delete-one jackknife, or the delete-m_j jackknife of Busing, Meijer and van der
        Leeden (1999) if groups have several draws. Draws must be independent. The squared error of
        a mean over draws is unbiased. The argument is overwritten.
        """
        centre = np.add.reduce(change * (1.0 - self.num_draws_G / self.num_draws), axis=-1)
        change /= self.odds_G
        change -= centre[..., None]
        np.square(change, out=change)
        change *= self.odds_G
        return np.sqrt(np.add.reduce(change, axis=-1) / len(self.odds_G))


def _scatter(
    values: Float64[np.ndarray, "*shape K"], order: Int64[np.ndarray, "K"], groups: int
) -> np.ndarray:
    by_group = np.zeros((*values.shape[:-1], groups))
    by_group[..., order] = values
    return by_group
