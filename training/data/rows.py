"""Rows, data sets, and their splits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, Shaped, UInt8

from model_store.artifacts.manifest import (
    DESCRIPTIVE_FIELDS,
    FILE_FIELDS,
    ImageSpec,
    InputSpec,
    TextSpec,
)
from model_store.errors import InvalidInput
from model_store.sources.columns import Columns
from training.data.splitting import Keys, SplitSizes

MAX_CLASSES = 1000
MAX_SHOWN = 20
DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class Rows:
    """Input rows in the source's units, with their class numbers or targets.

    Pixels stay bytes until a batch needs float32. `ids` are a column's values, file names, or
    numbers from 0.
    """

    x: Float32[np.ndarray, "N I"] | UInt8[np.ndarray, "N I"]
    y: Int64[np.ndarray, "N"] | Float32[np.ndarray, "N"] | Float64[np.ndarray, "N"]
    ids: Shaped[np.ndarray, "N"] | None = None
    groups: Int64[np.ndarray, "N"] | None = None  # group numbers
    is_seen: Bool[np.ndarray, "N"] | None = None  # by a pretrained network

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: Int64[np.ndarray, "M"]) -> "Rows":
        ids, groups, is_seen = (
            None if key is None else key[index] for key in (self.ids, self.groups, self.is_seen)
        )
        return Rows(self.x[index], self.y[index], ids, groups, is_seen)

    @property
    def unseen(self) -> "Rows":
        return self if self.is_seen is None else self.take(np.flatnonzero(~self.is_seen))


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

    @property
    def rows(self) -> Rows:
        """The training rows not seen in pretraining, followed by the test rows."""
        train, test = self.train.unseen, self.test
        groups = None
        if train.groups is not None and test.groups is not None:
            groups = np.concatenate([train.groups, test.groups])
        x, y = np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y])
        return Rows(x, y, groups=groups)

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
        """Compute the SHA-256 digest of all rows."""
        described: dict[str, Any] = {
            "columns": {"__all__": DESCRIPTIVE_FIELDS},
            **dict.fromkeys(FILE_FIELDS, True),
        }
        spec = self.input.model_dump(exclude=described)
        # Later manifest fields count only if they are set, so that old digests stay valid.
        for column in spec["columns"]:
            if column["kind"] == "categorical" and not column["indicator"]:
                del column["indicator"]
        if self.text is None:
            del spec["text"]
        if self.image is not None:
            always = {"mode": self.image.mode, "resize": self.image.resize}
            spec["image"] = always | self.image.model_dump(exclude_defaults=True)
        digest = sha256(repr((spec, self.classes)).encode())
        for rows in (self.train, self.test):
            digest.update(np.ascontiguousarray(rows.x).data)
            digest.update(np.ascontiguousarray(rows.y).data)
        if self.train.is_seen is not None:
            digest.update(self.train.is_seen.data)
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
    parts = sizes.split(len(data.train), keys)
    *held_out, train = map(data.train.take, parts)
    validation, reference, ranking = (rows.unseen for rows in held_out)
    if not min(len(validation), len(reference), len(ranking)):
        expected = "validation, reference and ranking rows that the network was not trained on"
        received = f"{len(validation)}, {len(reference)} and {len(ranking)}"
        raise InvalidInput("data.trained_on", expected, received)
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
) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "T"], tuple[str, ...]]:
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


def class_shares(y: Int64[np.ndarray, "N"], classes: int) -> Float64[np.ndarray, "C"]:
    shares: np.ndarray = np.bincount(y, minlength=classes) / len(y)
    return shares


def class_weights(
    config: Literal["balanced"] | dict[str, float],
    classes: Sequence[str],
    y: Int64[np.ndarray, "N"],
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
    weighted: np.ndarray = weights / (shares @ weights)
    return weighted
