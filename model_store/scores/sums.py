"""Sums over Monte Carlo draws that merge, and the standard errors that they give.

Axes: K draws, N rows, G groups of draws; *C is an axis of classes, of two scales of a target, or
none, and *U the latter or none. Draw k belongs to group k mod G, and of each group the means are
kept. Sums over disjoint draws merge exactly, so draws may be split over time, threads or machines.
Up to G draws a group is one draw; beyond, it is its draws' mean.

Groups are laid out last: then numpy adds them pairwise, in an order that their number alone
decides. Along any other axis the order depends on how many rows there are, and a row alone would
get other bits than in a batch.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

GROUPS = 100
# groups from which the standard error of a disagreement is right to 20 %: of fewer it is too small
# where draws seldom disagree, of 3 by a fifth for the median row of MNIST
FEWEST_FOR_SPREAD = 5


@dataclass(frozen=True, eq=False)
class DrawSums:
    """What draws predict of N rows and how uncertain each is of it, in float64, by group of draws,
    up to the last group that holds any."""

    num_draws: Int64[np.ndarray, "G"]
    prediction: Float64[np.ndarray, "N *C G"]  # the group's mean
    # sum over its draws of (prediction - the group's mean)^2
    squared_deviations: Float64[np.ndarray, "N *C G"]
    uncertainty: Float64[np.ndarray, "N *U G"]  # the group's mean

    @classmethod
    def of(
        cls,
        prediction: Float64[np.ndarray, "N *C K"],
        uncertainty: Float64[np.ndarray, "N *U K"],
        first_draw: int = 0,
        groups: int = GROUPS,
    ) -> "DrawSums":
        """Sum draws `first_draw`, `first_draw + 1`, ... of a seed into G `groups`."""
        num_draws = uncertainty.shape[-1]
        if num_draws > groups:
            half = groups * (-(-num_draws // groups) // 2)
            first = cls.of(prediction[..., :half], uncertainty[..., :half], first_draw, groups)
            first_draw += half
            rest = cls.of(prediction[..., half:], uncertainty[..., half:], first_draw, groups)
            return first.merge(rest)
        num_draws_G = np.ones(num_draws, dtype=np.int64)  # each group holds one draw at most
        if first_draw % groups > 0:
            order = (first_draw + np.arange(num_draws)) % groups
            num_draws_G = np.bincount(order)
            prediction = _scatter(prediction, order, len(num_draws_G))
            uncertainty = _scatter(uncertainty, order, len(num_draws_G))
        return cls(num_draws_G, prediction, np.zeros(prediction.shape), uncertainty)

    def merge(self, other: "DrawSums") -> "DrawSums":
        """Return the sums over the draws of both, which must be of the same rows and as many groups
        and share no draw."""
        if self.prediction.shape[:-1] != other.prediction.shape[:-1]:
            raise ValueError(
                f"expected sums of shape {self.prediction.shape}, got {other.prediction.shape}"
            )
        groups = max(len(self.num_draws), len(other.num_draws))
        if len(self.num_draws) < groups:
            return self._up_to(groups).merge(other)
        other = other._up_to(groups)
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

    def _up_to(self, groups: int) -> "DrawSums":
        more = groups - len(self.num_draws)
        if more == 0:
            return self
        padded = (np.pad(of, [*[(0, 0)] * (of.ndim - 1), (0, more)]) for of in self._by_row)
        return DrawSums(np.pad(self.num_draws, (0, more)), *padded)

    @property
    def _by_row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.prediction, self.squared_deviations, self.uncertainty

    def along(self, i: int) -> "DrawSums":
        return DrawSums(self.num_draws, *(values[:, i] for values in self._by_row))

    def drawn(self) -> "DrawSums":
        used = self.num_draws > 0
        if not used.any():
            raise ValueError("expected at least one draw, got none")
        if used.all():
            return self
        parts = (np.compress(used, values, axis=-1) for values in self._by_row)
        return DrawSums(self.num_draws[used], *parts)


class Average:
    """Means over draws, of the means of groups that each hold a draw, and standard errors of scores
    made of them.

    Those come from the jackknife: each group is left out in turn, and a score made of the others.
    With p a mean over draws, q_j that of group j and r_j its number of draws over that of all
    others (`odds_G`), without group j it is p - r_j (q_j - p).
    """

    def __init__(self, num_draws_G: Int64[np.ndarray, "G"]) -> None:
        self.num_draws_G = num_draws_G
        self.num_draws = int(num_draws_G.sum())
        self.one_each = self.num_draws == len(num_draws_G)

    @cached_property
    def odds_G(self) -> Float64[np.ndarray, "G"]:
        """A group's draws over all other groups' draws; there must be two groups."""
        return self.num_draws_G / (self.num_draws - self.num_draws_G)

    def __call__(self, values: Float64[np.ndarray, "*shape G"]) -> Float64[np.ndarray, "*shape"]:
        # Summing before dividing gives exactly 1 for probabilities of 1.
        weighted = values if self.one_each else values * self.num_draws_G
        mean: Any = np.add.reduce(weighted, axis=-1) / self.num_draws
        return mean

    def variances_without(
        self,
        variance: Float64[np.ndarray, "*shape"],
        square: Float64[np.ndarray, "*shape G"],
        deviation: Float64[np.ndarray, "*shape G"],
    ) -> Float64[np.ndarray, "*shape G"]:
        """Return the variance over draws without each group.

        Args:
            variance: over all draws, the mean of `square`.
            square: the group's mean squared deviation from the mean over draws.
            deviation: the group's mean less the mean over draws.
        """
        # About the mean over draws it is v - r (square - v); the mean without the group lies r
        # deviation from that.
        without = (1.0 + self.odds_G) * variance[..., None]
        without -= self.odds_G * square
        without -= np.square(self.odds_G * deviation)
        return np.maximum(without, 0.0, out=without)

    def jackknife_bias(
        self, loss: Float64[np.ndarray, "*shape G"]
    ) -> Float64[np.ndarray, "*shape"]:
        """Return by how much a score is too small on average, to first order, 0 or more.

        Args:
            loss: how much less each group's absence makes it; what has a mean over draws of 0 may
                be left out.
        """
        bias: np.ndarray = np.add.reduce(loss * (1.0 - self.num_draws_G / self.num_draws), axis=-1)
        return np.maximum(bias, 0.0)

    def standard_error(
        self, change: Float64[np.ndarray, "*shape G"]
    ) -> Float64[np.ndarray, "*shape"]:
        """Return the standard error of a score from how each group's absence changes it; the
        argument is overwritten.

        The delete-one jackknife, or where groups hold more than one draw the delete-m_j jackknife
        of Busing, Meijer and van der Leeden (1999). It holds for independent draws, and for a mean
        over draws its square is unbiased.
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
