"""`digits`: bundled with scikit-learn."""

import numpy as np

from training.data.rows import Dataset, Rows
from training.data.splitting import hold_out

TEST_FRACTION = 0.2


def digits() -> Dataset:
    """Return scikit-learn's bundled digits: 1,797 handwritten digits of 8x8 pixels from 0 to 16
    (UCI, 1998)."""
    from sklearn.datasets import load_digits  # a slow import that other sources do not need

    bunch = load_digits()
    rows = Rows(
        bunch.data.astype(np.float32), bunch.target.astype(np.int64), np.arange(len(bunch.data))
    )
    train, test = hold_out(len(rows), TEST_FRACTION)
    classes = tuple(str(label) for label in bunch.target_names)
    return Dataset(rows.take(train), rows.take(test), (8, 8), classes, 0.0, 16.0)
