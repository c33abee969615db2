"""Types that every room shares."""

from typing import Literal

Task = Literal["classification", "regression"]
