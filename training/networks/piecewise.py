"""Piecewise linear encoding of numbers, the first layer of a network of a table's columns."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

FEWEST_VALUES = 3  # of a number that is encoded: a network has no use for bins of two values


class PiecewiseLinear(nn.Module):
    """A row, and of each number x with knots b_0 < ... < b_T the T numbers clip((x - b_{t-1}) /
    (b_t - b_{t-1}), 0, 1) (Gorishniy et al. 2022, "On embeddings for numerical features in tabular
    deep learning", section 3.2).

    A linear layer of them is a piecewise linear function of each number, which has steps where a
    boosted tree would have them.
    """

    def __init__(self, knots: Sequence[Sequence[float]]) -> None:
        """`knots` has a list for each number of a row, empty where it is left as it is."""
        super().__init__()
        bins = [(i, a, b) for i, of in enumerate(knots) for a, b in pairwise(of)]
        index, left, right = zip(*bins, strict=True) if bins else ((), (), ())
        self.inputs, self.outputs = len(knots), len(knots) + len(bins)
        # all three follow from the recipe
        self.index = nn.Buffer(torch.tensor(index, dtype=torch.int64), persistent=False)
        edges = torch.tensor([left, right], dtype=torch.float64)
        self.left = nn.Buffer(edges[0].float(), persistent=False)
        self.width = nn.Buffer((edges[1] - edges[0]).float(), persistent=False)

    def forward(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N J"]:
        place = (x.index_select(1, self.index) - self.left) / self.width
        return torch.cat([x, place.clamp(0.0, 1.0)], dim=1)


def quantile_knots(x: Num[np.ndarray, "N I"], bins: int) -> list[list[float]]:
    """Return of each number of rows its quantiles at 0, 1/bins, ..., 1, each once; none of a number
    with fewer than three values."""
    levels = np.linspace(0.0, 1.0, bins + 1)
    found = []
    for column in x.astype(np.float32).T:
        has_few = len(np.unique(column)) < FEWEST_VALUES
        # float32 as the network has it, or two knots could meet there
        knots = np.unique(np.quantile(column, levels).astype(np.float32))
        found.append([] if has_few else [float(knot) for knot in knots])
    return found
