"""Mondrian conformal prediction, which gives separate guarantees for each category.

Each row is ranked among the calibration rows of its category (Vovk, Lindsay, Nouretdinov and
Gammerman, "Mondrian confidence machine", 2003; Vovk, Gammerman and Shafer, "Algorithmic learning in
a random world", 2005, section 4.5). If rows are independent and identically distributed, the rows
of a category are exchangeable. So every guarantee for all rows is also valid within each category.

With categories by *group*, the request assigns each row to a group. The group determines flag, set
or interval, and abstention. With categories by *class*:

* Each class enters a prediction set by its rank among the calibration rows of that class
  (label-conditional prediction). For each class c, the sets of rows with true class c contain c
  with probability `coverage` or more.
* Flag and abstention use the *predicted* class, because the true class is unknown. For each
  predicted class, the flag's rate does not exceed fpr, and the share of wrong labels among
  answered rows does not exceed the risk.

A category of n calibration rows supports no rate between 0 and 1 / (n + 1). Below that limit, its
flag does not fire, its class is in every set, its intervals are unbounded, and the service abstains
from its rows. Guarantees stay valid even if they make the answer useless.

For a row of an unknown group, the service combines all groups with `MIN_CAUTIOUS_ROWS` or more rows
(all groups if none is that large). It uses the largest p-value and the widest set or interval. So
the guarantees are valid if the row resembles any of these groups, or a mixture of them. If a risk
is requested, the service abstains, because one group's threshold is not certified for another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int64

from model_store.scores.records import check_tensor

CategoryKind = Literal["class", "group"]
MIN_CAUTIOUS_ROWS = 19  # enough for fpr .05 and coverage .95
UNKNOWN = -1  # category of an unknown group
JUDGED, TRUE = "category.judged", "category.true"  # in `calibration.safetensors`


def group_numbers(groups: Sequence[str], names: Sequence[str]) -> Int64[np.ndarray, "N"]:
    """Return the index of each group in `names`, or `UNKNOWN`."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers.get(group, UNKNOWN) for group in groups], dtype=np.int64)


def cautious_categories(rows: Sequence[int]) -> list[int]:
    return [c for c, n in enumerate(rows) if n >= MIN_CAUTIOUS_ROWS] or [*range(len(rows))]


@dataclass(frozen=True, eq=False)
class Categories:
    """The categories of m calibration rows for J draw counts, as indices into `names`.

    `judged` determines a row's flag and `true` its set or interval. By class, they are the
    predicted and the true class. By group, both are the group.
    """

    kind: CategoryKind
    names: tuple[str, ...]
    judged: Int64[np.ndarray, "J m"]
    true: Int64[np.ndarray, "m"]

    @classmethod
    def by_group(
        cls, names: tuple[str, ...], groups: Int64[np.ndarray, "m"], counts: int
    ) -> "Categories":
        """Create categories from row groups. Empty groups are dropped."""
        present, numbers = np.unique(groups, return_inverse=True)
        present_names = tuple(names[number] for number in present.tolist())
        return cls("group", present_names, np.tile(numbers, (counts, 1)), numbers)

    @property
    def judged_rows(self) -> Int64[np.ndarray, "G"]:
        return np.bincount(self.judged[-1], minlength=len(self.names))

    @property
    def true_rows(self) -> Int64[np.ndarray, "G"]:
        return np.bincount(self.true, minlength=len(self.names))

    def assign(self, labels: Int64[np.ndarray, "N"]) -> Int64[np.ndarray, "N"]:
        """Return each row's category: the predicted class, or `UNKNOWN` for groups."""
        return labels if self.kind == "class" else np.full(len(labels), UNKNOWN)

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
        largest = len(names) - 1
        judged = check_tensor(tensors, JUDGED, np.int64, shape, 0, largest)
        true = check_tensor(tensors, TRUE, np.int64, shape[1:], 0, largest)
        return cls(kind, names, judged, true)
