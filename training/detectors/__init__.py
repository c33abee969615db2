"""Density detectors: how unlike the training data a row is, by the row alone.

A detector is a module from rows of a space to one score a row; it is fitted on the training rows
and exported into the network's graph, so that it costs no further pass and runs wherever the
network does. Spaces are the input, its spectrum (its coordinates along the training rows' principal
components), and the embedding: what the network's last layer takes in under the posterior's centre.
Scores are 0 or more; large ones mean unlike the training rows, and of a two-sided detector small
ones too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from training.detectors.gaussian import ClassGaussian
from training.detectors.neighbours import FEW_NEIGHBOUR, FEW_ROWS, CosineNeighbours, Neighbours
from training.detectors.roughness import Roughness
from training.detectors.spectrum import Mahalanobis, Residual

Space = Literal["input", "spectrum", "embedding"]


@dataclass(frozen=True)
class Kind:
    fit: Callable[..., nn.Module]  # of rows, a generator, and labels or an image's shape if it has
    space: Space
    is_two_sided: bool = False  # whether small scores too mean unlike the data
    has_classes: bool = False
    is_of_images: bool = False
    is_combined: bool = False
    is_combined_of_encoded: bool = False  # where rows are what an encoder says


_few_neighbours = partial(Neighbours.fit, bank_rows=FEW_ROWS, neighbour=FEW_NEIGHBOUR)
KINDS: dict[str, Kind] = {
    "residual": Kind(
        Residual.fit, "spectrum", is_two_sided=True, is_combined=True, is_combined_of_encoded=True
    ),
    "mahalanobis": Kind(
        Mahalanobis.fit,
        "spectrum",
        is_two_sided=True,
        is_combined=True,
        is_combined_of_encoded=True,
    ),
    "input_neighbours": Kind(Neighbours.fit, "input", is_combined=True),
    "feature_neighbours": Kind(_few_neighbours, "embedding", is_combined=True),
    "cosine_neighbours": Kind(CosineNeighbours.fit, "input", is_combined_of_encoded=True),
    "feature_gaussian": Kind(ClassGaussian.fit, "embedding", has_classes=True),
    "roughness": Kind(Roughness.fit, "input", is_of_images=True),
}


def names_for(shape: tuple[int, ...], takes_ids: bool = False) -> tuple[str, ...]:
    """Return the names of the detectors that rows of a shape can have; of ids, which have no size,
    those of features alone.
    """
    if takes_ids:
        return tuple(name for name, kind in KINDS.items() if kind.space == "embedding")
    return tuple(
        name for name, kind in KINDS.items() if not kind.is_of_images or len(shape) in (2, 3)
    )
