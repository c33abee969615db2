"""Types that rooms of the package share."""

from dataclasses import dataclass
from typing import Literal

Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class DetectorNames:
    """Which detectors the flag combines, which are densities, and which of these are judged from both sides."""

    combined: tuple[str, ...]
    density: tuple[str, ...] = ()
    two_sided: tuple[str, ...] = ()
