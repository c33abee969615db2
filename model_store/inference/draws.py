"""Rows of a micro-batch under their draws: either all under the same, or each under draws of its
own."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from model_store.inference.runtime import DrawSet, Runtime


class RowsUnderDraws(ABC):
    """N rows whose first products are known, and the draws that they are predicted under."""

    @abstractmethod
    def outputs(
        self, rows: slice | np.ndarray, first: int, last: int
    ) -> Float32[np.ndarray, "K n C"]:
        """Return what the network says of some rows under their draws `first` to `last - 1`."""


@dataclass(frozen=True, eq=False)
class SharedDraws(RowsUnderDraws):
    """All rows under the same draws. `known` is what `Runtime.before_draws` says of the rows."""

    runtime: Runtime
    known: Float32[np.ndarray, "N H"]
    draws: DrawSet

    def outputs(
        self, rows: slice | np.ndarray, first: int, last: int
    ) -> Float32[np.ndarray, "K n C"]:
        """Return what the network says of some rows under draws `first` to `last - 1`."""
        return self.runtime.after_draw_set(self.known[rows], self.draws, first, last)


@dataclass(frozen=True, eq=False)
class OwnDraws(RowsUnderDraws):
    """Each row under draws of its own, of a model whose draws may be paired with rows."""

    runtime: Runtime
    known: Float32[np.ndarray, "N H"]
    theta: Float32[np.ndarray, "K N D"]

    def outputs(
        self, rows: slice | np.ndarray, first: int, last: int
    ) -> Float32[np.ndarray, "K n C"]:
        """Return what the network says of some rows under their draws `first` to `last - 1`."""
        return self.runtime.after_draws(self.known[rows], self.theta[first:last, rows])
