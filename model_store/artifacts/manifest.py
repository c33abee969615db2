"""The manifest of an artifact. `model_store/README.md` specifies it field by field."""

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
    model_validator,
)

from model_store.errors import BrokenArtifact
from model_store.scores.transforms import Transform
from model_store.types import DetectorNames, Task

FORMAT_VERSION: Final = 1
# Of the scores' definition: before 2 standard errors were others, before 3 epistemic variances
SCORES_VERSION: Final = 3
GRAPHS = ("sampler.onnx", "network.onnx")
FILES = (*GRAPHS, "weights.safetensors", "calibration.safetensors")
TRAINING_ROWS = "training-rows.safetensors"
TOKENIZER = "tokenizer.json"
ENCODER = "encoder.onnx"
OPTIONAL_FILES = (TRAINING_ROWS, TOKENIZER, ENCODER)
ALL_FILES = (*FILES, *OPTIONAL_FILES)
NO_DIGEST = "0" * 64
LARGEST_ID = (1 << 24) - 1  # of rows of ids: every whole number up to it is one of float32
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

Decimal = Literal[".", ","]
Thousands = Literal[".", ",", " ", "'"]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Record(BaseModel):
    """A frozen record that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageSpec(Record):
    """That a row is an image: how many channels its pixels have, and what is done with one of
    another size.

    Without `resize` it is refused. `fit` says how it is brought to the model's shape: "stretch"
    resizes it, whatever its sides; "crop" resizes it so that its shorter side has `shorter` pixels,
    its sides in proportion, and cuts out the centre.
    """

    mode: Literal["L", "RGB"]
    resize: bool = False
    fit: Literal["stretch", "crop"] = "stretch"
    shorter: Annotated[int, Field(ge=1)] | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    @model_validator(mode="after")
    def _is_resized_one_way(self) -> "ImageSpec":
        is_cropped = self.fit == "crop"
        if is_cropped != (self.shorter is not None) or (is_cropped and not self.resize):
            expected = "a number of pixels with resize and fit = crop, or neither"
            raise ValueError(f"shorter: expected {expected}")
        return self


class TextSpec(Record):
    """That a row is text, as ids of tokens (`tokenizer.json`): always `max_tokens` of them.

    Longer text loses what is at the `truncation` side, shorter text is padded by `pad_id` at the
    `padding` side. `column` is that of the text in the data.
    """

    column: str
    max_tokens: Annotated[int, Field(ge=1)]
    pad_id: Annotated[int, Field(ge=0)]
    truncation: Literal["left", "right"] = "right"
    padding: Literal["left", "right"] = "right"


class NumberWriting(Record):
    """How a column's numbers were written: their sign, if any, the decimal mark, and what groups
    thousands, if so."""

    sign: Literal["", "$", "€", "£", "¥", "%"] = ""
    decimal: Decimal = "."
    thousands: Thousands | None = None


class NumericColumn(Record):
    """A column of numbers, encoded as (value - mean) / std, a missing value as 0.

    With an `indicator` a further number says whether the value was missing. With `written` a text
    is read as well. `usual` is the median, and nine tenths of the training rows lie in `mostly`, a
    twentieth on either side of it. Where `missing` is false no training row misses the value, so
    the network knows nothing of such rows, and they are refused; versions before it do not say, and
    take them.
    """

    name: str
    kind: Literal["numeric"] = "numeric"
    mean: FiniteFloat
    std: Annotated[FiniteFloat, Field(gt=0)]
    usual: FiniteFloat | None = None
    mostly: tuple[FiniteFloat, FiniteFloat] | None = None
    indicator: bool
    missing: bool | None = None
    written: NumberWriting | None = None


class CategoricalColumn(Record):
    """A column of categories: a number for each, and a last one that says that the value is another
    or missing.

    `usual` is the most frequent one; `missing` is as of numbers.
    """

    name: str
    kind: Literal["categorical"] = "categorical"
    categories: Annotated[tuple[str, ...], Field(min_length=1)]
    usual: str | None = None
    missing: bool | None = None


# What of columns tells of the data, and is no part of how rows are read
DESCRIBING: set[str] = {"usual", "mostly", "missing"}
# What of an input tells how files of rows are read
OF_FILES: set[str] = {"missing_values", "id_column"}
Cycle = Literal["year", "week", "day"]


class TimeColumn(Record):
    """A column of dates or times: (time - mean) / std, in seconds since 1970 in UTC, and for each
    of `cycles` the sine and cosine of where in it the time is; a missing value as 0.

    With an `indicator` a further number says whether the value was missing. `usual`, `mostly` and
    `missing` are as of numbers. With `written`, the format of a date as Python's strptime takes it,
    a text so written is read besides ISO 8601.
    """

    name: str
    kind: Literal["time"] = "time"
    mean: FiniteFloat
    std: Annotated[FiniteFloat, Field(gt=0)]
    usual: FiniteFloat | None = None
    mostly: tuple[FiniteFloat, FiniteFloat] | None = None
    cycles: tuple[Cycle, ...] = ()
    indicator: bool
    missing: bool | None = None
    written: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = None


AnyColumn = NumericColumn | CategoricalColumn | TimeColumn
Column = Annotated[AnyColumn, Field(discriminator="kind")]


class InputSpec(Record):
    """A row as a caller sends it, in the units of the data that the model was fitted on.

    With `columns` a caller may send objects keyed by column, and `shape` is that of the rows they
    are encoded to; with `image`, PNG, JPEG, WebP and BMP files. Of dtype int32 they are ids: whole
    numbers from `minimum` to `maximum`, at most `LARGEST_ID`. Up to there float32 holds every whole
    number, so arrays of ids, too, are float32 wherever rows are computed with, and the graph's
    input `x` is; the network makes them integers. With `text` they are those of tokens, and a
    caller may send strings. `missing_values` and `id_column` are of files: what cells say that are
    missing, besides what always is, and the column that names rows where none is called `id`.
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

    @cached_property
    def encoded(self) -> "InputSpec":
        """The same of rows that come encoded: numbers, whatever columns these were made of."""
        return self.model_copy(update={"columns": ()})

    @cached_property
    def takes_ids(self) -> bool:
        """Whether rows are ids: numbers that name things and have no size."""
        return self.dtype == "int32"

    @model_validator(mode="after")
    def _has_ids_that_are_whole(self) -> "InputSpec":
        ends = low, high = self.minimum, self.maximum
        if self.takes_ids:
            if not (0 <= low <= high <= LARGEST_ID and low == int(low) and high == int(high)):
                expected = f"whole numbers from 0 to {LARGEST_ID}"
                raise ValueError(f"minimum, maximum: expected {expected}, got {ends}")
            if self.image is not None or self.columns:
                raise ValueError("dtype: expected float32 of images and columns, got int32")
        if self.text is not None:
            if not self.takes_ids or self.shape != (self.text.max_tokens,):
                raise ValueError("text: expected int32 and a shape of max_tokens, got others")
            if not low <= self.text.pad_id <= high:
                raise ValueError(f"text.pad_id: expected {low:.0f} to {high:.0f}, got another")
        return self

    @model_validator(mode="after")
    def _goes_with_its_shape(self) -> "InputSpec":
        shape, image = self.shape, self.image
        if image is not None:
            if len(shape) != 2 and not (len(shape) == 3 and shape[0] == 3):
                raise ValueError(f"image: expected a shape of (H, W) or (3, H, W), got {shape}")
            if (len(shape) == 2) != (image.mode == "L"):
                expected = "L for (H, W) and RGB for (3, H, W)"
                raise ValueError(f"image.mode: expected {expected}, got {image.mode}")
            if image.shorter is not None and image.shorter < max(shape[-2:]):
                raise ValueError(f"image.shorter: expected at least the longer side of {shape}")
        if self.columns and shape != (sum(map(column_width, self.columns)),):
            expected = f"as many numbers as in shape {shape}"
            raise ValueError(f"columns: expected {expected}, got another number")
        return self


def column_width(column: AnyColumn) -> int:
    if isinstance(column, CategoricalColumn):
        return len(column.categories) + 1
    cycles = column.cycles if isinstance(column, TimeColumn) else ()
    return 1 + 2 * len(cycles) + int(column.indicator)


class ClassSpec(Record):
    classes: Annotated[tuple[str, ...], Field(min_length=2)]
    # That probabilities are of
    priors: tuple[Annotated[FiniteFloat, Field(gt=0, lt=1)], ...] | None = None

    @model_validator(mode="after")
    def _has_a_prior_for_each(self) -> "ClassSpec":
        if self.priors is not None and (
            len(self.priors) != len(self.classes) or abs(sum(self.priors) - 1.0) > 1e-6
        ):
            raise ValueError("priors: expected a share for each class, that sum to 1, got others")
        return self


class TargetSpec(Record):
    """What the network gives for each draw and row of a regression: mean and log variance, in the
    target's units.

    With a `transform` they are of the transformed target.
    """

    target: str
    transform: Annotated[Transform, Field(discriminator="kind")] | None = None


class NoiseSpec(Record):
    """The noise of a draw, and the draw that the sampler makes of it."""

    algorithm: str
    dimension: Annotated[int, Field(ge=1)]
    theta_dimension: Annotated[int, Field(ge=1)]
    paired: bool
    default_draws: Annotated[int, Field(ge=1)]
    # How many different draws there are; None: without end
    max_draws: Annotated[int, Field(ge=1)] | None = None


class EncoderSpec(Record):
    """What comes before the network, in a file of its own: `encoder.onnx`, from a row to what the
    network takes.

    `rows_at_once` rows are encoded together. Where there are several, the numbers of a row may
    differ by `difference` from those that it gets alone, as a part of the largest of them; 0 where
    they are the same bits.
    """

    outputs: Annotated[int, Field(ge=1)]
    rows_at_once: Annotated[int, Field(ge=1)]
    difference: Annotated[FiniteFloat, Field(ge=0)] = 0.0


class DetectorSpec(Record):
    """How the flag was calibrated."""

    density: tuple[str, ...]
    two_sided: tuple[str, ...] = ()
    # Whose scores network.onnx divides among the numbers of a row, in its order
    attributed: tuple[str, ...] = ()
    combined: Annotated[tuple[str, ...], Field(min_length=1)]
    draw_counts: Annotated[tuple[int, ...], Field(min_length=1)]
    reference_rows: Annotated[int, Field(ge=1)]
    ranking_rows: Annotated[int, Field(ge=1)]
    smallest_fpr: Annotated[float, Field(gt=0, lt=1)]
    rows_per_draw_set: Annotated[int, Field(ge=1)] = 1  # of the calibration splits
    tail: Literal["predictive"] = "predictive"  # how surprisals go on beyond the reference scores
    scores_version: Literal[3] = SCORES_VERSION

    @cached_property
    def names(self) -> DetectorNames:
        """Which are combined, densities, two-sided and attributed."""
        return DetectorNames(self.combined, self.density, self.two_sided, self.attributed)

    @model_validator(mode="after")
    def _two_sided_and_attributed_are_densities(self) -> "DetectorSpec":
        for field in ("two_sided", "attributed"):
            if not set(got := getattr(self, field)) <= set(self.density):
                raise ValueError(f"{field}: expected some of {list(self.density)}, got {list(got)}")
        return self


class CategorySpec(Record):
    """That guarantees hold of each category by itself: `model_store.conformal.mondrian`.

    Of each name `judged_rows` ranking rows are judged in it (by class: have it as their label at
    the default draws), and `true_rows` truly belong to it. `column` is that of the groups in the
    data.
    """

    kind: Literal["class", "group"]
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    column: str | None = None
    judged_rows: tuple[Annotated[int, Field(ge=0)], ...]
    true_rows: tuple[Annotated[int, Field(ge=0)], ...]

    @model_validator(mode="after")
    def _has_numbers_of_each(self) -> "CategorySpec":
        if not len(self.names) == len(self.judged_rows) == len(self.true_rows):
            raise ValueError(
                f"judged_rows, true_rows: expected a number for each of {len(self.names)} names"
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError("names: expected different ones, got one twice")
        return self


class AbstentionSpec(Record):
    """How a classification was calibrated to leave rows undecided:
    `model_store.conformal.abstention`."""

    confidence: Annotated[float, Field(gt=0, lt=1)]
    # At the default draws and a false-positive rate of .05
    smallest_risk: Annotated[float, Field(gt=0, le=1)]
    risk: Annotated[float, Field(gt=0, lt=1)] | None = None  # of a request that names none


class FileSpec(Record):
    sha256: Sha256
    size: Annotated[int, Field(ge=0)]

    def difference(self, size: int, sha256: str) -> str | None:
        if size != self.size:
            return f"expected {self.size} bytes as in the manifest, got {size}"
        return None if sha256 == self.sha256 else "its SHA-256 is not the manifest's"


class Description(Record):
    """What training says of a model: all of the manifest that the store does not add when it
    publishes."""

    method: str
    task: Task
    input: InputSpec
    output: ClassSpec | TargetSpec
    noise: NoiseSpec
    encoder: EncoderSpec | None = None
    detectors: DetectorSpec
    abstention: AbstentionSpec | None = None
    categories: CategorySpec | None = None
    too_few_rows: str | None = None  # what the calibration rows cannot bear, in words
    training: dict[str, Any]
    precision: Literal["float32", "int8"] = "float32"
    quality: dict[str, float]
    # Of a table: what plain models reach on the rows of `quality`, by name and figure
    baselines: dict[str, dict[str, FiniteFloat]] = {}
    warnings: tuple[str, ...] = ()  # what is wrong with the fit, in words
    parity: dict[str, float]

    @model_validator(mode="after")
    def _output_goes_with_its_task(self) -> "Description":
        is_classification = self.task == "classification"
        expected = f"expected what goes with task {self.task}, got that of another"
        if isinstance(self.output, ClassSpec) != is_classification:
            raise ValueError(f"output: {expected}")
        if (self.abstention is not None) != is_classification:
            raise ValueError(f"abstention: {expected}")
        of_rows = self.categories
        if of_rows is not None and of_rows.kind == "class" and of_rows.names != self.classes:
            got = list(of_rows.names)[:20]
            raise ValueError(f"categories.names: expected the classes, got {got}")
        return self

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        return self.output.classes if isinstance(self.output, ClassSpec) else None

    @cached_property
    def priors(self) -> tuple[float, ...] | None:
        """The shares of the classes that probabilities are of; None of a regression, and where they
        are not known."""
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
    name: Name
    version: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,8}$")]
    created: AwareDatetime
    files: dict[str, FileSpec]
    digest: Sha256  # of the manifest itself: `manifest_digest`

    @model_validator(mode="after")
    def _holds_the_required_files(self) -> "Manifest":
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


def manifest_digest(text: bytes, written: str) -> str:
    """Return the SHA-256 of a manifest's bytes, with the digest that is `written` in it as
    zeros."""
    field, without = (f'"digest": "{digest}"'.encode() for digest in (written, NO_DIGEST))
    return hashlib.sha256(text.replace(field, without, 1)).hexdigest()
