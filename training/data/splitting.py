"""Which rows train, validate, calibrate and test.

Rows are drawn at random; where a recipe says so, class by class, group by group, or by time.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from model_store.errors import InvalidInput

Index = Int64[np.ndarray, "M"]
TEST_SEED = 0  # which rows are test rows is part of the data, not of a run
# By default: shares of the training rows, least rows of a small set (and the share that these may
# be), most rows.
DEFAULTS = {
    "validation": (0.15, 8, 0.12, 5_000),
    "reference": (0.08, 10, 0.13, 2_000),
    "ranking": (0.12, 19, 0.24, 4_000),  # from 19 rows on, a flag can be kept at a rate of .05
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


@dataclass(frozen=True)
class SplitSizes:
    """How many training rows are held out for what: a number of rows, a share of them, or None for
    the default.

    `seed` says which rows. `is_stratified` splits have each class by its share of the rows.
    """

    validation: int | float | None
    reference: int | float | None
    ranking: int | float | None
    seed: int
    is_stratified: bool = False

    def rows(self, rows: int) -> tuple[int, int, int]:
        sizes = {name: self._size(name, rows) for name in DEFAULTS}
        for name, size in sizes.items():
            if size < 1:
                expected = f"a share of {rows} training rows that leaves some"
                raise InvalidInput(f"data.{name}", expected, "none")
        held_out = sum(sizes.values())
        if held_out > rows // 2:
            field = "data.validation_rows + reference_rows + ranking_rows"
            raise InvalidInput(field, f"at most half of the {rows} training rows", f"{held_out}")
        return sizes["validation"], sizes["reference"], sizes["ranking"]

    def _size(self, name: str, rows: int) -> int:
        size: int | float | None = getattr(self, name)
        if size is None:
            return default_rows(name, rows)
        return size if isinstance(size, int) else round(size * rows)

    def split(self, rows: int, keys: Keys | None = None) -> list[Index]:
        """Return the numbers of the validation, reference, ranking and, last, the remaining
        training rows."""
        keys = keys or Keys()
        sizes = self.rows(rows)
        rng = np.random.default_rng(self.seed)
        if keys.times is not None:
            train, held_out = np.split(_by_time(keys.times, rng), [rows - sum(sizes)])
            validation, calibration = np.split(held_out, [sizes[0]])
            return [validation, *np.split(rng.permutation(calibration), [sizes[1]]), train]
        if keys.groups is not None:
            parts, left = [], np.arange(rows)
            for name, size in zip(DEFAULTS, sizes, strict=True):
                taken = _groups(keys.groups[left], size, rng, name)
                parts.append(left[taken])
                left = left[~taken]
            return [*parts, left]
        if self.is_stratified and keys.labels is not None:
            train, held_out = _apart(_by_class(keys.labels, rng), sum(sizes), rng)
            held_out, ranking = _apart(held_out, sizes[2], rng)
            validation, reference = _apart(held_out, sizes[1], rng)
            return [rng.permutation(part) for part in (validation, reference, ranking, train)]
        return np.split(rng.permutation(rows), np.cumsum(sizes))


def default_rows(split: str, rows: int) -> int:
    share, least, small_share, most = DEFAULTS[split]
    size = max(1, min(max(round(share * rows), min(least, int(small_share * rows))), most))
    if split == "validation":  # of few rows, what calibration leaves of their half
        left = rows // 2 - default_rows("reference", rows) - default_rows("ranking", rows)
        size = max(1, min(size, left))
    return size


def default_test_fraction(rows: int) -> float:
    return min(DEFAULT_TEST_FRACTION, DEFAULT_TEST_ROWS / max(rows, 1))


def hold_out(
    rows: int, test_fraction: float | None, keys: Keys | None = None
) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "T"]]:
    """Return the numbers of the training and of the test rows, each rising: a random share, always
    the same.

    By the keys that are there: the latest rows, whole groups, or of each class its share.
    """
    keys = keys or Keys()
    size = round((default_test_fraction(rows) if test_fraction is None else test_fraction) * rows)
    if not 0 < size < rows:
        expected = f"a share of {rows} rows that leaves some on both sides"
        raise InvalidInput("data.test_fraction", expected, f"{size}")
    rng = np.random.default_rng(TEST_SEED)
    if keys.times is not None:
        order = _by_time(keys.times, rng)
        train, test = order[: rows - size], order[rows - size :]
    elif keys.groups is not None:
        taken = _groups(keys.groups, size, rng, "test")
        train, test = np.flatnonzero(~taken), np.flatnonzero(taken)
    elif keys.labels is not None:
        train, test = _apart(_by_class(keys.labels, rng), size, rng)
    else:
        test, train = np.split(rng.permutation(rows), [size])
    return np.sort(train), np.sort(test)


def _by_time(times: Float64[np.ndarray, "N"], rng: Rng) -> Index:
    shuffled = rng.permutation(len(times))
    return shuffled[np.argsort(times[shuffled], kind="stable")]


def _by_class(labels: Labels, rng: Rng) -> Index:
    """Return rows class by class, in random order within each; classes come as they first appear,
    whatever their numbers.
    """
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(first[inverse][shuffled], kind="stable")]


def _apart(
    order: Labels, size: int, rng: Rng
) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "T"]]:
    """Return the rows that are left, and `size` rows taken at equal steps from a random start
    (systematic sampling): every row is as likely to be taken, and of each class its share, rounded
    up or down.
    """
    places = np.floor((np.arange(size) + rng.uniform()) * (len(order) / size)).astype(np.int64)
    is_taken = np.zeros(len(order), dtype=bool)
    is_taken[np.minimum(places, len(order) - 1)] = True
    return order[~is_taken], order[is_taken]


def _groups(groups: Labels, size: int, rng: Rng, split: str) -> np.ndarray:
    """Return which rows are of groups that, in random order, fit into `size` rows together; refuse
    rows of which no group does."""
    numbers, counts = np.unique(groups, return_counts=True)
    taken, rows = [], 0
    for i in rng.permutation(len(numbers)).tolist():
        if rows + counts[i] <= size:
            taken.append(numbers[i])
            rows += int(counts[i])
    if not taken or len(taken) == len(numbers):
        itself = f"some of which the {split} split can have to itself"
        expected = f"groups of at most {size} rows, {itself}"
        got = f"{len(numbers)} groups of {counts.min()} rows or more"
        raise InvalidInput("data.group", expected, got)
    return np.isin(groups, taken)
