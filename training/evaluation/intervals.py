"""Confidence intervals of measured figures, at a level of `LEVEL`, for rows that are independent.

They say how much a figure may change with other rows of the same kind. The version stays the same,
with its calibration.

* A share of rows: Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the
  binomial", 1934. It holds exactly.
* The area under the ROC curve: the wider of two. DeLong et al. 1988, on the scale of log odds; and Newcombe 2006,
  which has a length where no pair is out of order.
* Average precision: Wilson, "Probable inference, the law of succession, and statistical inference", 1927, as of a
  share of the positive rows. It is wider than needed, and always has a length.
* The false-positive rate at a detection rate: order statistics of the positive rows, and Clopper and Pearson at
  both. It holds exactly.
* Anything else: the bootstrap, by figures of `RESAMPLES` samples of the rows with replacement.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, UInt16
from scipy import optimize, stats
from scipy.special import betaincinv, ndtri

from training.seeds import EvaluationStream, generator

LEVEL = 0.95
RESAMPLES = 1000
CHUNK_NUMBERS = 4_000_000  # of resamples x rows at once
EDGE = 1e-12  # how near to 0 and 1 an area under a curve is looked for

Ends = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Resamples:
    """How often each of N rows is in each of R samples of N rows, drawn with replacement."""

    counts: UInt16[np.ndarray, "R N"]

    @classmethod
    def of(cls, rows: int, seed: int, resamples: int = RESAMPLES) -> "Resamples":
        """Draw them; `seed` is that of the evaluation."""
        random = generator(seed, EvaluationStream.RESAMPLES, rows)
        counts = np.empty((resamples, rows), dtype=np.uint16)
        for sample in counts:
            sample[:] = np.bincount(random.integers(rows, size=rows), minlength=rows)
        return cls(counts)

    def values(
        self, figure: Callable[[Float64[np.ndarray, "S N"]], Float64[np.ndarray, "S *shape"]]
    ) -> Float64[np.ndarray, "R *shape"]:
        """Return a figure of each sample."""
        step = max(1, CHUNK_NUMBERS // self.counts.shape[1])
        chunks = (self.counts[start : start + step] for start in range(0, len(self.counts), step))
        return np.concatenate([figure(chunk.astype(np.float64)) for chunk in chunks])


def percentiles(values: Float64[np.ndarray, "R"], level: float = LEVEL) -> Ends:
    """Return the ends of the middle part of resampled figures."""
    low, high = np.quantile(values, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)


def share_interval(hits: int, rows: int, level: float = LEVEL) -> Ends:
    """Return the interval of a share, given how many of the rows it is (Clopper and Pearson
    1934)."""
    tail = (1.0 - level) / 2.0
    low = 0.0 if hits == 0 else float(betaincinv(hits, rows - hits + 1, tail))
    high = 1.0 if hits == rows else float(betaincinv(hits + 1, rows - hits, 1.0 - tail))
    return low, high


def wilson_interval(share: float, rows: int) -> Ends:
    """Return the interval of a share, which need not be of whole rows (Wilson 1927)."""
    z = _normal_quantile()
    centre = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z * np.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows)) / (1 + z * z / rows)
    return min(share, max(0.0, float(centre - half))), max(share, min(1.0, float(centre + half)))


def auroc_interval(
    area: float, positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]
) -> Ends:
    """Return the interval of an area under the ROC curve, given both groups' scores."""
    newcombe = _newcombe(area, len(positive), len(negative))
    delong = _delong(area, positive, negative)
    return min(newcombe[0], delong[0]), max(newcombe[1], delong[1])


def auroc_variance(positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]) -> float:
    """Return the variance of an area under the ROC curve; each group must have two rows.

    DeLong et al., "Comparing the areas under two or more correlated receiver operating
    characteristic curves: a nonparametric approach", 1988, computed by ranks.
    """
    ranks = stats.rankdata(np.concatenate([positive, negative]))
    above_N = ranks[: len(positive)] - stats.rankdata(
        positive
    )  # negative rows below each positive one
    above_P = len(positive) - (ranks[len(positive) :] - stats.rankdata(negative))
    of_positive = (above_N / len(negative)).var(ddof=1) / len(positive)
    of_negative = (above_P / len(positive)).var(ddof=1) / len(negative)
    return float(of_positive + of_negative)


def _delong(
    area: float, positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]
) -> Ends:
    if not 0.0 < area < 1.0 or min(len(positive), len(negative)) < 2:
        return area, area
    half = _normal_quantile() * np.sqrt(auroc_variance(positive, negative)) / (area * (1.0 - area))
    odds = np.log(area / (1.0 - area))
    return float(1.0 / (1.0 + np.exp(half - odds))), float(1.0 / (1.0 + np.exp(-half - odds)))


def _newcombe(area: float, positive: int, negative: int) -> Ends:
    """Return where the area is a normal quantile of its standard deviations from what was found.

    Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic.
    Part 2", 2006, method 5.
    """
    rows = (positive + negative) / 2.0 - 1.0
    z = _normal_quantile()

    def beyond(true: float) -> float:
        spread = 1.0 + rows * (1.0 - true) / (2.0 - true) + rows * true / (1.0 + true)
        return float(
            (true - area) ** 2 - z * z * true * (1.0 - true) * spread / (positive * negative)
        )

    low = 0.0 if area <= EDGE else optimize.brentq(beyond, 0.0, min(area, 1.0 - EDGE))
    high = 1.0 if area >= 1.0 - EDGE else optimize.brentq(beyond, max(area, EDGE), 1.0)
    return float(low), float(high)


def false_positive_rate_interval(
    positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"], detection_rate: float
) -> Ends:
    """Return the interval of the false-positive rate at which a share `detection_rate` of positive
    rows is detected.

    Half of what may go wrong goes to the threshold, which lies between two order statistics of the
    positive rows, the other half to the rates of the negative rows at these.
    """
    half = (1.0 + LEVEL) / 2.0
    ordered, rows = np.sort(positive), len(positive)
    tails = np.array([(1.0 - half) / 2.0, (1.0 + half) / 2.0])
    first, last = stats.binom.ppf(tails, rows, 1.0 - detection_rate).astype(
        int
    )  # rows below the true threshold
    lowest = ordered[first - 1] if first > 0 else -np.inf
    highest = ordered[last] if last < rows else np.inf
    least, most = int(np.sum(negative >= highest)), int(np.sum(negative >= lowest))
    return share_interval(least, len(negative), half)[0], share_interval(most, len(negative), half)[
        1
    ]


def _normal_quantile() -> float:
    return float(ndtri((1.0 + LEVEL) / 2.0))
