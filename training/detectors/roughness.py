"""A roughness detector for images."""

import math

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.bayes.layers import matmul
from training.detectors.spectrum import chunks, square_norms

FLOOR = 1e-4  # share of the training rows' mean variance, added to the denominator
MIN_SCORE = 1e-6


class Roughness(nn.Module):
    """The mean squared difference between neighbouring pixels, relative to the variance.

    The denominator is twice the channel's variance. This is von Neumann's ratio (1941,
    "Distribution of the ratio of the mean square successive difference to the variance") along both
    axes of an image. It is about 1 for independent pixels, such as noise, and near 0 for smooth
    images. It needs few training rows.
    """

    def __init__(self, shape: tuple[int, int, int], floor: float) -> None:
        super().__init__()
        self.shape = shape
        self.floor = floor

    @classmethod
    def fit(
        cls, rows: Num[Tensor, "N I"], _: torch.Generator, shape: tuple[int, ...]
    ) -> "Roughness":
        channels, height, width = shape if len(shape) == 3 else (1, *shape)
        detector = cls((channels, height, width), 0.0)
        variances = [detector.variance(part.float()) for part in chunks(rows)]
        floor = FLOOR * float(torch.cat(variances).double().mean())
        return cls(detector.shape, floor or 1.0)  # 1 if all images are constant

    def variance(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N"]:
        channels, height, width = self.shape
        pixels = rows.reshape(-1, channels, height * width)
        weights = torch.full((height * width, 1), 1.0 / (height * width), dtype=rows.dtype)
        centred = pixels - matmul(pixels, weights)
        return square_norms(centred.reshape(-1, math.prod(self.shape))) / math.prod(self.shape)

    def forward(self, rows: Float[Tensor, "N I"]) -> Float[Tensor, "N"]:
        channels, height, width = self.shape
        image = rows.reshape(-1, channels, height, width)
        differences = []
        if height > 1:
            down = image[:, :, 1:] - image[:, :, :-1]
            differences.append(down.reshape(-1, channels * (height - 1) * width))
        if width > 1:
            across = image[..., 1:] - image[..., :-1]
            differences.append(across.reshape(-1, channels * height * (width - 1)))
        variance = 2.0 * self.variance(rows) + self.floor
        means = (square_norms(part) / part.shape[1] for part in differences)
        squares = sum(means, torch.zeros_like(variance))
        return (squares / (max(len(differences), 1) * variance)).clamp(min=MIN_SCORE)
