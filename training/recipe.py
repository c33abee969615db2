"""Recipes, the TOML files that describe fits."""

import tomllib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    Field,
    SerializeAsAny,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from model_store.artifacts.manifest import LARGEST_ID, Name
from model_store.errors import InvalidInput
from model_store.scores.tasks import DETECTED
from model_store.sources.cells import is_date_format
from model_store.types import Task
from training.detectors import KINDS
from training.folders import data_root
from training.methods import METHODS, Laplace, Method
from training.networks.architectures import ARCHITECTURES, mlp
from training.sections import Count, Positive, Section

COMBINED_DENSITIES = tuple(name for name, kind in KINDS.items() if kind.is_combined)
IMAGE_DENSITIES = tuple(name for name, kind in KINDS.items() if kind.needs_images)
FEATURE_DENSITIES = tuple(name for name, kind in KINDS.items() if kind.space == "embedding")
ENCODED_DENSITIES = tuple(name for name, kind in KINDS.items() if kind.is_combined_if_encoded)
DENSITY_NAMES = tuple(KINDS)
DETECTOR_NAMES = dict.fromkeys(
    [*(name for names in DETECTED.values() for name in names), *DENSITY_NAMES]
)
COMBINED_SCORES: dict[Task, str] = {"classification": "entropy", "regression": "epistemic_std"}

# Better direction or ideal value of each metric.
BETTER: dict[str, Literal["more", "less"] | float] = {
    "test_accuracy": "more",
    "test_log_likelihood": "more",
    "test_brier": "less",
    "test_expected_calibration_error": "less",
    "test_adaptive_calibration_error": "less",
    "test_classwise_calibration_error": "less",
    "test_rmse": "less",
    "test_interval_coverage_at_95": 0.95,
    "test_interval_width_at_95": "less",
    "flag_rate_at_05": 0.05,
    "uniform_noise_flagged_at_05": "more",
}

Share = Annotated[float, Field(gt=0, lt=0.5)]
Side = Annotated[int, Field(ge=1, le=4096)]  # pixels

S = TypeVar("S", bound=Section)


class DataSection(Section):
    """`[data]`: the source, its columns and the split sizes."""

    source: str
    trained_on: str | None = None
    validation_rows: Count | None = None
    reference_rows: Count | None = None
    ranking_rows: Count | None = None
    validation: Share | None = None
    reference: Share | None = None
    ranking: Share | None = None
    group: str | None = None
    calibration_group: str | None = None
    time: str | None = None
    id: str | None = None
    target: str | None = None
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
    split: Annotated[int, Field(ge=0, le=999)] = 0
    image_size: Annotated[list[Side], Field(min_length=2, max_length=2)] | None = None
    image_fit: Literal["stretch", "crop"] = "stretch"
    image_resize: Side | None = None
    image_interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    leave_out: list[str] = Field(default=[])
    integers: bool = False
    vocabulary: Annotated[int, Field(ge=2, le=LARGEST_ID + 1)] | None = None
    text: str | None = None
    tokenizer: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=65_536)] = 128
    pad_token: str | None = None

    @field_validator("date_format")
    @classmethod
    def _check_date_format(cls, date_format: str | None) -> str | None:
        if date_format is not None and not is_date_format(date_format):
            expected = "a strptime format with year, month and day"
            raise ValueError(f"{expected}, such as %d/%m/%Y")
        return date_format

    @model_validator(mode="after")
    def _check_combinations(self) -> "DataSection":
        for split in ("validation", "reference", "ranking"):
            if getattr(self, f"{split}_rows") is not None and getattr(self, split) is not None:
                raise ValueError(f"one of {split} and {split}_rows")
        if self.group is not None and self.time is not None:
            raise ValueError("one of group and time")
        if self.vocabulary is not None and not self.integers:
            raise ValueError("integers = true with vocabulary")
        keys = (self.group, self.calibration_group, self.time, self.id)
        if self.integers and any(key is not None for key in keys):
            raise ValueError("none of group, calibration_group, time and id with integers")
        if (self.text is None) != (self.tokenizer is None):
            raise ValueError("both of text and tokenizer, or neither")
        if self.text is not None and (self.integers or set(self.columns.values()) - {"ignored"}):
            raise ValueError("neither integers nor columns with text, except ignored columns")
        if self.text is None and (self.pad_token is not None or self.max_tokens != 128):
            raise ValueError("text with max_tokens and pad_token")
        is_default = self.image_fit == "stretch" and self.image_interpolation == "bilinear"
        if self.image_size is None and not is_default:
            raise ValueError("image_size with image_fit and image_interpolation")
        resize, is_cropped = self.image_resize, self.image_fit == "crop"
        if resize is not None and (not is_cropped or resize < self.longer_side):
            condition = "at least the longer side of image_size"
            raise ValueError(f"image_resize with image_fit = 'crop', and {condition}")
        return self

    @property
    def longer_side(self) -> int:
        return max(self.image_size or [0])

    @property
    def takes_ids(self) -> bool:
        """Whether rows consist of ids, such as tokens."""
        return self.integers or self.text is not None

    @property
    def group_column(self) -> str | None:
        return self.calibration_group or self.group

    @property
    def is_stratified(self) -> bool:
        """Whether splits are stratified by class, which requires sizes as fractions."""
        counts = (self.validation_rows, self.reference_rows, self.ranking_rows)
        return all(count is None for count in counts)

    def held_out(self, split: str) -> int | float | None:
        """Return the size of a split as a number of rows or a fraction, or None if unset."""
        rows: int | None = getattr(self, f"{split}_rows")
        return getattr(self, split) if rows is None else rows


Pixel = Annotated[float, Field(ge=-1e3, le=1e3)]
Pattern = Annotated[str, StringConstraints(min_length=1)]
Factory = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
EncoderName = Annotated[str, StringConstraints(pattern=r"^(onnx:.+|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")]


class NetworkSection(Section):
    """`[network]`: the network, its initial weights and its encoder."""

    hidden: list[Count] | None = None
    dropout: Annotated[float, Field(gt=0, lt=1)] | None = None
    bins: Annotated[int, Field(ge=2, le=256)] | None = None
    knots: list[list[float]] | None = None
    kind: Literal[*ARCHITECTURES] | None = None
    factory: Factory | None = None
    weights: Pattern | None = None
    start: Literal["random", "trained"] | None = None
    bayesian: Annotated[list[Pattern], Field(min_length=1)] | None = None
    trained: list[Pattern] | None = None
    standardise: bool | None = None
    pixel_mean: Annotated[list[Pixel], Field(min_length=1)] | None = None
    pixel_std: Annotated[list[Positive], Field(min_length=1)] | None = None
    encoder: EncoderName | None = None
    output: Pattern | None = None
    rows_at_once: Annotated[int, Field(ge=1, le=256)] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> "NetworkSection":
        if sum(value is not None for value in (self.hidden, self.kind, self.factory)) != 1:
            raise ValueError("exactly one of hidden, kind and factory")
        if self.hidden is None and (self.dropout or self.bins or self.knots):
            raise ValueError("hidden with dropout, bins and knots")
        if self.start == "random" and self.weights is not None:
            raise ValueError("one of weights and start = 'random'")
        if self.start == "trained" and self.weights is None and self.factory is None:
            network = "weights, or a factory that returns a trained network"
            raise ValueError(f"{network}, with start = 'trained'")
        if (self.pixel_mean and len(self.pixel_mean)) != (self.pixel_std and len(self.pixel_std)):
            keys = "both of pixel_mean and pixel_std"
            raise ValueError(f"{keys}, with a number for each channel, or neither")
        if self.standardise and (self.is_trained or self.pixel_mean):
            network = "a network that starts at random and has no pixel_mean"
            raise ValueError(f"standardise = true only for {network}")
        if self.output is not None and self.encoder_file is None:
            raise ValueError("output only with encoder = 'onnx:FILE'")
        if self.encoder is not None and self.kind is not None:
            raise ValueError("hidden or factory with encoder, since encoded rows are not images")
        return self

    @property
    def encoder_file(self) -> str | None:
        kind, _, file = (self.encoder or "").partition(":")
        return file if kind == "onnx" else None

    @property
    def is_custom(self) -> bool:
        """Whether the network is a user's module."""
        return self.factory is not None and not self.factory.startswith(f"{mlp.__module__}:")

    @property
    def is_trained(self) -> bool:
        return self.start == "trained" or self.weights is not None

    @property
    def is_standardised(self) -> bool:
        """Whether the network standardises rows by a batch of training rows."""
        are_raw = self.pixel_mean is None or self.encoder is not None
        if self.bins is not None or self.knots is not None:  # the data standardise columns
            return False
        return not self.is_trained and are_raw and self.standardise is not False


class TrainingSection(Section):
    """`[training]`: the optimiser and its schedule."""

    epochs: Annotated[int, Field(ge=0)] | None = None
    max_epochs: Count = 1000
    patience: Count | None = None
    early_stopping: bool = False
    refit: bool = False
    batch_rows: Count = 128
    learning_rate: Positive = 1e-3
    final_learning_rate: Positive = 1e-4
    choose: Literal["elbo", "likelihood", "last"] | None = None
    kl_ramp_epochs: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    kl_weight: Positive | None = None
    kl_weight_reason: str | None = None
    alpha: Annotated[float, Field(allow_inf_nan=False)] | None = None
    samples: Annotated[int, Field(ge=1, le=1000)] | None = None
    checkpoint_interval_s: Positive = 20.0

    @model_validator(mode="after")
    def _check_combinations(self) -> "TrainingSection":
        if self.early_stopping and (self.epochs is not None or self.choose is not None):
            raise ValueError("neither epochs nor choose with early_stopping")
        if self.refit and not self.early_stopping:
            raise ValueError("refit only with early_stopping, which determines the epochs")
        return self


class AugmentationSection(Section):
    """`[augmentation]`: random transformations of training images."""

    flip: list[Literal["horizontal", "vertical"]] = Field(default=[])
    shift: Annotated[int, Field(ge=0)] = 0
    crop: Annotated[float, Field(ge=0, lt=1)] = 0.0


class LikelihoodSection(Section):
    noise: Literal["homoscedastic", "heteroscedastic"] = "homoscedastic"


class ServingSection(Section):
    """`[serving]`: request defaults, calibration and the detectors of the flag."""

    draws: Annotated[int, Field(ge=2, le=1000)] = 100
    precision: Literal["float32", "int8"] = "float32"
    combined: Annotated[list[Literal[*DETECTOR_NAMES]], Field(min_length=1)] | None = None
    temperature: bool = True
    risk: Annotated[float, Field(gt=0, lt=1)] | None = None
    calibration: Literal["marginal", "class", "group"] = "marginal"
    nearest_rows: Annotated[int, Field(ge=0, le=10_000)] = 1000


class GateSection(Section):
    """`[gate]`: refuse to publish a version that is worse than a reference version.

    `against` is the alias of the reference version, `metrics` the tolerated loss in each metric,
    and `level` the probability of refusing a version with exactly this loss.
    """

    against: Name = "champion"
    level: Annotated[float, Field(ge=0.01, le=0.5)] = 0.05
    metrics: Annotated[
        dict[Literal[*BETTER], Annotated[float, Field(ge=0, allow_inf_nan=False)]],
        Field(min_length=1),
    ]


class Recipe(Section):
    name: Name
    method: Literal[*METHODS]
    task: Task = "classification"
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0
    data: DataSection
    network: NetworkSection
    posterior: SerializeAsAny[Method]
    training: TrainingSection = TrainingSection()
    likelihood: LikelihoodSection | None = None
    augmentation: AugmentationSection | None = None
    serving: ServingSection = ServingSection()
    gate: GateSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _parse_posterior(cls, content: Any) -> Any:
        if isinstance(content, dict) and isinstance(content.get("posterior", {}), dict):
            kind = METHODS.get(str(content.get("method")))
            section = Method()  # the field `method` reports an unknown method
            if kind is not None:
                section = kind.model_validate(content.get("posterior", {}))
            return {**content, "posterior": section}
        return content

    @model_validator(mode="before")
    @classmethod
    def _disable_standardisation_of_ids(cls, content: Any) -> Any:
        """Disable standardisation of ids, unless they are encoded."""
        data, network = (
            content.get(key) if isinstance(content, dict) else None for key in ("data", "network")
        )
        if not isinstance(data, dict) or not isinstance(network, dict):
            return content
        takes_ids = data.get("integers") is True or data.get("text") is not None
        if not takes_ids or network.get("encoder") is not None:
            return content
        return {**content, "network": {"standardise": False, **network}}

    @model_validator(mode="after")
    def _check_early_stopping(self) -> "Recipe":
        if self.training.early_stopping and (
            self.is_variational or isinstance(self.posterior, Laplace)
        ):
            expected = "training.early_stopping = false, since this posterior converges to a bound"
            raise ValueError(f"with method {self.method} {expected}")
        return self

    @property
    def combined(self) -> list[str]:
        if self.serving.combined:
            return list(self.serving.combined)
        score = COMBINED_SCORES[self.task]
        if self.network.encoder is not None:
            return [score, *ENCODED_DENSITIES]
        if self.data.takes_ids:
            return [score, *(name for name in COMBINED_DENSITIES if name in FEATURE_DENSITIES)]
        has_images = self.data.source.startswith("images:")
        return [score, *COMBINED_DENSITIES, *(IMAGE_DENSITIES if has_images else ())]

    @property
    def noise(self) -> Literal["homoscedastic", "heteroscedastic"]:
        return (self.likelihood or LikelihoodSection()).noise

    @property
    def is_variational(self) -> bool:
        """Whether the fit maximises a variational bound."""
        return self.posterior.is_variational

    @property
    def alpha(self) -> float:
        return self.posterior.alpha if self.training.alpha is None else self.training.alpha

    @property
    def choose(self) -> Literal["elbo", "likelihood", "last"]:
        return self.training.choose or ("elbo" if self.is_variational else "likelihood")

    @property
    def samples(self) -> int:
        return self.posterior.samples if self.training.samples is None else self.training.samples

    def digest(self) -> str:
        """Return a SHA-256 of the recipe, independent of the layout of its file.

        It excludes the gate, because the gate does not change the fit, and knots that follow from
        bins.
        """
        exclude: dict[str, Any] = {"gate": True}
        if self.network.bins is not None:
            exclude["network"] = {"knots"}
        return sha256(self.model_dump_json(exclude=exclude).encode()).hexdigest()


def from_manifest(content: Any) -> Recipe:
    """Read the recipe of a published version, ignoring keys that no longer exist.

    Raises:
        ValidationError: if the recipe is otherwise invalid.
    """
    kinds: dict[str, type[Section]] = {
        "data": DataSection,
        "network": NetworkSection,
        "posterior": METHODS.get(content["method"], Method),
        "training": TrainingSection,
        "serving": ServingSection,
    }
    current = {
        name: {key: content[name][key] for key in kind.model_fields if key in content[name]}
        for name, kind in kinds.items()
        if name in content
    }
    return Recipe.model_validate({**content, **current})


def load(path: Path, root: Path | None = None) -> Recipe:
    """Read a recipe from a file.

    Relative paths are looked up in the recipe's folder, in `root` (by default DUBITO_DATA) and in
    the current folder, in this order.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(path), "a readable recipe", error.strerror or "an error") from None
    except UnicodeDecodeError as error:
        actual = f"an invalid byte at {error.start}"
        raise InvalidInput(str(path), "UTF-8 text", actual) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(str(path), "TOML", str(error)) from None
    return _find_files(validate(content, str(path)), path.parent, root or data_root())


def _find_files(recipe: Recipe, folder: Path, root: Path) -> Recipe:
    """Make paths absolute if their readers would not find them.

    Readers look for data in `root` and the current folder, and for networks in the current folder.
    Other paths stay relative, so that a recipe has the same digest on every machine.
    """
    current = Path()

    def find(name: str, *readers: Path) -> str:
        read = next((place / name for place in readers if (place / name).exists()), None)
        for place in (folder, root, current):
            if (place / name).exists():
                is_read = read is not None and read.samefile(place / name)
                return name if is_read else str((place / name).absolute())
        return name

    data, network = recipe.data, recipe.network
    data_paths = {}
    for key in ("source", "trained_on"):
        if (source := getattr(data, key)) is not None:
            kind, colon, name = source.partition(":")
            data_paths[key] = f"{kind}:{find(name, root, current)}" if colon else kind
    if data.tokenizer is not None:
        data_paths["tokenizer"] = find(data.tokenizer, root, current)
    network_paths = {}
    if network.weights is not None:
        network_paths["weights"] = find(network.weights, current)
    if network.encoder_file is not None:
        network_paths["encoder"] = f"onnx:{find(network.encoder_file, current)}"
    return recipe.model_copy(
        update={
            "data": data.model_copy(update=data_paths),
            "network": network.model_copy(update=network_paths),
        }
    )


def override(
    recipe: Recipe,
    name: str | None = None,
    seed: int | None = None,
    source: str | None = None,
    target: str | None = None,
    leave_out: list[str] | None = None,
) -> Recipe:
    content = recipe.model_dump()
    for field, value in (("name", name), ("seed", seed)):
        if value is not None:
            content[field] = value
    for field, value in (("source", source), ("target", target)):
        if value is not None:
            content["data"][field] = value
    if leave_out is not None:
        content["data"]["leave_out"] = leave_out
    return validate(content, "command line")


def validate(content: dict[str, Any], origin: str) -> Recipe:
    method = METHODS.get(str(content.get("method")))
    if method is not None:
        _validate(method, content.get("posterior", {}), f"{origin}: posterior.")
    recipe = _validate(Recipe, content, f"{origin}: ")
    for field, expected, actual in _contradictions(recipe):
        raise InvalidInput(f"{origin}: {field}", expected, actual)
    return recipe


def _contradictions(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    data, serving = recipe.data, recipe.serving
    if serving.precision == "int8":
        if not recipe.posterior.supports_int8:
            yield "serving.precision", f"float32 for method {recipe.method}", "'int8'"
        if recipe.task == "regression":
            yield "serving.precision", "float32 for task regression", "'int8'"
    if recipe.training.epochs == 0 and not isinstance(recipe.posterior, Laplace):
        yield "training.epochs", f"1 or more for method {recipe.method}", "0"
    if recipe.task == "regression":
        if data.class_weights is not None:
            yield "data.class_weights", "none for task regression", "some"
        if serving.risk is not None:
            yield "serving.risk", "none for task regression", f"{serving.risk}"
        if serving.calibration == "class":
            yield "serving.calibration", "marginal or group for task regression", "'class'"
    else:
        none = f"none for task {recipe.task}"
        if recipe.likelihood is not None:
            yield "likelihood", none, "one"
        if data.target_transform != "none":
            yield "data.target_transform", none, repr(data.target_transform)
    if serving.calibration == "group" and not data.group_column:
        expected = "a column of groups in data.calibration_group or data.group"
        yield "serving.calibration", expected, "neither"
    if data.takes_ids:
        yield from _id_contradictions(recipe)
    detectors = (*DETECTED[recipe.task], *DENSITY_NAMES)
    for i, name in enumerate(serving.combined or ()):
        if name not in detectors:
            expected = f"one of {detectors} for task {recipe.task}"
            yield f"serving.combined.{i}", expected, repr(name)


def _id_contradictions(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    network, reason = recipe.network, "since rows consist of ids"
    has_id_input = network.encoder is None
    if network.factory is None and has_id_input:
        yield "network", f"a factory, {reason}", "another network"
    if network.standardise and has_id_input:
        yield "network.standardise", f"false, {reason}", "true"
    if network.pixel_mean is not None:
        yield "network.pixel_mean", f"no value, {reason}", "some"
    if recipe.augmentation is not None:
        yield "augmentation", f"none, {reason}", "one"
    for i, name in enumerate((recipe.serving.combined or ()) if has_id_input else ()):
        if name in DENSITY_NAMES and name not in FEATURE_DENSITIES:
            yield f"serving.combined.{i}", f"no density of the input, {reason}", repr(name)


def _validate(kind: type[S], content: Any, prefix: str) -> S:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = (prefix + ".".join(str(part) for part in first["loc"])).removesuffix(".")
        if first["type"] == "missing":
            raise InvalidInput(field, "a value", "nothing") from None
        if first["type"] == "extra_forbidden":
            expected = "no such key"
            if kind in METHODS.values():
                expected += f" (valid keys: {', '.join(kind.model_fields) or 'none'})"
            raise InvalidInput(field, expected, repr(first["input"])[:200]) from None
        expected = str(first["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
        raise InvalidInput(field, expected, repr(first["input"])[:200]) from None
