"""Images of a training step as they might also have been taken: flipped, shifted, cropped
(`[augmentation]`).

Every row has one affine map of its own, by which its pixels are interpolated (bilinear; outside the
image the nearest pixel counts). A map that takes pixels to pixels, a flip or a shift, keeps their
values but for rounding.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from model_store.errors import InvalidInput
from training.recipe import AugmentationSection


def check_augmentation(section: AugmentationSection | None, shape: Sequence[int]) -> None:
    """Raise InvalidInput if rows of a shape are no images, or smaller than they may be shifted."""
    if section is None:
        return
    if len(shape) not in (2, 3):
        raise InvalidInput(
            "augmentation", "none, since rows are no images", f"rows of shape {tuple(shape)}"
        )
    if section.shift >= min(shape[-2:]):
        raise InvalidInput(
            "augmentation.shift", f"less than {min(shape[-2:])} pixels", str(section.shift)
        )


def augmented(
    x: Float[Tensor, "N I"], shape: Sequence[int], section: AugmentationSection, seed: int
) -> Float[Tensor, "N I"]:
    """Return images as a function of themselves and a seed: each flipped with probability 1/2 along
    each axis that is named, shifted by as many whole pixels up to `shift` in both directions, and
    cropped to at least 1 - `crop` of height and width, at a place within.
    """
    height, width = shape[-2:]
    generator = torch.Generator().manual_seed(seed)
    # Of each row and axis (across, down): sign, share of the side that is kept, and place, from -1
    # to 1.
    uniform = torch.rand(3, len(x), 2, generator=generator)
    may_flip = torch.tensor([axis in section.flip for axis in ("horizontal", "vertical")])
    sign = torch.where(may_flip & (uniform[0] < 0.5), -1.0, 1.0)
    kept = 1.0 - section.crop * uniform[1]
    place = (1.0 - kept) * (2.0 * uniform[2] - 1.0)
    pixels = torch.randint(-section.shift, section.shift + 1, (len(x), 2), generator=generator)
    place = place + 2.0 * pixels / torch.tensor([width, height])
    maps = torch.zeros(len(x), 2, 3)
    maps[:, 0, 0], maps[:, 1, 1], maps[:, :, 2] = (
        sign[:, 0] * kept[:, 0],
        sign[:, 1] * kept[:, 1],
        place,
    )
    images = x.reshape(len(x), -1, height, width)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False).to(x.device)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False).reshape(
        x.shape
    )
