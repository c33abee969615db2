"""Density detectors: how unlike the training data a row is, whatever the model says of it.

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
from typing import Literal, Protocol

from jaxtyping import Float
from torch import Tensor, nn

from training.data import is_image
from training.detectors.gaussian import ClassGaussian
from training.detectors.neighbours import FEW_NEIGHBOUR, FEW_ROWS, CosineNeighbours, Neighbours
from training.detectors.roughness import Roughness
from training.detectors.spectrum import Mahalanobis, Residual

Space = Literal["input", "spectrum", "embedding"]


class Detector(Protocol):
    """What every detector gives. All are `torch.nn.Module`s, made of training rows and a generator
    by `fit`."""

    def __call__(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N"]:
        """Return the score of each row."""


@dataclass(frozen=True)
class Kind:
    """A detector by name: how it is fitted, where it looks, and whether small scores too mean
    unlike the data."""

    fit: Callable[
        ..., nn.Module
    ]  # of rows and a generator; of labels where it has classes; of an image's shape
    space: Space
    is_two_sided: bool
    has_classes: bool = False
    is_of_images: bool = False


KINDS: dict[str, Kind] = {
    "residual": Kind(Residual.fit, "spectrum", True),
    "mahalanobis": Kind(Mahalanobis.fit, "spectrum", True),
    "input_neighbours": Kind(Neighbours.fit, "input", False),
    "feature_neighbours": Kind(
        partial(Neighbours.fit, bank_rows=FEW_ROWS, neighbour=FEW_NEIGHBOUR), "embedding", False
    ),
    "cosine_neighbours": Kind(CosineNeighbours.fit, "input", False),
    "feature_gaussian": Kind(ClassGaussian.fit, "embedding", False, has_classes=True),
    "roughness": Kind(Roughness.fit, "input", False, is_of_images=True),
}


def fitting(shape: tuple[int, ...], takes_ids: bool = False) -> tuple[str, ...]:
    """Return the names of the detectors that rows of a shape can have; of ids, which have no size,
    those of features alone.
    """
    if takes_ids:
        return tuple(name for name, kind in KINDS.items() if kind.space == "embedding")
    return tuple(name for name, kind in KINDS.items() if is_image(shape) or not kind.is_of_images)
