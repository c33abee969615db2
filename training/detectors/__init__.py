"""Density detectors, which score how much a row differs from the training rows.

A detector is a module that maps rows of a space to one score per row. It is fitted on the training
rows and exported as a part of the network's graph. The spaces are:

* input: the raw row
* spectrum: the row's coordinates along the principal components of the training rows
* embedding: the input of the network's last layer at the centre of the posterior

Scores are non-negative. Large scores are unusual. For a two-sided detector, small scores are
unusual too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from training.detectors.neighbours import (
    EMBEDDING_NEIGHBOUR,
    EMBEDDING_ROWS,
    CosineNeighbours,
    Neighbours,
)
from training.detectors.roughness import Roughness
from training.detectors.spectrum import Mahalanobis, Residual

Space = Literal["input", "spectrum", "embedding"]


@dataclass(frozen=True)
class Kind:
    fit: Callable[..., nn.Module]  # arguments: rows, generator, and shape if it needs images
    space: Space
    is_two_sided: bool = False  # small scores are unusual too
    needs_images: bool = False


_embedding_neighbours = partial(
    Neighbours.fit, bank_rows=EMBEDDING_ROWS, neighbour=EMBEDDING_NEIGHBOUR
)
KINDS: dict[str, Kind] = {
    "residual": Kind(Residual.fit, "spectrum", is_two_sided=True),
    "mahalanobis": Kind(Mahalanobis.fit, "spectrum", is_two_sided=True),
    "input_neighbours": Kind(Neighbours.fit, "input"),
    "feature_neighbours": Kind(_embedding_neighbours, "embedding"),
    "cosine_neighbours": Kind(CosineNeighbours.fit, "input"),
    "roughness": Kind(Roughness.fit, "input", needs_images=True),
}
# Detectors that are part of the flag by default, and those for rows from an encoder.
COMBINED = ("residual", "mahalanobis", "input_neighbours", "feature_neighbours")
COMBINED_IF_ENCODED = ("residual", "mahalanobis", "cosine_neighbours")
FOR_ANY_SHAPE = tuple(name for name, kind in KINDS.items() if not kind.needs_images)
