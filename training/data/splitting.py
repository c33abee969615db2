"""Splits into training, validation, calibration and test rows.

Splits are random. A recipe can also split by class, by group or by time.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from model_store.errors import InvalidInput

Index = Int64[np.ndarray, "M"]
TEST_SEED = 0  # Test rows belong to the data, not to a run.
# By split: the share of the training rows, the minimum number with its maximum share, and the
# maximum number.
DEFAULT_SIZES = {
    "validation": (0.15, 8, 0.12, 5_000),
    "reference": (0.08, 10, 0.13, 2_000),
    "ranking": (0.12, 19, 0.24, 4_000),  # A flag at fpr .05 needs 19 rows.
}
DEFAULT_TEST_FRACTION, DEFAULT_TEST_ROWS = 0.2, 10_000

Rng = np.random.Generator
Labels = Int64[np.ndarray, "N"]


@dataclass(frozen=True, eq=False)
class Keys:
    labels: Labels | None = None
    groups: Labels | None = None
    times: Float64[np.ndarray, "N"] | None = None

    def take(self, index: Index) -> "Keys":
        keys = (self.labels, self.groups, self.times)
        return Keys(*(None if key is None else key[index] for key in keys))


NO_KEYS = Keys()


@dataclass(frozen=True)
class SplitSizes:
    """The sizes of the splits, as row counts or shares of the training rows.

    None selects the default size. If `is_stratified`, splits keep the class shares.
    """

    validation: int | float | None
    reference: int | float | None
    ranking: int | float | None
    seed: int
    is_stratified: bool = False

    def rows(self, rows: int) -> tuple[int, int, int]:
        sizes = {name: self._size(name, rows) for name in DEFAULT_SIZES}
        for name, size in sizes.items():
            if size < 1:
                expected = f"at least one of {rows} training rows"
                raise InvalidInput(f"data.{name}", expected, "none")
        held_out = sum(sizes.values())
        if held_out > rows // 2:
            field = "data.validation + reference + ranking"
            raise InvalidInput(field, f"up to half of the {rows} training rows", f"{held_out}")
        return sizes["validation"], sizes["reference"], sizes["ranking"]

    def _size(self, name: str, rows: int) -> int:
        size: int | float | None = getattr(self, name)
        if size is None:
            return default_rows(name, rows)
        return size if isinstance(size, int) else round(size * rows)

    def split(self, rows: int, keys: Keys = NO_KEYS) -> list[Index]:
        """Return the indices of the validation, reference, ranking and training rows."""
        sizes = self.rows(rows)
        rng = np.random.default_rng(self.seed)
        if keys.times is not None:
            train, held_out = np.split(_order_by_time(keys.times, rng), [rows - sum(sizes)])
            validation, calibration = np.split(held_out, [sizes[0]])
            return [validation, *np.split(rng.permutation(calibration), [sizes[1]]), train]
        if keys.groups is not None:
            parts, left = [], np.arange(rows)
            for name, size in zip(DEFAULT_SIZES, sizes, strict=True):
                is_taken = _select_groups(keys.groups[left], size, rng, name)
                parts.append(left[is_taken])
                left = left[~is_taken]
            return [*parts, left]
        if self.is_stratified and keys.labels is not None:
            train, held_out = _split_systematically(
                _order_by_class(keys.labels, rng), sum(sizes), rng
            )
            held_out, ranking = _split_systematically(held_out, sizes[2], rng)
            validation, reference = _split_systematically(held_out, sizes[1], rng)
            return [rng.permutation(part) for part in (validation, reference, ranking, train)]
        return np.split(rng.permutation(rows), np.cumsum(sizes))


def default_rows(split: str, rows: int) -> int:
    share, min_rows, small_share, max_rows = DEFAULT_SIZES[split]
    size = max(1, min(max(round(share * rows), min(min_rows, int(small_share * rows))), max_rows))
    if split == "validation":  # Calibration has priority in small sets.
        left = rows // 2 - default_rows("reference", rows) - default_rows("ranking", rows)
        size = max(1, min(size, left))
    return size


def default_test_fraction(rows: int) -> float:
    return min(DEFAULT_TEST_FRACTION, DEFAULT_TEST_ROWS / max(rows, 1))


def hold_out(
    rows: int, test_fraction: float | None, keys: Keys = NO_KEYS
) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "T"]]:
    """Hold out a fixed test set, and return the sorted training and test indices.

    Test rows are random, the latest by `times`, complete `groups`, or stratified by `labels`.
    """
    size = round((default_test_fraction(rows) if test_fraction is None else test_fraction) * rows)
    if not 0 < size < rows:
        expected = f"both training and test rows among {rows}"
        raise InvalidInput("data.test_fraction", expected, f"{size} test rows")
    rng = np.random.default_rng(TEST_SEED)
    if keys.times is not None:
        order = _order_by_time(keys.times, rng)
        train, test = order[: rows - size], order[rows - size :]
    elif keys.groups is not None:
        is_taken = _select_groups(keys.groups, size, rng, "test")
        train, test = np.flatnonzero(~is_taken), np.flatnonzero(is_taken)
    elif keys.labels is not None:
        train, test = _split_systematically(_order_by_class(keys.labels, rng), size, rng)
    else:
        test, train = np.split(rng.permutation(rows), [size])
    return np.sort(train), np.sort(test)


def _order_by_time(times: Float64[np.ndarray, "N"], rng: Rng) -> Index:
    shuffled = rng.permutation(len(times))
    return shuffled[np.argsort(times[shuffled], kind="stable")]


def _order_by_class(labels: Labels, rng: Rng) -> Index:
    """Order rows by class, and shuffle them within each class.

    Classes are in order of their first row, so their numbers do not matter.
    """
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(first[inverse][shuffled], kind="stable")]


def _split_systematically(
    order: Labels, size: int, rng: Rng
) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "T"]]:
    """Draw a systematic sample of `size` rows, at equal steps from a random start.

    Returns the other rows and the sample. Every row is equally likely, and each
    class keeps its share, rounded up or down.
    """
    places = np.floor((np.arange(size) + rng.uniform()) * (len(order) / size)).astype(np.int64)
    is_taken = np.zeros(len(order), dtype=bool)
    is_taken[np.minimum(places, len(order) - 1)] = True
    return order[~is_taken], order[is_taken]


def _select_groups(groups: Labels, size: int, rng: Rng, split: str) -> np.ndarray:
    """Select random groups with at most `size` rows in total.

    Raises:
        InvalidInput: if no group fits, or all do.
    """
    numbers, counts = np.unique(groups, return_counts=True)
    selected, rows = [], 0
    for i in rng.permutation(len(numbers)).tolist():
        if rows + counts[i] <= size:
            selected.append(numbers[i])
            rows += int(counts[i])
    if not selected or len(selected) == len(numbers):
        expected = f"more groups, of up to {size} rows, for the {split} split"
        received = f"{len(numbers)} groups of at least {counts.min()} rows"
        raise InvalidInput("data.group", expected, received)
    return np.isin(groups, selected)
