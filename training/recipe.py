"""Recipes, which are TOML files that describe fits."""

import tomllib
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from model_store.artifacts.manifest import Name
from model_store.errors import InvalidInput, expected_value, refuse_unreadable
from model_store.scores.tasks import DETECTED
from model_store.types import Task
from training.detectors import COMBINED, COMBINED_IF_ENCODED, KINDS
from training.folders import data_root
from training.methods import METHODS, Laplace, Method, VariationalHypernet
from training.sections import Count, DataSection, NetworkSection, Positive, Section

IMAGE_DENSITIES = tuple(name for name, kind in KINDS.items() if kind.needs_images)
FEATURE_DENSITIES = tuple(name for name, kind in KINDS.items() if kind.space == "embedding")
DENSITY_NAMES = tuple(KINDS)
DETECTOR_NAMES = dict.fromkeys([*chain.from_iterable(DETECTED.values()), *DENSITY_NAMES])
COMBINED_SCORES: dict[Task, str] = {"classification": "entropy", "regression": "epistemic_std"}

# Better direction or ideal value of each metric.
BETTER: dict[str, Literal["more", "less"] | float] = {
    "test_accuracy": "more",
    "test_log_likelihood": "more",
    "test_brier": "less",
    "test_rmse": "less",
    "test_interval_coverage_at_95": 0.95,
    "test_interval_width_at_95": "less",
    "flag_rate_at_05": 0.05,
    "uniform_noise_flagged_at_05": "more",
}


class TrainingSection(Section):
    """The `[training]` section: the optimiser and its schedule."""

    excludes = (("early_stopping", "epochs"), ("early_stopping", "choose"))

    epochs: Annotated[int, Field(ge=0)] | None = None
    max_epochs: Count = 1000
    patience: Count | None = None
    early_stopping: Literal[False, True, "refit"] = False
    batch_rows: Count = 128
    learning_rate: Positive | None = None
    final_learning_rate: Positive = 1e-4
    choose: Literal["elbo", "likelihood", "last"] | None = None
    kl_ramp_epochs: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    kl_weight: Positive | None = None
    alpha: Annotated[float, Field(allow_inf_nan=False)] | None = None
    samples: Annotated[int, Field(ge=1, le=1000)] | None = None


class AugmentationSection(Section):
    """The `[augmentation]` section: random transformations of training images."""

    flip: list[Literal["horizontal", "vertical"]] = Field(default=[])
    shift: Annotated[int, Field(ge=0)] = 0
    crop: Annotated[float, Field(ge=0, lt=1)] = 0.0


class LikelihoodSection(Section):
    noise: Literal["homoscedastic", "heteroscedastic"] = "homoscedastic"


class ServingSection(Section):
    """The `[serving]` section: request defaults, calibration and the flag's detectors."""

    draws: Annotated[int, Field(ge=2, le=1000)] = 100
    precision: Literal["float32", "int8"] = "float32"
    combined: Annotated[list[Literal[*DETECTOR_NAMES]], Field(min_length=1)] | None = None
    temperature: bool = True
    risk: Annotated[float, Field(gt=0, lt=1)] | None = None
    calibration: Literal["marginal", "class", "group"] = "marginal"
    nearest_rows: Annotated[int, Field(ge=0, le=10_000)] = 1000


class GateSection(Section):
    """The `[gate]` section: conditions for refusing a worse version.

    `against` is the alias of the reference version, and `metrics` the tolerated loss by metric.
    """

    against: Name = "champion"
    metrics: Annotated[
        dict[Literal[*BETTER], Annotated[float, Field(ge=0, allow_inf_nan=False)]],
        Field(min_length=1),
    ]


# Keys that only the other task has.
OTHER_KEYS: dict[Task, tuple[tuple[str, str], ...]] = {
    "classification": (("likelihood", "noise"), ("data", "target_transform")),
    "regression": (("data", "class_weights"), ("serving", "risk")),
}


class Recipe(Section):
    name: Name
    method: Literal[*METHODS]
    task: Task = "classification"
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0
    data: DataSection
    network: NetworkSection
    posterior: SerializeAsAny[Method] = Field(default={}, validate_default=True)
    training: TrainingSection = TrainingSection()
    likelihood: LikelihoodSection = LikelihoodSection()
    augmentation: AugmentationSection | None = None
    serving: ServingSection = ServingSection()
    gate: GateSection | None = None

    @field_validator("posterior", mode="before")
    @classmethod
    def _parse_posterior(cls, posterior: Any, info: ValidationInfo) -> Method:
        if "method" not in info.data:  # The error of `method` is reported.
            return Method()
        return METHODS[info.data["method"]].model_validate(posterior)

    @model_validator(mode="after")
    def _check_task(self) -> "Recipe":
        task, serving = self.task, self.serving
        for section, key in OTHER_KEYS[task]:
            if getattr(self, section).has(key):
                self.refuse(f"no value for task {task}", section, key)
        if serving.calibration == "class" and task == "regression":
            self.refuse("marginal or group for task regression", "serving", "calibration")
        if serving.precision == "int8" and task == "regression":
            self.refuse("float32 for task regression", "serving", "precision")
        detectors = (*DETECTED[task], *DENSITY_NAMES)
        for i, name in enumerate(serving.combined or ()):
            if name not in detectors:
                self.refuse(f"one of {detectors} for task {task}", "serving", "combined", i)
        return self

    @model_validator(mode="after")
    def _check_method(self) -> "Recipe":
        method, has_curvature = f"method {self.method}", isinstance(self.posterior, Laplace)
        if self.serving.precision == "int8" and not self.posterior.supports_int8:
            self.refuse(f"float32 for {method}", "serving", "precision")
        if self.training.epochs == 0 and not self.posterior.is_post_hoc:
            self.refuse(f"1 or more for {method}", "training", "epochs")
        if self.training.early_stopping and (self.posterior.is_variational or has_curvature):
            expected = f"false for {method}, which converges to a bound"
            self.refuse(expected, "training", "early_stopping")
        return self

    @model_validator(mode="after")
    def _check_data(self) -> "Recipe":
        network, reason = self.network, "since rows consist of ids"
        if self.serving.calibration == "group" and not self.data.group_column:
            expected = "a column of groups in data.calibration_group or data.group"
            self.refuse(expected, "serving", "calibration")
        if not self.data.takes_ids:
            return self
        if network.pixels is not None:
            self.refuse(f"no pixel statistics, {reason}", "network", "standardise")
        if self.augmentation is not None:
            self.refuse(f"none, {reason}", "augmentation")
        if network.encoder is not None:
            return self
        if network.factory is None:
            self.refuse(f"a factory, {reason}", "network")
        for i, name in enumerate(self.serving.combined or ()):
            if name in DENSITY_NAMES and name not in FEATURE_DENSITIES:
                self.refuse(f"no density of the input, {reason}", "serving", "combined", i)
        return self

    @property
    def combined(self) -> list[str]:
        if self.serving.combined:
            return list(self.serving.combined)
        score = COMBINED_SCORES[self.task]
        if self.network.encoder is not None:
            return [score, *COMBINED_IF_ENCODED]
        if self.data.takes_ids:
            return [score, *(name for name in COMBINED if name in FEATURE_DENSITIES)]
        has_images = self.data.source.startswith("images:")
        return [score, *COMBINED, *(IMAGE_DENSITIES if has_images else ())]

    @property
    def is_standardised(self) -> bool:
        """Whether the network standardises its inputs, using a batch of training rows."""
        network, is_encoded = self.network, self.network.encoder is not None
        if network.bins is not None or network.knots is not None:  # the data standardise columns
            return False
        if network.is_trained or network.standardise is False:
            return False
        return is_encoded or not (self.data.takes_ids or network.pixels is not None)

    @property
    def has_bound(self) -> bool:
        """Whether the objective is the evidence lower bound of a posterior over theta."""
        is_amortised = isinstance(self.posterior, VariationalHypernet)  # q depends on the row
        return self.posterior.is_variational and self.alpha == 0.0 and not is_amortised

    @property
    def alpha(self) -> float:
        return self.posterior.alpha if self.training.alpha is None else self.training.alpha

    @property
    def choose(self) -> Literal["elbo", "likelihood", "last"]:
        return self.training.choose or ("elbo" if self.posterior.is_variational else "likelihood")

    @property
    def learning_rate(self) -> float:
        return self.training.learning_rate or self.posterior.learning_rate

    @property
    def samples(self) -> int:
        return self.posterior.samples if self.training.samples is None else self.training.samples

    def digest(self) -> str:
        """Compute a SHA-256 digest that does not depend on the gate or the file's layout.

        It also excludes knots that are computed from bins.
        """
        exclude: dict[str, Any] = {"gate": True}
        if self.network.bins is not None:
            exclude["network"] = {"knots"}
        return sha256(self.model_dump_json(exclude=exclude).encode()).hexdigest()


def load(path: Path, root: Path | None = None) -> Recipe:
    """Read a recipe from a file.

    Relative paths are looked up in the recipe's folder, in `root` (by default DUBITO_DATA) and in
    the current folder, in this order.
    """
    try:
        with refuse_unreadable(str(path), "a readable recipe"):
            content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(str(path), "TOML in UTF-8", str(error)) from None
    return _make_paths_absolute(validate(content, str(path)), path.parent, root or data_root())


def _make_paths_absolute(recipe: Recipe, folder: Path, root: Path) -> Recipe:
    """Make paths absolute if they cannot be found otherwise.

    Readers look for data in `root` and the current folder, and for networks in the current folder.
    Other paths stay relative, so that a recipe has the same digest on every machine.
    """
    current = Path()

    def find(name: str, *readers: Path) -> str:
        first, read = (
            next((place / name for place in places if (place / name).exists()), None)
            for places in ((folder, root, current), readers)
        )
        if first is None or (read is not None and read.samefile(first)):
            return name
        return str(first.absolute())

    data, network = recipe.data, recipe.network
    data_paths, network_paths = {}, {}
    for key in ("source", "trained_on"):
        kind, colon, name = (getattr(data, key) or "").partition(":")
        if colon:
            data_paths[key] = f"{kind}:{find(name, root, current)}"
    if data.tokenizer is not None:
        data_paths["tokenizer"] = find(data.tokenizer, root, current)
    if network.weights is not None:
        network_paths["weights"] = find(network.weights, current)
    if network.encoder_file is not None:
        network_paths["encoder"] = f"onnx:{find(network.encoder_file, current)}"
    data, network = data.model_copy(update=data_paths), network.model_copy(update=network_paths)
    return recipe.model_copy(update={"data": data, "network": network})


def override(
    recipe: Recipe, name: str | None = None, seed: int | None = None, **data: Any
) -> Recipe:
    """Replace the name, the seed and keys of `[data]`. None leaves a value unchanged."""
    content = recipe.model_dump()
    for section, changes in ((content, {"name": name, "seed": seed}), (content["data"], data)):
        section |= {key: value for key, value in changes.items() if value is not None}
    return validate(content, "command line")


def validate(content: dict[str, Any], origin: str) -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise _invalid_key(content, error, origin) from None


def _invalid_key(content: dict[str, Any], error: ValidationError, origin: str) -> InvalidInput:
    errors = [(_key_path(content, item), item) for item in error.errors(include_url=False)]
    path, first = max(errors, key=lambda item: len(item[0]))  # the best match in a union
    field = ": ".join([origin, ".".join(path)]) if path else origin
    received = repr(first["input"])[:200]
    if first["type"] == "missing":
        return InvalidInput(field, "a value", "nothing")
    if first["type"] == "extra_forbidden":
        expected = "no such key"
        if path[0] == "posterior":
            keys = METHODS[content["method"]].model_fields
            expected += f" (valid keys: {', '.join(keys) or 'none'})"
        return InvalidInput(field, expected, received)
    messages = (expected_value(item["msg"]) for other, item in errors if other == path)
    return InvalidInput(field, " or ".join(messages), received)


def _key_path(content: Any, error: Any) -> list[str]:
    path = []
    for part in error["loc"]:
        is_key = isinstance(content, dict) and part in content
        if is_key or (isinstance(content, list) and isinstance(part, int)):
            content = content[part]
            path.append(str(part))
    return [*path, str(error["loc"][-1])] if error["type"] == "missing" else path
