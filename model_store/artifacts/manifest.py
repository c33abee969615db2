"""A version's manifest. See `model_store/README.md` for a specification of its fields."""

import hashlib
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    ValidationError,
    model_validator,
)

from model_store.errors import BrokenArtifact
from model_store.scores.transforms import Transform
from model_store.types import Task

FORMAT_VERSION: Final = 1
FORMAT_MINOR: Final = 0  # raised by fields that older readers can ignore
GRAPHS = ("sampler.onnx", "network.onnx")
FILES = (*GRAPHS, "weights.safetensors", "calibration.safetensors")
TRAINING_ROWS = "training-rows.safetensors"
TOKENIZER = "tokenizer.json"
ENCODER = "encoder.onnx"
OPTIONAL_FILES = (TRAINING_ROWS, TOKENIZER, ENCODER)
ALL_FILES = (*FILES, *OPTIONAL_FILES)
NO_DIGEST = "0" * 64
LARGEST_ID = (1 << 24) - 1  # exact in float32
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

Decimal = Literal[".", ","]
Thousands = Literal[".", ",", " ", "'"]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageSpec(Record):
    """The colour mode of images and the way they are resized.

    Without `resize`, images of another size are rejected. `fit = "stretch"` ignores the aspect
    ratio. `fit = "crop"` resizes the shorter side to `shorter` pixels and crops the centre.
    """

    mode: Literal["L", "RGB"]
    resize: bool = False
    fit: Literal["stretch", "crop"] = "stretch"
    shorter: Annotated[int, Field(ge=1)] | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"


class TextSpec(Record):
    """The settings for tokenizing text into rows of `max_tokens` ids.

    Longer text is truncated on the `truncation` side, and shorter text is padded with `pad_id` on
    the `padding` side. `column` is the text's column in the data.
    """

    column: str
    max_tokens: Annotated[int, Field(ge=1)]
    pad_id: Annotated[int, Field(ge=0)]
    truncation: Literal["left", "right"] = "right"
    padding: Literal["left", "right"] = "right"


class NumberStyle(Record):
    """The format of numbers in text, such as the currency sign and decimal mark.

    With the sign `:`, hours, minutes and seconds such as 1:30:00 are converted to seconds. With
    `is_share`, 12.9 % is .129.
    """

    sign: Literal["", "$", "€", "£", "¥", "%", ":"] = ""
    decimal: Decimal = "."
    thousands: Thousands | None = None
    is_share: bool = False


class StandardisedColumn(Record):
    """A column encoded as (value - mean) / std, with 0 for missing values.

    If `indicator` is set, a last number marks missing values. `usual` is the median, and `mostly`
    the central interval with 90 % of the training rows. If `missing` is false, no training row
    lacks a value, and `usual` replaces missing values of new rows.
    """

    name: str
    mean: FiniteFloat
    std: Annotated[FiniteFloat, Field(gt=0)]
    usual: FiniteFloat | None = None
    mostly: tuple[FiniteFloat, FiniteFloat] | None = None
    indicator: bool
    missing: bool | None = None


class NumericColumn(StandardisedColumn):
    """A column of numbers. If `written` is set, values can be formatted text."""

    kind: Literal["numeric"] = "numeric"
    written: NumberStyle | None = None


class CategoricalColumn(Record):
    """A one-hot encoded column, with an extra number for unknown categories.

    If `indicator` is set, a last number marks missing categories. `usual` is the most frequent
    category. `missing` is defined as in StandardisedColumn.
    """

    name: str
    kind: Literal["categorical"] = "categorical"
    categories: Annotated[tuple[str, ...], Field(min_length=1)]
    usual: str | None = None
    indicator: bool = False
    missing: bool | None = None


# Fields of the input that do not affect the encoding: descriptions of columns, options of files
NOT_ENCODING: dict[str, Any] = {
    "columns": {"__all__": {"usual", "mostly", "missing"}},
    **dict.fromkeys(("missing_values", "id_column", "ignored"), True),
}
Cycle = Literal["year", "week", "day"]


class TimeColumn(StandardisedColumn):
    """A column of dates or times, in seconds since 1970 (UTC).

    Each cycle adds the sine and cosine of the time's phase. `written` is a `strptime` format that
    is accepted in addition to ISO 8601.
    """

    kind: Literal["time"] = "time"
    cycles: tuple[Cycle, ...] = ()
    written: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = None


AnyColumn = NumericColumn | CategoricalColumn | TimeColumn
Column = Annotated[AnyColumn, Field(discriminator="kind")]


class InputSpec(Record):
    """The format of the rows that a model accepts.

    With `columns`, rows are objects keyed by column. With `image`, they can be image files, and
    with `text`, strings. Rows of dtype int32 contain ids from `minimum` to `maximum`, which the
    graph receives as float32. `missing_values` are additional texts of missing cells in files.
    `id_column` contains the row ids in files without a column `id`. Objects can also have the
    `ignored` columns of the training table.
    """

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    dtype: Literal["float32", "int32"] = "float32"
    minimum: float
    maximum: float
    image: ImageSpec | None = None
    columns: tuple[Column, ...] = ()
    text: TextSpec | None = None
    missing_values: tuple[str, ...] = ()
    id_column: str | None = None
    ignored: tuple[str, ...] = ()

    @cached_property
    def encoded(self) -> "InputSpec":
        """The input format for rows that are already encoded."""
        return self.model_copy(update={"columns": ()})

    @cached_property
    def takes_ids(self) -> bool:
        return self.dtype == "int32"

    @model_validator(mode="after")
    def _check_columns(self) -> "InputSpec":
        if self.columns and self.shape != (sum(map(column_width, self.columns)),):
            raise ValueError(f"columns: expected columns that fill the shape {self.shape}")
        return self


def column_width(column: AnyColumn) -> int:
    if isinstance(column, CategoricalColumn):
        return len(column.categories) + 1 + int(column.indicator)
    cycles = column.cycles if isinstance(column, TimeColumn) else ()
    return 1 + 2 * len(cycles) + int(column.indicator)


class ClassSpec(Record):
    classes: Annotated[tuple[str, ...], Field(min_length=2)]
    # Class shares of the training rows
    priors: tuple[Annotated[FiniteFloat, Field(gt=0, lt=1)], ...] | None = None


class TargetSpec(Record):
    """A regression target. The network predicts the transformed target."""

    target: str
    transform: Annotated[Transform, Field(discriminator="kind")] | None = None


class NoiseSpec(Record):
    algorithm: str
    dimension: Annotated[int, Field(ge=1)]
    theta_dimension: Annotated[int, Field(ge=1)]
    paired: bool
    default_draws: Annotated[int, Field(ge=1)]
    # Number of different draws; None: unlimited
    max_draws: Annotated[int, Field(ge=1)] | None = None


class EncoderSpec(Record):
    """The encoder (`encoder.onnx`), which runs before the network.

    In batches of up to `rows_at_once` rows, a row's bits do not depend on the batch.
    """

    outputs: Annotated[int, Field(ge=1)]
    rows_at_once: Annotated[int, Field(ge=1)]


class DetectorNames(Record):
    """The names of the detectors in each role."""

    density: tuple[str, ...] = ()
    two_sided: tuple[str, ...] = ()  # small scores are unusual too
    attributed: tuple[str, ...] = ()  # explained by the network's output `terms`
    combined: Annotated[tuple[str, ...], Field(min_length=1)]  # in the flag's statistic


class DetectorSpec(DetectorNames):
    draw_counts: Annotated[tuple[int, ...], Field(min_length=1)]
    reference_rows: Annotated[int, Field(ge=1)]
    ranking_rows: Annotated[int, Field(ge=1)]
    ranking_copies: Annotated[int, Field(ge=0)] = 0  # duplicates among the ranking rows
    smallest_fpr: Annotated[float, Field(gt=0, lt=1)]
    rows_per_draw_set: Annotated[int, Field(ge=1)] = 1  # in the calibration splits


class CategorySpec(Record):
    """The categories that have separate guarantees (`model_store.conformal.mondrian`).

    `judged_rows` counts the ranking rows that are judged in each category: for classes, the rows
    predicted as that class. `true_rows` counts the rows that belong to it. `column` is the groups'
    column in the data.
    """

    kind: Literal["class", "group"]
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    column: str | None = None
    judged_rows: tuple[Annotated[int, Field(ge=0)], ...]
    true_rows: tuple[Annotated[int, Field(ge=0)], ...]


class AbstentionSpec(Record):
    confidence: Annotated[float, Field(gt=0, lt=1)]
    # At the default draws and a false-positive rate of .05
    smallest_risk: Annotated[float, Field(gt=0, le=1)]
    risk: Annotated[float, Field(gt=0, lt=1)] | None = None  # default of requests


class FileSpec(Record):
    sha256: Sha256
    size: Annotated[int, Field(ge=0)]

    def check(self, size: int, sha256: str) -> None:
        """Raise ValueError if the size or digest of a file differs."""
        if size != self.size:
            raise ValueError(f"expected {self.size} bytes as in the manifest, got {size}")
        if sha256 != self.sha256:
            raise ValueError("its SHA-256 is not the manifest's")


class Description(Record):
    """The manifest fields set by training."""

    method: str
    task: Task
    input: InputSpec
    output: ClassSpec | TargetSpec
    noise: NoiseSpec
    encoder: EncoderSpec | None = None
    detectors: DetectorSpec
    abstention: AbstentionSpec | None = None
    categories: CategorySpec | None = None
    too_few_rows: str | None = None  # guarantees that the calibration rows cannot support
    training: dict[str, Any]
    precision: Literal["float32", "int8"] = "float32"
    quality: dict[str, float]
    # Figures of simple models on the test rows
    baselines: dict[str, dict[str, FiniteFloat]] = {}
    warnings: tuple[str, ...] = ()  # problems of the fit
    parity: dict[str, float]

    @model_validator(mode="after")
    def _check_task(self) -> "Description":
        is_classification = self.task == "classification"
        expected = f"expected the one of task {self.task}, got another"
        if isinstance(self.output, ClassSpec) != is_classification:
            raise ValueError(f"output: {expected}")
        if (self.abstention is not None) != is_classification:
            raise ValueError(f"abstention: {expected}")
        categories = self.categories
        is_by_class = categories is not None and categories.kind == "class"
        if categories is not None and is_by_class and categories.names != self.classes:
            received = list(categories.names)[:20]
            raise ValueError(f"categories.names: expected the classes, got {received}")
        return self

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        return self.output.classes if isinstance(self.output, ClassSpec) else None

    @cached_property
    def priors(self) -> tuple[float, ...] | None:
        """The class shares of the training rows, or None for regression or if unknown."""
        return self.output.priors if isinstance(self.output, ClassSpec) else None

    @cached_property
    def target(self) -> str | None:
        return self.output.target if isinstance(self.output, TargetSpec) else None

    @cached_property
    def transform(self) -> Transform | None:
        return self.output.transform if isinstance(self.output, TargetSpec) else None

    @cached_property
    def num_labels(self) -> int:
        return len(self.output.classes) if isinstance(self.output, ClassSpec) else 1

    @cached_property
    def output_size(self) -> int:
        return len(self.output.classes) if isinstance(self.output, ClassSpec) else 2


class Manifest(Description):
    format_version: Literal[1]
    format_minor: Annotated[int, Field(ge=0)] = FORMAT_MINOR
    name: Name
    version: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,8}$")]
    created: AwareDatetime
    files: dict[str, FileSpec]
    digest: Sha256  # of the manifest itself: `manifest_digest`

    @model_validator(mode="after")
    def _check_files(self) -> "Manifest":
        if not set(FILES) <= set(self.files) <= set(ALL_FILES):
            raise ValueError(f"files: expected {sorted(FILES)}, got {sorted(self.files)}")
        if (TOKENIZER in self.files) != (self.input.text is not None):
            raise ValueError(f"files: expected {TOKENIZER} if and only if there is input.text")
        if (ENCODER in self.files) != (self.encoder is not None):
            raise ValueError(f"encoder: expected it if and only if there is a file {ENCODER}")
        return self

    @cached_property
    def label(self) -> str:
        return f"{self.name} version {self.version}"

    def broken(self, file: str, reason: str) -> BrokenArtifact:
        return BrokenArtifact(self.name, self.version, file, reason)


def manifest_digest(text: bytes, digest: str) -> str:
    """Compute a manifest's SHA-256 digest with its `digest` field set to zeros."""
    field, zeros = (f'"digest": "{value}"'.encode() for value in (digest, NO_DIGEST))
    return hashlib.sha256(text.replace(field, zeros, 1)).hexdigest()


def first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field}: {first['msg']}" if field else str(first["msg"])
