"""Joint scores: the information in the labels of several rows, and the greedy choice of a batch.

Axes: K draws, N rows, C classes, S configurations of the labels of chosen rows. Information is in
nats. A row's *gain* is what its label tells in addition to the labels of the rows chosen before it.
The scores are submodular: a row's gain never grows while rows are chosen. So a gain that was
computed once bounds all later ones, and only rows whose bound exceeds the best gain are computed
again (Minoux 1978, "Accelerated greedy algorithms"). The choice is the same as in a greedy search
that computes all gains.

    BatchBald     I(y_S, y_n; w) - I(y_S; w)    mutual information of labels and draws; for one row
                  this is BALD (Kirsch, van Amersfoort and Gal 2019, "BatchBALD")
    MaxDet        1/2 log(1 + v / s^2)          with v the row's variance given the chosen rows, and
                  s^2 its noise: the greedy maximum of det(Cov + noise) / det(noise) (Chen, Zhang
                  and Zhou 2018; Holzmüller et al. 2023, "Deep batch active learning for
                  regression")

Both are plug-in estimates from K draws, which can tell at most log K nats apart. With few draws
they are too small, as BALD is, and more so for larger batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from model_store.types import Pause, no_pause

MAX_CONFIGURATIONS = 10_000  # that are all counted; beyond this number they are sampled
MAX_JOINT_NUMBERS = 1_000_000  # configurations x draws: 8 MB
# Probability below which a configuration is dropped: together they change no gain by 1e-10 nats
MIN_MASS = 1e-16
NUMBERS_AT_ONCE = 1 << 18  # computed in one step of some milliseconds
MIN_MERGED = 3  # configurations for each merged one, otherwise merging is not worth it
MIN_STEP = 8  # rows in the first step of a search; each step has twice as many as the last
ROUNDING = 1e-9  # nats, for gains in float64
LEAST_NOISE = 0.01  # of a class label: draws that are all certain have a bounded weight
LEAST_PROBABILITY = 1e-300  # so that 0 log 0 is 0
LEAST_LABEL = 1e-37  # the same in float32
# Smaller probabilities become 0: products of three float32 numbers stay normal, and thus fast
LEAST_KEPT = 1e-12

Rows = Int64[np.ndarray, "n"]
Gains = Float64[np.ndarray, "n"]


@dataclass(frozen=True, eq=False)
class Candidates:
    gain: Float64[np.ndarray, "N"]  # of each row alone
    noise: Float64[np.ndarray, "N"]  # the expected entropy, or the noise variance
    outputs: Float32[np.ndarray, "N D"]  # probabilities or centred means under each draw


@dataclass(frozen=True, eq=False)
class Bound:
    """An upper bound of gains by BLAS, which is fast but rounds differently on each machine."""

    compute: Callable[[Rows], Gains]
    step: int  # rows that take some milliseconds


class JointScore(ABC):
    """The gains of rows given the rows chosen so far; none at first."""

    def __init__(self, candidates: Candidates, num_draws: int, seed: int) -> None:
        self.candidates = candidates
        self.num_draws = num_draws
        self.seed = seed

    @staticmethod
    @abstractmethod
    def from_samples(samples: Float[np.ndarray, "K N C"]) -> Candidates: ...

    @staticmethod
    @abstractmethod
    def numbers(num_draws: int, outputs: int) -> int:
        """Return D, the numbers kept for a row."""

    @classmethod
    @abstractmethod
    def work_bytes(cls, num_draws: int, outputs: int, k: int) -> int:
        """Return about how many bytes a choice of k rows takes in addition to its candidates."""

    @abstractmethod
    def gains(self, rows: Rows) -> Gains: ...

    @property
    @abstractmethod
    def bounds(self) -> Sequence[Bound]:
        """Upper bounds of the gains, the cheapest first."""

    @abstractmethod
    def choose(self, row: int) -> None:
        """Add a row to the chosen ones, possibly for a second time."""


class BatchBald(JointScore):
    """The mutual information of labels and draws.

    With m(s) the probability of a configuration s of chosen labels and W[s, k] that of draw k given
    s, a row gains sum_s m(s) H(y_n | s) - mean_k H(y_n | k), where p(c | s) = sum_k W[s, k] p_k(c)
    is one matrix product, in float64. Bounds use float32, plus the largest rounding error. Entropy
    is concave, so configurations with the same most probable draw can be merged into a cheaper
    bound (Jensen's inequality).

    Up to `MAX_CONFIGURATIONS` configurations are all counted. Beyond that number as many are
    sampled, stratified by draw, and later labels are drawn from each sample's own draw. All rows
    are judged by the same samples, which the seed determines, so their errors are alike. Up to the
    sampling error it stays true that no gain grows.
    """

    def __init__(self, candidates: Candidates, num_draws: int, seed: int) -> None:
        super().__init__(candidates, num_draws, seed)
        self._max_configurations = max(1, min(MAX_CONFIGURATIONS, MAX_JOINT_NUMBERS // num_draws))
        # Of each sampled configuration; None while all are counted
        self._draw_S: Int64[np.ndarray, "S"] | None = None
        self._rng = np.random.default_rng(seed)
        self._set(np.full((1, num_draws), 1.0 / num_draws), np.ones(1))

    @staticmethod
    def from_samples(samples: Float[np.ndarray, "K N C"]) -> Candidates:
        outputs_N_C_K = samples.transpose(1, 2, 0).astype(np.float32, order="C")
        outputs_N_C_K[outputs_N_C_K < LEAST_KEPT] = 0.0
        probs_N_C_K = outputs_N_C_K.astype(np.float64)
        noise = _entropies(probs_N_C_K).mean(axis=-1)
        gain = np.maximum(_entropies(probs_N_C_K.mean(axis=-1)) - noise, 0.0)
        return Candidates(gain, noise, outputs_N_C_K.reshape(len(outputs_N_C_K), -1))

    @staticmethod
    def numbers(num_draws: int, outputs: int) -> int:
        return num_draws * outputs

    @classmethod
    def work_bytes(cls, num_draws: int, outputs: int, k: int) -> int:
        limit = min(MAX_CONFIGURATIONS, MAX_JOINT_NUMBERS // num_draws + 1)
        configurations = min(limit, outputs ** min(k, 32))
        return 6 * 8 * configurations * max(num_draws, outputs) + 4 * 8 * NUMBERS_AT_ONCE

    @property
    def is_exact(self) -> bool:
        return self._draw_S is None

    @property
    def _classes(self) -> int:
        return self.candidates.outputs.shape[1] // self.num_draws

    def gains(self, rows: Rows) -> Gains:
        return np.maximum(self._gains(rows, self._weights_S_K, self._mass_S), 0.0)

    @property
    def bounds(self) -> Sequence[Bound]:
        return self._bounds

    def _bound(
        self, weights_S_K: Float64[np.ndarray, "S K"], mass_S: Float64[np.ndarray, "S"]
    ) -> Bound:
        rough = _rough(weights_S_K), _rough(mass_S)
        # Errors of a sum over K positive terms and of pairwise sums; an entropy changes by
        # |1 + log p| times as much
        rounding = (
            float(np.finfo(np.float32).eps)
            * (self.num_draws / 2 + 32)
            * (1.0 + np.log(self._classes))
        )
        step = max(1, NUMBERS_AT_ONCE // (self._classes * max(weights_S_K.shape)))
        return Bound(lambda rows: np.maximum(self._gains(rows, *rough), 0.0) + rounding, step)

    def _gains(
        self, rows: Rows, weights_S_K: Float[np.ndarray, "S K"], mass_S: Float[np.ndarray, "S"]
    ) -> Gains:
        outputs_nC_K = self.candidates.outputs[rows].reshape(-1, self.num_draws)
        if weights_S_K.dtype == np.float64:
            probs_nC_S = _products(outputs_nC_K.astype(np.float64), weights_S_K)
        else:
            probs_nC_S = outputs_nC_K @ weights_S_K.T
        terms_nC_S = np.log(np.maximum(probs_nC_S, weights_S_K.dtype.type(LEAST_LABEL)))
        terms_nC_S *= probs_nC_S
        terms_nC_S *= mass_S
        entropy_n = -terms_nC_S.sum(axis=1).reshape(len(rows), -1).sum(axis=1, dtype=np.float64)
        return entropy_n - self.candidates.noise[rows]

    def choose(self, row: int) -> None:
        probs_C_K = self.candidates.outputs[row].reshape(-1, self.num_draws).astype(np.float64)
        if self._draw_S is None:
            mass_S_C = _products(self._weights_S_K, probs_C_K) * self._mass_S[:, None]
            s, c = np.nonzero(mass_S_C > MIN_MASS)
            if len(s) <= self._max_configurations:
                self._set(self._weights_S_K[s] * probs_C_K[c], mass_S_C[s, c])
                return
            self._draw_S, s = self._sample()
            self._set(self._weights_S_K[s], np.full(len(s), 1.0 / len(s)))
        label_S = self._labels(self._draw_S, probs_C_K)
        self._set(self._weights_S_K * probs_C_K[label_S], self._mass_S)

    def _set(
        self, weights_S_K: Float64[np.ndarray, "S K"], mass_S: Float64[np.ndarray, "S"]
    ) -> None:
        """Set the configurations' probabilities, and (unnormalised) those of draws given each."""
        total_S_1 = weights_S_K.sum(axis=1, keepdims=True)
        self._weights_S_K = weights_S_K / np.maximum(total_S_1, LEAST_PROBABILITY)
        self._mass_S = mass_S
        self._bounds = [self._bound(self._weights_S_K, mass_S)]
        merged = _merge(self._weights_S_K, mass_S)
        if len(merged[1]) * MIN_MERGED <= len(mass_S):
            self._bounds.insert(0, self._bound(*merged))

    def _sample(self) -> tuple[Int64[np.ndarray, "T"], Int64[np.ndarray, "T"]]:
        """Sample draws and configurations systematically, draw by draw."""
        cumulative = np.cumsum((self._weights_S_K * self._mass_S[:, None]).T)
        count = self._max_configurations
        places = (np.arange(count) + self._rng.random()) / count
        index = np.searchsorted(cumulative, places * cumulative[-1], "right")
        draw, s = np.divmod(np.minimum(index, len(cumulative) - 1), len(self._weights_S_K))
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

    A row is a vector of D numbers; products of rows are covariances over draws. With A the chosen
    rows and L the Cholesky factor of A A' + noise, V = L^-1 A, and a row a has the variance
    |a|^2 - |V a|^2 given the chosen rows.
    """

    def __init__(self, candidates: Candidates, num_draws: int, seed: int) -> None:
        super().__init__(candidates, num_draws, seed)
        self._directions = np.zeros((0, candidates.outputs.shape[1]))  # V

    @classmethod
    def work_bytes(cls, num_draws: int, outputs: int, k: int) -> int:
        return 2 * 8 * k * cls.numbers(num_draws, outputs) + 4 * 8 * NUMBERS_AT_ONCE

    def gains(self, rows: Rows) -> Gains:
        vectors = self.candidates.outputs[rows].astype(np.float64)
        left = _left(vectors, _products(vectors, self._directions))
        return _information(left, self.candidates.noise[rows])

    @property
    def bounds(self) -> Sequence[Bound]:
        def compute(rows: Rows) -> Gains:
            vectors = self.candidates.outputs[rows].astype(np.float64)
            left = _left(vectors, vectors @ self._directions.T)
            return _information(left, self.candidates.noise[rows]) + ROUNDING

        numbers = self.candidates.outputs.shape[1] + len(self._directions)
        return [Bound(compute, max(1, NUMBERS_AT_ONCE // numbers))]

    def choose(self, row: int) -> None:
        vector = self.candidates.outputs[row].astype(np.float64)
        products = _products(vector[None], self._directions)
        (left,) = _left(vector[None], products)
        vector -= _products(products, self._directions.T)[0]
        vector /= np.sqrt(left + self.candidates.noise[row])
        self._directions = np.vstack([self._directions, vector])


class ClassMaxDet(MaxDet):
    """For class probabilities: covariances are summed over classes, and the noise is a label's."""

    @staticmethod
    def from_samples(samples: Float[np.ndarray, "K N C"]) -> Candidates:
        probs_N_C_K = samples.transpose(1, 2, 0).astype(np.float64, order="C")
        variance = 1.0 - np.square(probs_N_C_K).sum(axis=1).mean(axis=-1)
        return _centre(probs_N_C_K, np.maximum(variance, 0.0) + LEAST_NOISE)

    @staticmethod
    def numbers(num_draws: int, outputs: int) -> int:
        return num_draws * outputs


class TargetMaxDet(MaxDet):
    """For regression means: 1/2 log det(I + Cov / noise), their information from noisy labels."""

    @staticmethod
    def from_samples(samples: Float[np.ndarray, "K N 2"]) -> Candidates:
        """Centre the draws' means and scale them by the row's noise, so that no unit overflows."""
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
    """Return a b' with the same bits for any number of threads, unlike BLAS."""
    return np.einsum("nk,mk->nm", a, b)


def _left(
    vectors: Float64[np.ndarray, "n D"], products: Float64[np.ndarray, "n S"]
) -> Float64[np.ndarray, "n"]:
    left = np.einsum("nd,nd->n", vectors, vectors) - np.einsum("ns,ns->n", products, products)
    return np.maximum(left, 0.0)


def _merge(
    weights_S_K: Float64[np.ndarray, "S K"], mass_S: Float64[np.ndarray, "S"]
) -> tuple[Float64[np.ndarray, "M K"], Float64[np.ndarray, "M"]]:
    """Merge configurations that have the same most probable draw."""
    draw_S = weights_S_K.argmax(axis=1)
    order = np.argsort(draw_S, kind="stable")
    starts = np.flatnonzero(np.diff(draw_S[order], prepend=-1))
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
    outputs = vectors.reshape(len(vectors), -1).astype(np.float32)
    variance = np.square(outputs, dtype=np.float64).sum(axis=1)
    return Candidates(_information(variance, noise), noise, outputs)


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
    """Choose rows one by one, each with the largest gain given those before it.

    Args:
        joint: no row is chosen yet.
        copies: how often each row may be chosen; again only after all others.
        order: of all rows, which decides ties.
        k: how many to choose, at most the sum of `copies`.

    Returns:
        the rows in the order of choice, and their gains.
    """
    bound, left = joint.candidates.gain.copy(), copies.copy()
    chosen: list[tuple[int, float]] = []
    is_chosen = np.zeros(len(bound), dtype=bool)
    while len(chosen) < k:
        open_ = order[((left > 0) & ~is_chosen)[order]]
        if len(open_) == 0:
            open_ = order[(left > 0)[order]]
        first = int(open_[bound[open_].argmax()])
        best = _find_best(joint, bound, open_, pause) if chosen else first
        chosen.append((best, float(bound[best])))
        is_chosen[best] = True
        left[best] -= 1
        if len(chosen) < k:
            joint.choose(best)
        pause()
    return chosen


def _find_best(
    joint: JointScore, bound: Float64[np.ndarray, "N"], open_: Rows, pause: Pause
) -> int:
    """Return the first of the open rows with the largest gain, and update `bound`."""
    places = np.argsort(-bound[open_], kind="stable")
    best, best_gain, start, size = -1, -np.inf, 0, MIN_STEP
    while start < len(places) and bound[open_[places[start]]] > best_gain:
        step = places[start : start + min(size, joint.bounds[0].step)]
        start, size = start + len(step), 2 * size
        for upper in joint.bounds:
            step = step[bound[open_[step]] > best_gain]
            for first in range(0, len(step), upper.step):
                rows = open_[step[first : first + upper.step]]
                bound[rows] = np.minimum(bound[rows], upper.compute(rows))
                pause()
        for place in step[np.argsort(-bound[open_[step]], kind="stable")].tolist():
            row = int(open_[place])
            if bound[row] <= best_gain:
                break
            (bound[row],) = joint.gains(np.array([row]))
            if bound[row] > best_gain or (bound[row] == best_gain and place < best):
                best, best_gain = place, float(bound[row])
            pause()
    return int(open_[best])
