"""The base class for recipe sections, and the sections for data and networks."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from model_store.artifacts.manifest import LARGEST_ID
from model_store.sources.cells import is_date_format
from training.networks.architectures import ARCHITECTURES, mlp

Count = Annotated[int, Field(ge=1)]
LogStd = Annotated[float, Field(ge=-20, le=2)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """The base class for recipe sections.

    In each pair of `requires`, the first key requires the second. Keys in a pair of `excludes`
    cannot be combined.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requires: ClassVar[Sequence[tuple[str, str]]] = ()
    excludes: ClassVar[Sequence[tuple[str, str]]] = ()

    def has(self, key: str) -> bool:
        """Check whether a key has a non-default value."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    def refuse(self, expected: str, *path: str | int) -> NoReturn:
        """Raise a `ValidationError` for the key at a path."""
        value: Any = self
        for part in path:
            value = value[part] if isinstance(part, int) else getattr(value, part)
        error = PydanticCustomError("combination", "{expected}", {"expected": expected})
        raise ValidationError.from_exception_data(
            type(self).__name__, [{"type": error, "loc": path, "input": value}]
        )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        for key, other in self.excludes:
            if self.has(key) and self.has(other):
                self.refuse(f"no value with {other}", key)
        for key, other in self.requires:
            if self.has(key) and not self.has(other):
                self.refuse(f"no value without {other}", key)
        return self


def _check_size(size: Any) -> Any:
    if (type(size) is int and size >= 1) or (type(size) is float and 0 < size < 0.5):
        return size
    raise ValueError("a number of rows, or a share above 0 and below 0.5")


SplitSize = Annotated[int | float, BeforeValidator(_check_size)]
Side = Annotated[int, Field(ge=1, le=4096)]  # pixels


class DataSection(Section):
    """The `[data]` section: the source, its columns and the split sizes."""

    requires = (
        ("text", "tokenizer"),
        ("tokenizer", "text"),
        ("max_tokens", "text"),
        ("image_resize", "image_size"),
        ("image_interpolation", "image_size"),
    )
    excludes = (("time", "group"),)

    source: str
    trained_on: str | None = None
    validation: SplitSize | None = None
    reference: SplitSize | None = None
    ranking: SplitSize | None = None
    group: str | None = None
    calibration_group: str | None = None
    time: str | None = None
    id: str | None = None
    target: str | None = None
    weight: str | None = None
    class_weights: Literal["balanced"] | dict[str, Positive] | None = None
    target_transform: Literal["auto", "none", "log", "rank"] = "none"
    columns: dict[str, Literal["numeric", "categorical", "time", "ignored"]] = Field(default={})
    missing_values: list[str] = Field(default=[])
    date_format: str | None = None
    encoding: str | None = None
    delimiter: Annotated[str, StringConstraints(pattern=r"^[^\r\n\"]$")] | None = None
    decimal: Literal[".", ","] | None = None
    thousands: Literal[".", ",", " ", "'"] | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    image_size: Annotated[list[Side], Field(min_length=2, max_length=2)] | None = None
    image_resize: Side | None = None
    image_interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    leave_out: list[str] = Field(default=[])
    vocabulary: Annotated[int, Field(ge=2, le=LARGEST_ID + 1)] | Literal["auto"] | None = None
    text: str | None = None
    tokenizer: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=65_536)] = 128

    @field_validator("date_format")
    @classmethod
    def _check_date_format(cls, date_format: str | None) -> str | None:
        if date_format is not None and not is_date_format(date_format):
            expected = "a strptime format with year, month and day"
            raise ValueError(f"{expected}, such as %d/%m/%Y")
        return date_format

    @model_validator(mode="after")
    def _check_values(self) -> "DataSection":
        if self.text is not None and set(self.columns.values()) - {"ignored"}:
            self.refuse("only ignored columns with text", "columns")
        if self.image_resize is not None and self.image_resize < max(self.image_size or ()):
            self.refuse("at least the longer side of image_size", "image_resize")
        return self

    @property
    def takes_ids(self) -> bool:
        return self.vocabulary is not None or self.text is not None

    @property
    def group_column(self) -> str | None:
        return self.calibration_group or self.group

    @property
    def is_stratified(self) -> bool:
        """Whether splits are stratified by class, which requires sizes as fractions."""
        sizes = (self.validation, self.reference, self.ranking)
        return not any(isinstance(size, int) for size in sizes)


Pixel = Annotated[float, Field(ge=-1e3, le=1e3)]
Pattern = Annotated[str, StringConstraints(min_length=1)]
Factory = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
EncoderName = Annotated[str, StringConstraints(pattern=r"^(onnx:.+|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")]


class PixelStatistics(Section):
    """The mean and standard deviation of each channel, for pixels scaled to [0, 1]."""

    mean: Annotated[list[Pixel], Field(min_length=1)]
    std: Annotated[list[Positive], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_lengths(self) -> "PixelStatistics":
        if len(self.std) != len(self.mean):
            self.refuse("as many numbers as in mean", "std")
        return self


class NetworkSection(Section):
    """The `[network]` section: the network, its initial weights and its encoder."""

    requires = (
        ("dropout", "hidden"),
        ("bins", "hidden"),
        ("knots", "hidden"),
        ("max_inputs", "bins"),
    )
    excludes = (("kind", "hidden"), ("factory", "hidden"), ("kind", "factory"), ("kind", "encoder"))

    hidden: list[Count] | None = None
    dropout: Annotated[float, Field(gt=0, lt=1)] | None = None
    bins: Annotated[int, Field(ge=2, le=256)] | None = None
    max_inputs: Count | None = None
    knots: list[list[float] | None] | None = None
    kind: Literal[*ARCHITECTURES] | None = None
    factory: Factory | None = None
    weights: Pattern | None = None
    start: Literal["trained"] | None = None
    bayesian: Annotated[list[Pattern], Field(min_length=1)] | None = None
    trained: list[Pattern] | None = None
    standardise: Literal[False] | PixelStatistics | None = None
    encoder: EncoderName | None = None
    output: Pattern | None = None

    @model_validator(mode="after")
    def _check_values(self) -> "NetworkSection":
        if self.hidden is None and self.kind is None and self.factory is None:
            raise ValueError("hidden, kind or factory")
        if self.has("start") and self.weights is None and self.factory is None:
            self.refuse("no value without weights or factory", "start")
        if self.output is not None and self.encoder_file is None:
            self.refuse("no value without encoder = 'onnx:FILE'", "output")
        return self

    @property
    def encoder_file(self) -> str | None:
        kind, _, file = (self.encoder or "").partition(":")
        return file if kind == "onnx" else None

    @property
    def is_custom(self) -> bool:
        return self.factory is not None and not self.factory.startswith(f"{mlp.__module__}:")

    @property
    def pixels(self) -> PixelStatistics | None:
        return self.standardise if isinstance(self.standardise, PixelStatistics) else None

    @property
    def is_trained(self) -> bool:
        return self.start == "trained" or self.weights is not None
