"""Fixed layers: the selection and piecewise linear encoding of inputs, and random features."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int64, Num
from torch import Tensor, nn

from training.bayes.layers import matmul
from training.networks.probes import output_layer, run_on_rows, watch

MIN_VALUES = 3  # different values per encoded column
TREES, MIN_LEAF_ROWS, SPLIT_INPUTS = 100, 3, 0.3  # share of the inputs considered per split
MAX_SELECTION_ROWS = 3_000

Knots = Sequence[Sequence[float] | None]


class PiecewiseLinear(nn.Module):
    """A layer that appends a piecewise linear encoding of each number in a row.

    A number x with knots b_0 < ... < b_T is encoded as clip((x - b_{t-1}) / (b_t - b_{t-1}), 0, 1),
    t = 1, ..., T (Gorishniy et al. 2022, "On embeddings for numerical features in tabular deep
    learning", section 3.2).
    """

    def __init__(self, knots: Knots) -> None:
        """Create the layer from each number's knots.

        A number without knots is not encoded, and a number whose knots are None is dropped.
        """
        super().__init__()
        selected = [i for i, edges in enumerate(knots) if edges is not None]
        bins = [(i, a, b) for i in selected for a, b in pairwise(knots[i] or ())]
        index, left, right = zip(*bins, strict=True) if bins else ((), (), ())
        self.inputs, self.outputs = len(knots), len(selected) + len(bins)
        # The buffers are not saved because they follow from the recipe.
        self.selected = nn.Buffer(torch.tensor(selected, dtype=torch.int64), persistent=False)
        self.index = nn.Buffer(torch.tensor(index, dtype=torch.int64), persistent=False)
        edges = torch.tensor([left, right], dtype=torch.float64)
        self.left = nn.Buffer(edges[0].float(), persistent=False)
        self.width = nn.Buffer((edges[1] - edges[0]).float(), persistent=False)

    def forward(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N J"]:
        place = (x.index_select(1, self.index) - self.left) / self.width
        if len(self.selected) < self.inputs:
            x = x.index_select(1, self.selected)
        return torch.cat([x, place.clamp(0.0, 1.0)], dim=1)


def quantile_knots(x: Num[np.ndarray, "N I"], bins: int) -> list[list[float]]:
    """Compute each column's distinct quantiles at 0, 1/bins, ..., 1.

    A column with fewer than `MIN_VALUES` distinct values gets no knots. With fewer than two bins,
    no column gets any.
    """
    levels = np.linspace(0.0, 1.0, bins + 1)
    knots_by_column = []
    for column in x.astype(np.float32).T:
        has_few_values = bins < 2 or len(np.unique(column)) < MIN_VALUES
        # The network's float32 can merge knots that are distinct in float64.
        knots = np.unique(np.quantile(column, levels).astype(np.float32))
        knots_by_column.append([] if has_few_values else [float(knot) for knot in knots])
    return knots_by_column


def select_inputs(
    x: Num[np.ndarray, "N I"], y: Num[np.ndarray, "N"], max_inputs: int, is_regression: bool
) -> Int64[np.ndarray, "J"]:
    """Select the numbers that are most important for predicting y, or all of them.

    The importance is the mean decrease in impurity of randomised trees, which predict the ranks of
    numeric targets. All numbers are selected if trees predict test rows worse without the others.
    """
    from scipy.stats import rankdata
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

    forest = ExtraTreesRegressor if is_regression else ExtraTreesClassifier
    trees = forest(TREES, min_samples_leaf=MIN_LEAF_ROWS, max_features=SPLIT_INPUTS, random_state=0)

    def most_important(x: Num[np.ndarray, "N I"], y: Num[np.ndarray, "N"]) -> np.ndarray:
        importance = trees.fit(x, y).feature_importances_
        return np.sort(np.argsort(-importance, kind="stable")[:max_inputs])

    y = rankdata(y) if is_regression else y  # so that outliers do not decide
    rows = np.random.default_rng(0).permutation(len(y))[:MAX_SELECTION_ROWS]
    train, test = np.split(rows, [2 * len(rows) // 3])
    selected = most_important(x[train], y[train])
    score = trees.score(x[test], y[test])
    trees.fit(x[np.ix_(train, selected)], y[train])
    if trees.score(x[np.ix_(test, selected)], y[test]) < score:
        return np.arange(x.shape[1])
    return most_important(x[rows], y[rows])


class RandomFeatures(nn.Module):
    """Random Fourier features for a squared exponential kernel.

        phi(h) = sqrt(2 / D) cos(h W / l + b)        W ~ N(0, 1), b ~ U(0, 2 pi)

    If w ~ N(0, s^2 I), phi(h) . w approximates a Gaussian process with the kernel
    s^2 exp(-|h - h'|^2 / (2 l^2)) (Rahimi and Recht 2007, "Random features for large-scale kernel
    machines"). The length scale l is the median distance between the examples.
    """

    def __init__(self, examples: Float[Tensor, "R I"], features: int) -> None:
        super().__init__()
        length_scale = torch.pdist(examples.detach().float()).median().item() or 1.0
        self.weight = nn.Buffer(torch.randn(examples.shape[1], features) / length_scale)
        self.phase = nn.Buffer(2.0 * math.pi * torch.rand(features))

    def forward(self, h: Float[Tensor, "*N I"]) -> Float[Tensor, "*N D"]:
        cosines = torch.cos(matmul(h, self.weight) + self.phase)
        return math.sqrt(2.0 / len(self.phase)) * cosines


def with_random_features(
    module: nn.Module, examples: Num[Tensor, "R ..."], features: int
) -> nn.Module:
    """Replace a module's final Linear layer with random features and a new Linear layer."""
    module = nn.Sequential(module) if isinstance(module, nn.Linear) else module
    name = output_layer(module, examples)
    layer = module.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    inputs: list[Tensor] = []
    with watch({name: layer}, lambda _, h: inputs.append(h)):
        run_on_rows(module, examples)
    first = RandomFeatures(inputs[0].flatten(0, -2), features)
    last = nn.Linear(features, layer.out_features)
    children = list(module.children())
    if isinstance(module, nn.Sequential) and layer is children[-1]:
        return nn.Sequential(*children[:-1], first, last)
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, nn.Sequential(first, last))
    return module
