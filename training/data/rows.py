"""Rows, data sets, and their splits into training, validation, calibration and test rows.

Splits are random. A recipe can also split by class, by group or by time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, Shaped, UInt8

from model_store.artifacts.manifest import NOT_ENCODING, ImageSpec, InputSpec, TextSpec
from model_store.errors import InvalidInput
from model_store.sources.columns import Columns

if TYPE_CHECKING:
    from training.recipe import Recipe

MAX_CLASSES = 1000
MAX_SHOWN = 20
DIGEST_BYTES = 16
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
Index = Int64[np.ndarray, "M"]
Labels = Int64[np.ndarray, "N"]
Train = Int64[np.ndarray, "R"]
Test = Int64[np.ndarray, "T"]


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
            order = _order_by_class(keys.labels, rng)
            train, held_out = _split_systematically(order, sum(sizes), rng)
            held_out, ranking = _split_systematically(held_out, sizes[2], rng)
            validation, reference = _split_systematically(held_out, sizes[1], rng)
            return [rng.permutation(part) for part in (validation, reference, ranking, train)]
        return np.split(rng.permutation(rows), np.cumsum(sizes))


def split_sizes(recipe: "Recipe") -> SplitSizes:
    section = recipe.data
    sizes = section.validation, section.reference, section.ranking
    return SplitSizes(*sizes, recipe.seed, section.is_stratified)


def default_rows(split: str, rows: int) -> int:
    share, min_rows, small_share, max_rows = DEFAULT_SIZES[split]
    size = max(1, min(max(round(share * rows), min(min_rows, int(small_share * rows))), max_rows))
    if split == "validation":  # Calibration has priority in small sets.
        left = rows // 2 - default_rows("reference", rows) - default_rows("ranking", rows)
        size = max(1, min(size, left))
    return size


def default_test_fraction(rows: int) -> float:
    return min(DEFAULT_TEST_FRACTION, DEFAULT_TEST_ROWS / max(rows, 1))


def hold_out(rows: int, test_fraction: float | None, keys: Keys = NO_KEYS) -> tuple[Train, Test]:
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


def _split_systematically(order: Labels, size: int, rng: Rng) -> tuple[Train, Test]:
    """Draw a systematic sample of `size` rows, at equal steps from a random start.

    Returns the other rows and the sample. Every row is equally likely, and each
    class keeps its share, rounded up or down.
    """
    places = np.floor((np.arange(size) + rng.uniform()) * (len(order) / size)).astype(np.int64)
    is_taken = np.zeros(len(order), dtype=bool)
    is_taken[np.minimum(places, len(order) - 1)] = True
    return order[~is_taken], order[is_taken]


def _select_groups(groups: Labels, size: int, rng: Rng, split: str) -> np.ndarray:
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


@dataclass(frozen=True, eq=False)
class Rows:
    """Input rows in the source's units, with their class numbers or targets.

    Pixels stay bytes until a batch needs float32. `ids` are a column's values, file names, or
    numbers from 0.
    """

    x: Float32[np.ndarray, "N I"] | UInt8[np.ndarray, "N I"]
    y: Labels | Float32[np.ndarray, "N"] | Float64[np.ndarray, "N"]
    ids: Shaped[np.ndarray, "N"] | None = None
    groups: Labels | None = None  # group numbers
    weights: Float64[np.ndarray, "N"] | None = None  # in training; equal by default

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: Index) -> "Rows":
        optional = self.ids, self.groups, self.weights
        rest = (None if values is None else values[index] for values in optional)
        return Rows(self.x[index], self.y[index], *rest)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set with flattened training and test rows.

    `shape` is an input's shape before flattening. Regression has no `classes`. Rows are encoded
    `columns`, an `image`, ids (`takes_ids`) or tokens of `text`. Training rows are split by
    `groups` or `times`. `left_out` contains the test rows of excluded classes.
    """

    train: Rows
    test: Rows
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    minimum: float
    maximum: float
    columns: Columns = ()
    image: ImageSpec | None = None
    left_out: Float32[np.ndarray, "L I"] | UInt8[np.ndarray, "L I"] | None = None
    groups: Int64[np.ndarray, "R"] | None = None
    times: Float64[np.ndarray, "R"] | None = None
    group_names: tuple[str, ...] = ()
    takes_ids: bool = False
    text: TextSpec | None = None
    tokenizer: bytes | None = None  # content of the tokenizer's file
    missing_values: tuple[str, ...] = ()  # texts of missing cells
    id_column: str | None = None
    ignored: tuple[str, ...] = ()  # unused columns of the table
    is_held_out: bool = False  # test rows were split off the source
    is_seen: Bool[np.ndarray, "R"] | None = None  # training rows, by a pretrained network

    @property
    def rows(self) -> Rows:
        """The training rows not seen in pretraining, followed by the test rows."""
        train, test = self.train, self.test
        if self.is_seen is not None:
            train = train.take(np.flatnonzero(~self.is_seen))
        groups = None
        if train.groups is not None and test.groups is not None:
            groups = np.concatenate([train.groups, test.groups])
        x, y = np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y])
        return Rows(x, y, groups=groups)

    def unseen(self, index: Index) -> Index:
        """Select the training rows that were not seen in pretraining."""
        return index if self.is_seen is None else index[~self.is_seen[index]]

    @property
    def input(self) -> InputSpec:
        return InputSpec(
            shape=self.shape,
            dtype="int32" if self.takes_ids else "float32",
            minimum=self.minimum,
            maximum=self.maximum,
            image=self.image,
            columns=tuple(self.columns),
            text=self.text,
            missing_values=self.missing_values,
            id_column=self.id_column,
            ignored=self.ignored,
        )

    def digest(self) -> str:
        spec = self.input.model_dump(exclude=NOT_ENCODING)
        digest = sha256(repr((spec, self.classes)).encode())
        for rows in (self.train, self.test):
            digest.update(np.ascontiguousarray(rows.x).data)
            digest.update(np.ascontiguousarray(rows.y).data)
        for extra in (self.is_seen, self.train.weights):
            if extra is not None:
                digest.update(extra.data)
        return digest.hexdigest()


def row_digest(row: Shaped[np.ndarray, "I"]) -> bytes:
    """Hash a row's numbers, so that equal bytes and floats have equal digests."""
    content = np.ascontiguousarray(row, dtype=np.float32).data
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def is_image(shape: tuple[int, ...]) -> bool:
    """Check whether a shape is (height, width) or (channels, height, width)."""
    return len(shape) in (2, 3)


@dataclass(frozen=True, eq=False)
class Splits:
    train: Rows
    validation: Rows  # selects the checkpoint
    reference: Rows  # distribution of the detectors' scores
    ranking: Rows  # distribution of the flag's statistic
    test: Rows


def split(data: Dataset, sizes: SplitSizes) -> Splits:
    keys = Keys(data.train.y if data.classes else None, data.groups, data.times)
    *held_out, train_index = sizes.split(len(data.train), keys)
    train = data.train.take(train_index)
    validation, reference, ranking = (data.train.take(data.unseen(part)) for part in held_out)
    if not min(len(validation), len(reference), len(ranking)):
        expected = "validation, reference and ranking rows that the network was not trained on"
        received = f"{len(validation)}, {len(reference)} and {len(ranking)}"
        raise InvalidInput("data.trained_on", expected, received)
    if train.weights is not None and not train.weights.any():
        expected = "a training row with a positive weight"
        raise InvalidInput("data.weight", expected, f"only zeros in {len(train)} rows")
    absent = sorted(set(range(len(data.classes))) - set(train.y.tolist()))[:MAX_SHOWN]
    if absent:
        names = [data.classes[c] for c in absent]
        labels = np.concatenate([data.train.y, data.test.y])
        received = f"none of {names}, which have {[int((labels == c).sum()) for c in absent]} rows"
        remedy = "leave a class out by --leave-out or data.leave_out, or merge it with another"
        raise InvalidInput("data.source", f"training rows of every class ({remedy})", received)
    if not data.classes and np.ptp(train.y) == 0:
        received = f"only {float(train.y[0])}"
        raise InvalidInput("data.target", "different training targets", received)
    return Splits(train, validation, reference, ranking, data.test)


def leave_out(data: Dataset, names: Sequence[str]) -> Dataset:
    """Remove classes from a data set, and move their test rows to `left_out`.

    The encoding of columns does not change. For tables, `training.data.tables` removes classes
    before it fits the encoding.
    """
    if not names:
        return data
    classes = classes_without(data.classes, names)
    index = [classes.index(name) if name in classes else -1 for name in data.classes]
    number = np.array(index, dtype=np.int64)

    def select(rows: Rows) -> Rows:
        y = number[rows.y]
        return replace(rows, y=y).take(np.flatnonzero(y >= 0))

    left_out = data.test.x[number[data.test.y] < 0]
    train, test = select(data.train), select(data.test)
    return replace(data, train=train, test=test, classes=tuple(classes), left_out=left_out)


def classes_without(classes: Sequence[str], names: Sequence[str]) -> list[str]:
    unknown = [name for name in names if name not in classes]
    if unknown:
        expected = f"some of {list(classes)[:MAX_SHOWN]}"
        raise InvalidInput("data.leave_out", expected, f"{unknown[:MAX_SHOWN]}")
    remaining = [name for name in classes if name not in names]
    if len(remaining) < 2:
        raise InvalidInput("data.leave_out", "at least two remaining classes", f"{remaining}")
    return remaining


def renumber(data: Dataset, classes: Sequence[str]) -> Dataset:
    """Renumber classes in the order of `classes`, which can include unused classes."""
    unknown = [name for name in data.classes if name not in classes]
    if unknown:
        expected = f"rows of the classes {list(classes)[:MAX_SHOWN]}"
        raise InvalidInput("data.source", expected, f"rows of {unknown[:MAX_SHOWN]}"[:300])
    if not data.classes:
        return data
    number = np.array([classes.index(name) for name in data.classes], dtype=np.int64)
    train, test = (replace(rows, y=number[rows.y]) for rows in (data.train, data.test))
    return replace(data, train=train, test=test, classes=tuple(classes))


def class_numbers(
    train: Sequence[str], test: Sequence[str], field: str
) -> tuple[Train, Test, tuple[str, ...]]:
    """Map labels to numbers in sorted order; numeric labels are sorted by value."""
    classes = sorted({*train, *test}, key=_by_value)
    if not 2 <= len(classes) <= MAX_CLASSES:
        raise InvalidInput(field, f"labels of 2 to {MAX_CLASSES} classes", f"{len(classes)}")
    try:
        "".join(classes).encode()
    except UnicodeEncodeError:
        raise InvalidInput(field, "labels that can be encoded as UTF-8", "others") from None
    index = {label: i for i, label in enumerate(classes)}
    y, y_test = (np.array([index[name] for name in part], dtype=np.int64) for part in (train, test))
    return y, y_test, tuple(classes)


def _by_value(label: str) -> tuple[float, str]:
    try:
        return float(label), label
    except ValueError:
        return float("inf"), label


def class_shares(y: Labels, classes: int) -> Float64[np.ndarray, "C"]:
    return np.bincount(y, minlength=classes) / len(y)


def class_weights(
    config: Literal["balanced"] | dict[str, float], classes: Sequence[str], y: Labels
) -> Float64[np.ndarray, "C"]:
    """Compute class weights for a fit, with a mean of 1 over the rows.

    `balanced` weights are inverse to the class shares. In a table, the default weight is 1.
    """
    shares = class_shares(y, len(classes))
    if isinstance(config, str):
        weights = 1.0 / shares
    else:
        unknown = [name for name in config if name not in classes]
        if unknown:
            expected = f"some of {list(classes)[:MAX_SHOWN]}"
            raise InvalidInput("data.class_weights", expected, repr(unknown[0])[:100])
        weights = np.array([config.get(name, 1.0) for name in classes])
    return weights / (shares @ weights)
