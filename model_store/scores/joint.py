"""BatchBALD and greedy batch selection.

Axes: K draws, N rows, C classes, S configurations of the labels of selected rows. Information is in
nats. A row's *gain* is the information in its label beyond the labels of rows selected earlier,

    I(y_S, y_n; w) - I(y_S; w)

the mutual information of labels and draws; for one row this is BALD (Kirsch, van Amersfoort and Gal
2019, "BatchBALD"). It is a plug-in estimate from K draws, limited to log K nats. Like BALD, it is
too small with few draws, and the bias grows with the batch.

The gain is submodular: it never grows as more rows are selected. So an old gain bounds all later
gains, and the search recomputes only rows whose bound exceeds the best gain (Minoux 1978,
"Accelerated greedy algorithms"). The result equals that of a search that computes all gains.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from model_store.types import Pause, no_pause

MAX_CONFIGURATIONS = 10_000  # enumerated; a larger number is sampled
MAX_JOINT_NUMBERS = 1_000_000  # configurations x draws: 8 MB
# All configurations with smaller probabilities change gains by less than 1e-10 nats.
MIN_MASS = 1e-16
STEP_NUMBERS = 1 << 18  # take some milliseconds
MIN_STEP = 8  # rows in a search's first step; later steps double
MIN_PROBABILITY = 1e-300  # 0 log 0 = 0
MIN_LABEL_PROBABILITY = 1e-37  # 0 log 0 = 0 in float32
# Smaller probabilities become 0, because products with subnormal numbers are slow.
MIN_FLOAT32_PROBABILITY = 1e-12

Rows = Int64[np.ndarray, "n"]
Gains = Float64[np.ndarray, "n"]
Weights = Float64[np.ndarray, "S K"]
Labels = Int64[np.ndarray, "S"]


@dataclass(frozen=True, eq=False)
class Candidates:
    gain: Float64[np.ndarray, "N"]  # without other rows
    noise: Float64[np.ndarray, "N"]  # expected entropy
    outputs: Float32[np.ndarray, "N D"]  # each draw's probabilities, D = C K


class BatchBald:
    """The mutual information between labels and draws.

    Let m(s) be the probability of a configuration s of selected labels, and W[s, k] the probability
    of draw k given s. The gain of row n is sum_s m(s) H(y_n | s) - mean_k H(y_n | k). The
    probabilities p(c | s) = sum_k W[s, k] p_k(c) are one matrix product in float64. Entropy is
    concave, so merging configurations with the same most probable draw gives a bound (Jensen's
    inequality). Bounds use float32, plus the largest rounding error.

    Up to `MAX_CONFIGURATIONS` configurations are enumerated. Above this number, the same number of
    configurations is sampled, stratified by draw, and later labels are sampled from the draw of
    each configuration. The seed determines the samples. All rows share them, so their errors are
    similar. Gains still never grow, except by sampling error.
    """

    def __init__(self, candidates: Candidates, num_draws: int, seed: int) -> None:
        self.candidates = candidates
        self.num_draws = num_draws
        self._max_configurations = max(1, min(MAX_CONFIGURATIONS, MAX_JOINT_NUMBERS // num_draws))
        # Draw of each sampled configuration; None while configurations are enumerated
        self._draw_S: Labels | None = None
        self._rng = np.random.default_rng(seed)
        self._set(np.full((1, num_draws), 1.0 / num_draws), np.ones(1))

    @staticmethod
    def from_probs(probs: Float32[np.ndarray, "K N C"]) -> Candidates:
        outputs_N_C_K = probs.transpose(1, 2, 0).astype(np.float32, order="C")
        outputs_N_C_K[outputs_N_C_K < MIN_FLOAT32_PROBABILITY] = 0.0
        probs_N_C_K = outputs_N_C_K.astype(np.float64)
        noise = _entropies(probs_N_C_K).mean(axis=-1)
        gain = np.maximum(_entropies(probs_N_C_K.mean(axis=-1)) - noise, 0.0)
        return Candidates(gain, noise, outputs_N_C_K.reshape(len(outputs_N_C_K), -1))

    @staticmethod
    def work_bytes(num_draws: int, classes: int, k: int) -> int:
        """Estimate the memory needed to select k rows, not counting the candidates."""
        limit = min(MAX_CONFIGURATIONS, MAX_JOINT_NUMBERS // num_draws + 1)
        configurations = min(limit, classes ** min(k, 32))
        return 6 * 8 * configurations * max(num_draws, classes) + 4 * 8 * STEP_NUMBERS

    @property
    def _classes(self) -> int:
        return self.candidates.outputs.shape[1] // self.num_draws

    def gains(self, rows: Rows) -> Gains:
        return np.maximum(self._gains(rows, self._weights_S_K, self._mass_S), 0.0)

    def bound(self, rows: Rows) -> Gains:
        """Compute upper bounds on the gains, faster than the gains themselves."""
        # Errors of a sum over K positive terms and of pairwise sums, times the derivative
        # |1 + log p| of the entropy
        factor = (self.num_draws / 2 + 32) * (1.0 + np.log(self._classes))
        rounding = float(np.finfo(np.float32).eps) * factor
        return np.maximum(self._gains(rows, *self._merged), 0.0) + rounding

    def _gains(
        self, rows: Rows, weights_S_K: Float[np.ndarray, "S K"], mass_S: Float[np.ndarray, "S"]
    ) -> Gains:
        outputs_nC_K = self.candidates.outputs[rows].reshape(-1, self.num_draws)
        if weights_S_K.dtype == np.float64:
            probs_nC_S = _products(outputs_nC_K.astype(np.float64), weights_S_K)
        else:
            probs_nC_S = outputs_nC_K @ weights_S_K.T
        terms_nC_S = np.log(np.maximum(probs_nC_S, weights_S_K.dtype.type(MIN_LABEL_PROBABILITY)))
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

    def _set(self, weights_S_K: Weights, mass_S: Float64[np.ndarray, "S"]) -> None:
        """Set each configuration's probability and its (unnormalised) draw weights."""
        total_S_1 = weights_S_K.sum(axis=1, keepdims=True)
        self._weights_S_K = weights_S_K / np.maximum(total_S_1, MIN_PROBABILITY)
        self._mass_S = mass_S
        self._merged = _merge(self._weights_S_K, mass_S)
        # Rows for which `bound` takes some milliseconds
        self.step = max(1, STEP_NUMBERS // (self._classes * self.num_draws))

    def _sample(self) -> tuple[Int64[np.ndarray, "T"], Int64[np.ndarray, "T"]]:
        cumulative = np.cumsum((self._weights_S_K * self._mass_S[:, None]).T)
        count = self._max_configurations
        quantiles = (np.arange(count) + self._rng.random()) / count
        index = np.searchsorted(cumulative, quantiles * cumulative[-1], "right")
        draw, s = np.divmod(np.minimum(index, len(cumulative) - 1), len(self._weights_S_K))
        return draw, s

    def _labels(self, draw_S: Labels, probs_C_K: Float64[np.ndarray, "C K"]) -> Labels:
        cumulative_S_C = np.cumsum(probs_C_K, axis=0).T[draw_S]
        quantile_S = (self._rng.permutation(len(draw_S)) + self._rng.random()) / len(draw_S)
        is_below = cumulative_S_C[:, :-1] <= (quantile_S * cumulative_S_C[:, -1])[:, None]
        return is_below.sum(axis=1)


def _products(
    a: Float64[np.ndarray, "n k"], b: Float64[np.ndarray, "m k"]
) -> Float64[np.ndarray, "n m"]:
    """Compute a b'. Unlike with BLAS, results do not depend on the number of threads."""
    return np.einsum("nk,mk->nm", a, b)


def _merge(
    weights_S_K: Weights, mass_S: Float64[np.ndarray, "S"]
) -> tuple[Float32[np.ndarray, "M K"], Float32[np.ndarray, "M"]]:
    draw_S = weights_S_K.argmax(axis=1)
    order = np.argsort(draw_S, kind="stable")
    starts = np.flatnonzero(np.diff(draw_S[order], prepend=-1))
    mass_M = np.add.reduceat(mass_S[order], starts)
    joint_M_K = np.add.reduceat((weights_S_K * mass_S[:, None])[order], starts)
    weights_M_K = joint_M_K / np.maximum(mass_M, MIN_PROBABILITY)[:, None]
    for probs in (weights_M_K, mass_M):
        probs[probs < MIN_FLOAT32_PROBABILITY] = 0.0
    return weights_M_K.astype(np.float32), mass_M.astype(np.float32)


def _entropies(probs: Float64[np.ndarray, "N C *K"]) -> Float64[np.ndarray, "N *K"]:
    return -(probs * np.log(np.maximum(probs, MIN_PROBABILITY))).sum(axis=1)


def greedy(
    joint: BatchBald, order: Int64[np.ndarray, "N"], k: int, pause: Pause = no_pause
) -> list[tuple[int, float]]:
    """Greedily select k rows by their gain given the previously selected rows.

    Among rows with equal gains, the first in `order`, which contains all rows, is selected. Returns
    the rows in the order of selection, and their gains.
    """
    bound = joint.candidates.gain.copy()
    selection: list[tuple[int, float]] = []
    is_selected = np.zeros(len(bound), dtype=bool)
    while len(selection) < k:
        rows = order[~is_selected[order]]
        first = int(rows[bound[rows].argmax()])
        best = _find_best(joint, bound, rows, pause) if selection else first
        selection.append((best, float(bound[best])))
        is_selected[best] = True
        if len(selection) < k:
            joint.choose(best)
        pause()
    return selection


def _find_best(joint: BatchBald, bound: Float64[np.ndarray, "N"], rows: Rows, pause: Pause) -> int:
    """Find the first row with the largest gain, tightening `bound` in place."""
    order = np.argsort(-bound[rows], kind="stable")
    best, best_gain, start, size = -1, -np.inf, 0, MIN_STEP
    while start < len(order) and bound[rows[order[start]]] > best_gain:
        step = order[start : start + min(size, joint.step)]
        start, size = start + len(step), 2 * size
        bound[rows[step]] = np.minimum(bound[rows[step]], joint.bound(rows[step]))
        pause()
        for index in step[np.argsort(-bound[rows[step]], kind="stable")].tolist():
            row = int(rows[index])
            if bound[row] <= best_gain:
                break
            (bound[row],) = joint.gains(np.array([row]))
            if bound[row] > best_gain or (bound[row] == best_gain and index < best):
                best, best_gain = index, float(bound[row])
            pause()
    return int(rows[best])
