"""Joint scores: what the labels of several rows would teach together, and the greedy choice of a
batch by them.

Axes: K draws, N rows, C classes, S configurations of the labels of rows already chosen. Information
is in nats. A row's *gain* is what its label would teach in addition to those of the rows chosen
before it. All gains here are those of a submodular function: a row never gains more, the more rows
are chosen. So a gain that was computed once bounds all later ones, and only rows whose bound is
larger than the best gain are computed again (Minoux 1978, "Accelerated greedy algorithms"): the
choice is that of a greedy search which computes them all. Rows of little BALD cost nothing.

    BatchBald     I(y_S, y_n; w) - I(y_S; w)    mutual information of labels and draws; alone it
                  is BALD (Kirsch, van Amersfoort and Gal 2019, "BatchBALD")
    MaxDet        1/2 log(1 + v / s^2)          with v the variance of the row that those of the
                  chosen leave, and s^2 its noise: the greedy maximum of
                  det(Cov + noise) / det(noise) (Chen, Zhang and Zhou 2018; Holzmüller et al. 2023,
                  "Deep batch active learning for regression")

Both are plug-in estimates of K draws, and K draws can tell no more than log K nats apart: from few
draws they are too small, as BALD is, and the more rows are chosen the more so.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from model_store.types import Pause, no_pause

# of labels of the rows chosen, that are all counted; beyond it as many are sampled
MOST_CONFIGURATIONS = 10_000
JOINT_NUMBERS = 1_000_000  # configurations x draws, at most: 8 MB
# of a configuration that is counted: all below it together change no gain by 1e-10 nats
LEAST_MASS = 1e-16
NUMBERS_AT_ONCE = 1 << 18  # computed in one step of some milliseconds
FIRST_AT_ONCE = 8  # rows that are computed again at first, then twice as many each time
DRAWS_ALIKE = (1, 3)  # most probable draws by which configurations are merged
TIMES_FEWER = 3  # than all configurations are those merged, where that is worth it
ROUNDING = 1e-9  # nats, of gains in float64
# variance of a class label, so that draws that are all sure do not weigh without bound
LEAST_NOISE = 0.01
LEAST_PROBABILITY = 1e-300  # so that 0 log 0 is 0
LEAST_LABEL = 1e-37  # the same of a label's probability, in float32
# of probabilities in float32: a product of three is still a normal number, all else are slow
LEAST_KEPT = 1e-12

Rows = Int64[np.ndarray, "n"]
Gains = Float64[np.ndarray, "n"]


@dataclass(frozen=True, eq=False)
class Candidates:
    gain: Float64[np.ndarray, "N"]  # of each alone
    # what its label says of itself alone: the expected entropy, or the noise variance
    own: Float64[np.ndarray, "N"]
    said: Float32[np.ndarray, "N D"]  # what the draws say of it


class JointScore(ABC):
    """What rows gain in addition to those chosen so far: none at first."""

    def __init__(self, candidates: Candidates, num_draws: int, seed: int) -> None:
        self.candidates = candidates
        self.num_draws = num_draws
        self.seed = seed

    @staticmethod
    @abstractmethod
    def of(samples: Float[np.ndarray, "K N C"]) -> Candidates: ...

    @staticmethod
    @abstractmethod
    def numbers(num_draws: int, outputs: int) -> int:
        """Return D, how many numbers are kept of a row."""

    @classmethod
    @abstractmethod
    def work_bytes(cls, num_draws: int, outputs: int, k: int) -> int:
        """Return about how many bytes a choice of k rows takes besides its candidates."""

    @property
    @abstractmethod
    def levels(self) -> int:
        """How many kinds of bounds there are, 1 or more: each is nearer to the gains, and more
        work."""

    @abstractmethod
    def at_once(self, level: int) -> int:
        """Return of how many rows bounds of a level take some milliseconds."""

    @abstractmethod
    def gains(self, rows: Rows) -> Gains: ...

    @abstractmethod
    def bounds(self, rows: Rows, level: int) -> Gains:
        """Return what some rows would gain now at most."""

    @abstractmethod
    def choose(self, row: int) -> None:
        """Add a row to those chosen; it may be one that is there already."""


class BatchBald(JointScore):
    """The mutual information of labels and draws.

    With m(s) the probability of a configuration s of chosen labels and W[s, k] that of draw k given
    s, a row gains sum_s m(s) H(y_n | s) - mean_k H(y_n | k), where p(c | s) = sum_k W[s, k] p_k(c)
    is one product of matrices, in float64. Bounds are the same by BLAS in float32, plus what
    rounding can make of it; and with far less work, that of configurations merged whose most
    probable draws are the same, since entropy is concave (Jensen).

    Configurations are counted while there are at most `MOST_CONFIGURATIONS`; then as many are
    sampled, stratified by draw, and from there each is followed: under its own draw it gets a label
    of every row chosen. The same samples, keyed by the seed, judge all rows, so what they are wrong
    by is alike; that no row gains more later is then true but for sampling.
    """

    def __init__(self, candidates: Candidates, num_draws: int, seed: int) -> None:
        super().__init__(candidates, num_draws, seed)
        self._most = max(1, min(MOST_CONFIGURATIONS, JOINT_NUMBERS // num_draws))
        # of each sampled configuration; None: all are counted
        self._draw_S: Int64[np.ndarray, "S"] | None = None
        self._rng = np.random.default_rng(seed)
        self._set(np.full((1, num_draws), 1.0 / num_draws), np.ones(1))

    @staticmethod
    def of(samples: Float[np.ndarray, "K N C"]) -> Candidates:
        said_N_C_K = samples.transpose(1, 2, 0).astype(np.float32, order="C")
        said_N_C_K[said_N_C_K < LEAST_KEPT] = 0.0
        probs_N_C_K = said_N_C_K.astype(np.float64)
        own = _entropies(probs_N_C_K).mean(axis=-1)
        gain = np.maximum(_entropies(probs_N_C_K.mean(axis=-1)) - own, 0.0)
        return Candidates(gain, own, said_N_C_K.reshape(len(said_N_C_K), -1))

    @staticmethod
    def numbers(num_draws: int, outputs: int) -> int:
        return num_draws * outputs

    @classmethod
    def work_bytes(cls, num_draws: int, outputs: int, k: int) -> int:
        most = min(MOST_CONFIGURATIONS, JOINT_NUMBERS // num_draws + 1)
        configurations = min(most, outputs ** min(k, 32))
        return 6 * 8 * configurations * max(num_draws, outputs) + 4 * 8 * NUMBERS_AT_ONCE

    @property
    def is_exact(self) -> bool:
        return self._draw_S is None

    @property
    def levels(self) -> int:
        return len(self._rough)

    def at_once(self, level: int) -> int:
        return max(1, NUMBERS_AT_ONCE // (self._classes * max(self._rough[level][0].shape)))

    @property
    def _classes(self) -> int:
        return self.candidates.said.shape[1] // self.num_draws

    def gains(self, rows: Rows) -> Gains:
        return np.maximum(self._gains(rows, self._weights_S_K, self._mass_S), 0.0)

    def bounds(self, rows: Rows, level: int) -> Gains:
        # Of sums over K terms, none negative, and of pairwise ones; an entropy moves by |1 + log p|
        # times as much.
        rounding = (
            float(np.finfo(np.float32).eps)
            * (self.num_draws / 2 + 32)
            * (1.0 + np.log(self._classes))
        )
        return np.maximum(self._gains(rows, *self._rough[level]), 0.0) + rounding

    def _gains(
        self, rows: Rows, weights_S_K: Float[np.ndarray, "S K"], mass_S: Float[np.ndarray, "S"]
    ) -> Gains:
        said_nC_K = self.candidates.said[rows].reshape(-1, self.num_draws)
        if weights_S_K.dtype == np.float64:
            probs_nC_S = _products(said_nC_K.astype(np.float64), weights_S_K)
        else:
            probs_nC_S = said_nC_K @ weights_S_K.T
        terms_nC_S = np.log(np.maximum(probs_nC_S, weights_S_K.dtype.type(LEAST_LABEL)))
        terms_nC_S *= probs_nC_S
        terms_nC_S *= mass_S
        entropy_n = -terms_nC_S.sum(axis=1).reshape(len(rows), -1).sum(axis=1, dtype=np.float64)
        return entropy_n - self.candidates.own[rows]

    def choose(self, row: int) -> None:
        probs_C_K = self.candidates.said[row].reshape(-1, self.num_draws).astype(np.float64)
        if self._draw_S is None:
            mass_S_C = _products(self._weights_S_K, probs_C_K) * self._mass_S[:, None]
            s, c = np.nonzero(mass_S_C > LEAST_MASS)
            if len(s) <= self._most:
                self._set(self._weights_S_K[s] * probs_C_K[c], mass_S_C[s, c])
                return
            self._draw_S, s = self._sample()
            self._set(self._weights_S_K[s], np.full(len(s), 1.0 / len(s)))
        label_S = self._labels(self._draw_S, probs_C_K)
        self._set(self._weights_S_K * probs_C_K[label_S], self._mass_S)

    def _set(
        self, weights_S_K: Float64[np.ndarray, "S K"], mass_S: Float64[np.ndarray, "S"]
    ) -> None:
        """Set the configurations' probabilities, and those of draws given each, which need not add
        up to 1 yet."""
        total_S_1 = weights_S_K.sum(axis=1, keepdims=True)
        weights_S_K = weights_S_K / np.maximum(total_S_1, LEAST_PROBABILITY)
        self._weights_S_K, self._mass_S = weights_S_K, mass_S
        merged = [_merge(weights_S_K, mass_S, draws) for draws in DRAWS_ALIKE]
        few = [level for level in merged if len(level[1]) * TIMES_FEWER <= len(mass_S)]
        levels = (*few, (weights_S_K, mass_S))
        self._rough = [(_rough(weights), _rough(mass)) for weights, mass in levels]

    def _sample(self) -> tuple[Int64[np.ndarray, "T"], Int64[np.ndarray, "T"]]:
        """Return samples of draws and configurations: as many of each draw, as they are spread
        evenly over all."""
        cumulative = np.cumsum((self._weights_S_K * self._mass_S[:, None]).T)  # draw by draw
        places = (np.arange(self._most) + self._rng.random()) / self._most
        found = np.searchsorted(cumulative, places * cumulative[-1], "right")
        draw, s = np.divmod(np.minimum(found, len(cumulative) - 1), len(self._weights_S_K))
        return draw, s

    def _labels(
        self, draw_S: Int64[np.ndarray, "S"], probs_C_K: Float64[np.ndarray, "C K"]
    ) -> Int64[np.ndarray, "S"]:
        cumulative_S_C = np.cumsum(probs_C_K, axis=0).T[draw_S]
        evenly = self._rng.permutation(len(draw_S)) + self._rng.random()
        places = evenly / len(draw_S)
        is_below = cumulative_S_C[:, :-1] <= (places * cumulative_S_C[:, -1])[:, None]
        label_S: np.ndarray = is_below.sum(axis=1)
        return label_S


class MaxDet(JointScore):
    """The determinant of the draws' covariance of rows, noise on its diagonal.

    Rows are vectors of D numbers whose products are covariances over draws. For chosen rows with
    vectors A and noise on a diagonal, V = L^-1 A with L the Cholesky factor of A A' + noise; a row
    a then has |a|^2 - |V a|^2 left.
    """

    def __init__(self, candidates: Candidates, num_draws: int, seed: int) -> None:
        super().__init__(candidates, num_draws, seed)
        self._directions = np.zeros((0, candidates.said.shape[1]))  # V

    @classmethod
    def work_bytes(cls, num_draws: int, outputs: int, k: int) -> int:
        return 2 * 8 * k * cls.numbers(num_draws, outputs) + 4 * 8 * NUMBERS_AT_ONCE

    @property
    def levels(self) -> int:
        return 1

    def at_once(self, level: int) -> int:  # noqa: ARG002
        return max(1, NUMBERS_AT_ONCE // (self.candidates.said.shape[1] + len(self._directions)))

    def gains(self, rows: Rows) -> Gains:
        vectors = self.candidates.said[rows].astype(np.float64)
        left = _left(vectors, _products(vectors, self._directions))
        return _information(left, self.candidates.own[rows])

    def bounds(self, rows: Rows, level: int) -> Gains:  # noqa: ARG002
        """Return the gains by BLAS, and add what their rounding may be."""
        vectors = self.candidates.said[rows].astype(np.float64)
        left = _left(vectors, vectors @ self._directions.T)
        return _information(left, self.candidates.own[rows]) + ROUNDING

    def choose(self, row: int) -> None:
        vector = self.candidates.said[row].astype(np.float64)
        products = _products(vector[None], self._directions)
        (left,) = _left(vector[None], products)
        vector -= _products(products, self._directions.T)[0]
        vector /= np.sqrt(left + self.candidates.own[row])
        self._directions = np.vstack([self._directions, vector])


class ClassMaxDet(MaxDet):
    """Of class probabilities: covariances are summed over classes, and noise is that of a label
    under each draw."""

    @staticmethod
    def of(samples: Float[np.ndarray, "K N C"]) -> Candidates:
        probs_N_C_K = samples.transpose(1, 2, 0).astype(np.float64, order="C")
        variance = 1.0 - np.square(probs_N_C_K).sum(axis=1).mean(axis=-1)
        return _centre(probs_N_C_K, np.maximum(variance, 0.0) + LEAST_NOISE)

    @staticmethod
    def numbers(num_draws: int, outputs: int) -> int:
        return num_draws * outputs


class TargetMaxDet(MaxDet):
    """Of a regression's means: 1/2 log det(I + Cov / noise) is their joint entropy, as far as noisy
    labels tell."""

    @staticmethod
    def of(samples: Float[np.ndarray, "K N 2"]) -> Candidates:
        """Keep the draws' means less their mean, in standard deviations of the row's noise: no unit
        overflows."""
        mean_N_K, std_N_K = samples.transpose(2, 1, 0).astype(np.float64, order="C")
        noise_std_N = np.sqrt(np.square(std_N_K).mean(axis=-1))
        least_N = LEAST_NOISE * mean_N_K.std(axis=-1) + LEAST_PROBABILITY
        noise_std_N = np.maximum(noise_std_N, least_N)
        return _centre((mean_N_K / noise_std_N[:, None])[:, None], np.ones(len(mean_N_K)))

    @staticmethod
    def numbers(num_draws: int, outputs: int) -> int:  # noqa: ARG004
        return num_draws


def _products(
    a: Float64[np.ndarray, "n k"], b: Float64[np.ndarray, "m k"]
) -> Float64[np.ndarray, "n m"]:
    """Return a b'. BLAS rounds otherwise with another number of threads, and gains are replayed bit
    for bit in processes that have other numbers."""
    return np.einsum("nk,mk->nm", a, b)


def _left(
    vectors: Float64[np.ndarray, "n D"], products: Float64[np.ndarray, "n S"]
) -> Float64[np.ndarray, "n"]:
    left = np.einsum("nd,nd->n", vectors, vectors) - np.einsum("ns,ns->n", products, products)
    return np.maximum(left, 0.0)


def _merge(
    weights_S_K: Float64[np.ndarray, "S K"], mass_S: Float64[np.ndarray, "S"], draws: int
) -> tuple[Float64[np.ndarray, "M K"], Float64[np.ndarray, "M"]]:
    """Return configurations with those merged that have the same most probable draws, in order."""
    draws = min(draws, weights_S_K.shape[1])
    most_S_D = np.argsort(-weights_S_K, axis=1)[:, :draws]
    order = np.lexsort(most_S_D.T)
    sorted_S_D = most_S_D[order]
    starts = np.flatnonzero(np.r_[True, (sorted_S_D[1:] != sorted_S_D[:-1]).any(axis=1)])
    mass_M = np.add.reduceat(mass_S[order], starts)
    joint_M_K = np.add.reduceat((weights_S_K * mass_S[:, None])[order], starts)
    return joint_M_K / np.maximum(mass_M, LEAST_PROBABILITY)[:, None], mass_M


def _rough(probs: Float64[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Return probabilities in float32, 0 for the smallest."""
    rough: np.ndarray = np.where(probs < LEAST_KEPT, 0.0, probs).astype(np.float32)
    return rough


def _centre(
    values_N_C_K: Float64[np.ndarray, "N C K"], noise: Float64[np.ndarray, "N"]
) -> Candidates:
    num_draws = values_N_C_K.shape[-1]
    vectors = values_N_C_K - values_N_C_K.mean(axis=-1, keepdims=True)
    vectors /= np.sqrt(num_draws)
    said = vectors.reshape(len(vectors), -1).astype(np.float32)
    variance = np.square(said, dtype=np.float64).sum(axis=1)
    return Candidates(_information(variance, noise), noise, said)


def _information(
    variance: Float64[np.ndarray, "N"], noise: Float64[np.ndarray, "N"]
) -> Float64[np.ndarray, "N"]:
    information: np.ndarray = 0.5 * np.log1p(variance / noise)
    return information


def _entropies(probs: Float64[np.ndarray, "N C *K"]) -> Float64[np.ndarray, "N *K"]:
    entropies: np.ndarray = -(probs * np.log(np.maximum(probs, LEAST_PROBABILITY))).sum(axis=1)
    return entropies


def greedy(
    joint: JointScore,
    copies: Int64[np.ndarray, "N"],
    order: Int64[np.ndarray, "N"],
    k: int,
    pause: Pause = no_pause,
) -> list[tuple[int, float]]:
    """Choose rows one by one, each the one that gains most then.

    Args:
        joint: none is chosen yet.
        copies: how often each row may be chosen: again only when all others are.
        order: of all rows, which decides ties.
        k: how many to choose, at most the sum of `copies`.

    Returns:
        the rows in the order of choice, and what each gained.
    """
    bound, left = joint.candidates.gain.copy(), copies.copy()
    chosen: list[tuple[int, float]] = []
    is_chosen = np.zeros(len(bound), dtype=bool)
    while len(chosen) < k:
        open_ = order[((left > 0) & ~is_chosen)[order]]
        if len(open_) == 0:
            open_ = order[(left > 0)[order]]
        first = int(open_[bound[open_].argmax()])
        best = _largest(joint, bound, open_, pause) if chosen else first
        chosen.append((best, float(bound[best])))
        is_chosen[best] = True
        left[best] -= 1
        if len(chosen) < k:
            joint.choose(best)
        pause()
    return chosen


def _largest(joint: JointScore, bound: Float64[np.ndarray, "N"], open_: Rows, pause: Pause) -> int:
    """Return which of some rows gains most now, the first of several; the bounds of those computed
    become smaller."""
    places = np.argsort(-bound[open_], kind="stable")
    best, most, start, size = -1, -np.inf, 0, FIRST_AT_ONCE
    while start < len(places) and bound[open_[places[start]]] > most:
        here = places[start : start + min(size, joint.at_once(0))]
        start, size = start + len(here), 2 * size
        for level in range(joint.levels):
            here = here[bound[open_[here]] > most]
            at_once = joint.at_once(level)
            for i in range(0, len(here), at_once):
                rows = open_[here[i : i + at_once]]
                bound[rows] = np.minimum(bound[rows], joint.bounds(rows, level))
                pause()
        for place in here[np.argsort(-bound[open_[here]], kind="stable")].tolist():
            row = int(open_[place])
            if bound[row] <= most:
                break
            (bound[row],) = joint.gains(np.array([row]))
            if bound[row] > most or (bound[row] == most and place < best):
                best, most = place, float(bound[row])
            pause()
    return int(open_[best])
