from itertools import count

import numpy as np

from service.models.drift import Drift

_numbers = count()


def new_drift(statistics, name="m", version="1", has_copies=False):
    return Drift(name, version, statistics, has_copies)


def watch(drift, p_values):
    """Add the p-values of a request with distinct rows."""
    x = np.array([[next(_numbers)] for _ in p_values], dtype=np.float64)
    drift.watch(p_values, x)
