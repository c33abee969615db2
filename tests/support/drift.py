from itertools import count, islice

import numpy as np

from service.models.drift import MAX_REQUEST_ROWS

_digests = count()


def watch(drift, p_values):
    """Add the p-values of a request whose rows are no copies."""
    rows = min(len(p_values), MAX_REQUEST_ROWS)
    drift.watch(p_values, np.array([*islice(_digests, rows)], dtype=np.uint64))
