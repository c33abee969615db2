"""By what guarantees are to hold, and rows' groups by the numbers that a calibration gives them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from model_store.conformal.calibration import Calibration
from model_store.conformal.mondrian import UNKNOWN, Categories, CategoryKind
from model_store.errors import InvalidInput
from model_store.scores.tasks import AnyScores
from training.data import MAX_GROUPS, Dataset, Rows


@dataclass(frozen=True)
class CategoriesWanted:
    """By what guarantees are to hold: the names of all classes, or of all groups, of the column
    `column`."""

    kind: CategoryKind
    names: tuple[str, ...]
    column: str | None = None

    @classmethod
    def by(cls, calibration: str, data: Dataset, column: str | None) -> "CategoriesWanted | None":
        """Return what a recipe's `serving.calibration` wants of data; None where it is marginal.

        Raises:
            InvalidInput: if the data have no such groups.
        """
        if calibration == "class":
            return cls("class", data.classes)
        if calibration != "group":
            return None
        if not data.group_names:
            expected = (
                f"a column of at most {MAX_GROUPS} groups in data.calibration_group or data.group"
            )
            raise InvalidInput("serving.calibration", expected, repr(column))
        return cls("group", data.group_names, column)

    def of_rows(self, scores: list[AnyScores], rows: Rows) -> Categories:
        """Return the categories of scored rows, at each number of draws."""
        if self.kind == "class":
            return Categories.by_class(self.names, np.stack([s.labels for s in scores]), rows.y)
        if rows.groups is None:
            raise ValueError("expected rows whose groups are known, got others")
        return Categories.by_group(self.names, rows.groups, len(scores))


def groups_known(
    calibration: Calibration, rows: Rows, names: tuple[str, ...]
) -> Int64[np.ndarray, "N"] | None:
    """Return rows' groups as a calibration by group numbers them, `UNKNOWN` of those that it has
    not; None where it is not by group, or the rows have none.

    `names` are those that the rows' own numbers mean.
    """
    categories = calibration.categories
    if categories is None or categories.kind != "group" or rows.groups is None:
        return None
    number = {name: i for i, name in enumerate(categories.names)}
    return np.array([number.get(name, UNKNOWN) for name in names], dtype=np.int64)[rows.groups]
