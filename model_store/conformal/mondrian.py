"""Guarantees within categories: Mondrian conformal prediction.

Rows are divided into categories, and each is ranked among the calibration rows of its own (Vovk,
Lindsay, Nouretdinov and Gammerman, "Mondrian confidence machine", 2003; Vovk, Gammerman and Shafer,
"Algorithmic learning in a random world", 2005, section 4.5). Given their categories, rows of one
category are exchangeable if rows are independent and of one distribution, so whatever holds of all
rows together then holds of the rows of each category.

By *group*, a row's category is the group that it is said to belong to, for its flag, its set or
interval, and whether it is answered. By *class*

* a class is in a row's prediction set by its rank among the calibration rows of that very class
  (label-conditional prediction): rows whose true class is c have sets that hold c with a
  probability of at least the coverage, for each c;
* flag and abstention go by the *predicted* class, since the true one is not known: of rows that are
  given the label c at most the rate are flagged, for each c, and of those that are answered so at
  most the risk are wrong.

A category of n calibration rows keeps no rate below 1 / (n + 1) but 0: its flag does not fire then,
its class is in every set, its intervals are unbounded, and its rows are not answered. A guarantee
may cost everything, but is never lost.

A row of an unknown group is judged by all groups of `CAUTIOUS_ROWS` and more (of any size if none
has as many), and the most cautious decides: the largest p-value, the widest set or interval. So the
guarantees hold if it is like the rows of any of these groups, or of a mixture of them. It is not
answered where a risk is in force, since a threshold that is certified of one group is not of
another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int64

CategoryKind = Literal["class", "group"]
CAUTIOUS_ROWS = 19  # that bear a false-positive rate of .05 and a coverage of .95
UNKNOWN = -1  # the category of a row of no known group
JUDGED, TRUE = "category.judged", "category.true"  # in `calibration.safetensors`


def cautious(rows: Sequence[int]) -> list[int]:
    """Return the places of the categories that judge a row of an unknown one, given their sizes."""
    return [c for c, n in enumerate(rows) if n >= CAUTIOUS_ROWS] or [*range(len(rows))]


@dataclass(frozen=True, eq=False)
class Categories:
    """The categories of m calibration rows at J numbers of draws; G categories by name.

    `judged` is that which a row's flag goes by, and `true` that which its truth belongs to: by
    class its predicted and its true class, by group the same for both.
    """

    kind: CategoryKind
    names: tuple[str, ...]
    judged: Int64[np.ndarray, "J m"]
    true: Int64[np.ndarray, "m"]

    @classmethod
    def by_group(
        cls, names: tuple[str, ...], groups: Int64[np.ndarray, "m"], counts: int
    ) -> "Categories":
        """Take the rows' groups by their numbers among `names`, the same at all numbers of draws.

        Groups without a row are left out.
        """
        present, numbers = np.unique(groups, return_inverse=True)
        kept = tuple(names[number] for number in present.tolist())
        return cls("group", kept, np.tile(numbers, (counts, 1)), numbers)

    @property
    def judged_rows(self) -> Int64[np.ndarray, "G"]:
        return np.bincount(self.judged[-1], minlength=len(self.names))

    @property
    def true_rows(self) -> Int64[np.ndarray, "G"]:
        return np.bincount(self.true, minlength=len(self.names))

    def of_rows(
        self, labels: Int64[np.ndarray, "N"], groups: Int64[np.ndarray, "N"] | None
    ) -> Int64[np.ndarray, "N"]:
        if self.kind == "class":
            return labels
        return np.full(len(labels), UNKNOWN) if groups is None else groups

    def tensors(self) -> dict[str, np.ndarray]:
        return {JUDGED: self.judged, TRUE: self.true}

    @classmethod
    def from_tensors(
        cls,
        tensors: dict[str, np.ndarray],
        kind: CategoryKind,
        names: tuple[str, ...],
        shape: tuple[int, ...],
    ) -> "Categories":
        for name, expected in ((JUDGED, shape), (TRUE, shape[1:])):
            array = tensors.get(name)
            if array is None or array.dtype != np.int64 or array.shape != expected:
                raise ValueError(f"{name}: expected int64 numbers of shape {expected}")
            if np.any((array < 0) | (array >= len(names))):
                raise ValueError(f"{name}: expected numbers from 0 to {len(names) - 1}")
        return cls(kind, names, tensors[JUDGED], tensors[TRUE])
