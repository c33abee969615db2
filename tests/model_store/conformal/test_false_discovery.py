import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_store.conformal.rank_tables import benjamini_hochberg, conformal_p_value

BATCHES = 4000


@settings(max_examples=200)
@given(ranks=st.lists(st.integers(1, 20), min_size=1, max_size=12), percent=st.integers(1, 99))
def test_benjamini_hochberg_matches_its_definition(ranks, percent):
    """Find the largest k whose kth smallest p-value is up to fdr k / N."""
    expected = [False] * len(ranks)
    for k in range(1, len(ranks) + 1):
        kth = sorted(ranks)[k - 1]
        if Fraction(kth, 20) <= Fraction(percent * k, 100 * len(ranks)):
            expected = [rank <= kth for rank in ranks]
    assert benjamini_hochberg(np.array(ranks) / 20, percent / 100).tolist() == expected


def test_p_value_equal_to_its_bound_is_flagged_despite_rounding():
    """In float64, the bound fdr k / N is often rounded down."""
    rounded_down = 0
    for rows, percent in product(range(1, 9), range(1, 100)):
        for k in range(1, rows + 1):
            bound = Fraction(percent * k, rows)
            if bound.denominator == 1:
                p_values = np.array([int(bound) / 100] * k + [1.0] * (rows - k))
                rounded_down += p_values[0] > percent / 100 * k / rows
                assert benjamini_hochberg(p_values, percent / 100)[:k].all(), (rows, k, percent)
    assert rounded_down > 0


@pytest.mark.parametrize("outliers", [0, 8, 30])
@pytest.mark.parametrize("fdr", [0.1, 0.3])
def test_false_discovery_rate_is_fdr_times_share_of_ordinary_rows(outliers, fdr):
    """Test batches of N = 40 rows, each with n = 399 calibration rows.

    If fdr (n + 1) / N is an integer, the rate is exact (Marandon, Lei, Mary and Roquain 2022). The
    mean over batches is within 5.5 standard errors.
    """
    generator = np.random.default_rng([outliers, int(100 * fdr)])
    false_shares = []
    for _ in range(BATCHES):
        scores = generator.normal(size=40)
        scores[:outliers] += generator.uniform(0, 5, outliers)
        is_flagged = benjamini_hochberg(
            conformal_p_value(scores, np.sort(generator.normal(size=399))), fdr
        )
        false_shares.append(is_flagged[outliers:].sum() / max(is_flagged.sum(), 1))
    error = np.std(false_shares) / math.sqrt(BATCHES)
    assert np.mean(false_shares) == pytest.approx(fdr * (40 - outliers) / 40, abs=5.5 * error)
