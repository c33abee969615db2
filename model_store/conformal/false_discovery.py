"""Flags of rows that are decided together: the share of wrong ones among the flagged is bounded, in
expectation.

The false discovery rate is E[(flagged rows that are like the calibration data) / max(flagged rows,
1)].
"""

import numpy as np
from jaxtyping import Bool, Float64

# so that a p-value that is its bound counts as no more than it
ROUNDING = 4 * float(np.finfo(np.float64).eps)


def benjamini_hochberg(p_values: Float64[np.ndarray, "N"], fdr: float) -> Bool[np.ndarray, "N"]:
    """Return which rows to flag at a false discovery rate of `fdr`, in (0, 1).

    Those whose p-value is at most the largest p_(k) <= fdr k / N, p_(1) <= ... <= p_(N) being the
    sorted p-values (Benjamini and Hochberg, "Controlling the false discovery rate", 1995).
    Conformal p-values of rows that are independent given the calibration data depend on each other
    through these, positively (PRDS), and then the rate is at most fdr times the share of rows that
    are like the calibration data (Benjamini and Yekutieli 2001; Bates, Candes, Lei, Romano and
    Sesia, "Testing for outliers with conformal p-values", 2023).
    """
    rows = len(p_values)
    ordered = np.sort(p_values)
    below = np.flatnonzero(ordered <= (1.0 + ROUNDING) * fdr * np.arange(1, rows + 1) / rows)
    return p_values <= (ordered[below[-1]] if len(below) else 0.0)
