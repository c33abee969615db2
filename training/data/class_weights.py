"""Shares of classes, and weights of their rows in a fit: `data.class_weights`."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int64

from model_store.errors import InvalidInput

MAX_SHOWN = 20


def class_shares(y: Int64[np.ndarray, "N"], classes: int) -> Float64[np.ndarray, "C"]:
    """Return each class's share of rows, given their class numbers."""
    shares: np.ndarray = np.bincount(y, minlength=classes) / len(y)
    return shares


def class_weights(
    wanted: Literal["balanced"] | dict[str, float],
    classes: Sequence[str],
    y: Int64[np.ndarray, "N"],
) -> Float64[np.ndarray, "C"]:
    """Return what a row of each class counts for in a fit, 1 on average over the rows.

    `balanced` is 1 over the class's share; a table has weights by class, 1 of a class that is not
    in it.

    Raises:
        InvalidInput: if there is no such class.
    """
    shares = class_shares(y, len(classes))
    if isinstance(wanted, str):
        weights = 1.0 / shares
    else:
        unknown = [name for name in wanted if name not in classes]
        if unknown:
            raise InvalidInput(
                "data.class_weights", f"some of {list(classes)[:MAX_SHOWN]}", repr(unknown[0])[:100]
            )
        weights = np.array([wanted.get(name, 1.0) for name in classes])
    weighted: np.ndarray = weights / (shares @ weights)
    return weighted
