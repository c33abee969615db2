"""Recipes: what to fit, as TOML files."""

import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model_store.errors import InvalidInput
from model_store.manifest import Name
from model_store.scores import SCORE_NAMES

DENSITY_NAMES = ("residual",)

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A frozen table of a recipe; unknown keys and loose types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DataSection(Section):
    """`[data]`: the source, and how many of its training rows are kept out of training, and for what."""

    source: str
    validation_rows: Count
    reference_rows: Count
    ranking_rows: Count
    target: str | None = None
    columns: dict[str, Literal["numeric", "categorical", "ignored"]] = {}
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    split: Annotated[int, Field(ge=0, le=999)] = 0
    image_size: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=2, max_length=2)] | None = None


class NetworkSection(Section):
    """`[network]`: the primary network, a multilayer perceptron."""

    hidden: Annotated[list[Count], Field(min_length=1)]


class HypernetworkSection(Section):
    """`[hypernetwork]`: the flow from noise to the primary network's scales."""

    couplings: Annotated[int, Field(ge=0)] = 4
    hidden: Count = 200
    initial_log_std: Annotated[float, Field(ge=-20, le=2)] = -7.0
    prior_std: Positive = 1.0


class TrainingSection(Section):
    """`[training]`: the optimiser and its schedule."""

    epochs: Count
    batch_rows: Count = 128
    learning_rate: Positive = 1e-3
    final_learning_rate: Positive = 1e-4
    gradient_norm: Positive = 5.0
    kl_ramp_epochs: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    validation_draws: Count = 20
    checkpoint_interval_s: Positive = 20.0


class ServingSection(Section):
    """`[serving]`: how the model is served unless a request says otherwise, and what its flag looks at."""

    draws: Annotated[int, Field(ge=2, le=1000)] = 100
    precision: Literal["float32", "int8"] = "float32"
    combined: Annotated[list[Literal[*SCORE_NAMES, *DENSITY_NAMES]], Field(min_length=1)] = [
        "entropy",
        "bald",
        "residual",
    ]


class Recipe(Section):
    """A whole recipe."""

    name: Name
    method: Literal["bhn-realnvp", "bhn-iaf"]
    task: Literal["classification", "regression"] = "classification"
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0
    data: DataSection
    network: NetworkSection
    hypernetwork: HypernetworkSection = HypernetworkSection()
    training: TrainingSection
    serving: ServingSection = ServingSection()

    def digest(self) -> str:
        """Return a SHA-256 of everything that the recipe says, whatever the layout of its file."""
        return sha256(self.model_dump_json().encode()).hexdigest()


def load(path: Path) -> Recipe:
    """Read a recipe.

    Raises:
        InvalidInput: naming the field or line that is wrong, what was expected and what came.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(path), "a readable recipe", error.strerror or "an error") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(str(path), "UTF-8 text", f"byte {error.start} that is not") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(str(path), "TOML", str(error)) from None
    return _validated(content, str(path))


def override(
    recipe: Recipe,
    name: str | None = None,
    seed: int | None = None,
    source: str | None = None,
    target: str | None = None,
) -> Recipe:
    """Return a recipe with what the command line says in place of what the file says.

    Raises:
        InvalidInput: naming the option that is wrong.
    """
    content = recipe.model_dump()
    for field, value in (("name", name), ("seed", seed)):
        if value is not None:
            content[field] = value
    for field, value in (("source", source), ("target", target)):
        if value is not None:
            content["data"][field] = value
    return _validated(content, "command line")


def _validated(content: dict[str, Any], origin: str) -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise InvalidInput(f"{origin}: {field}", "a value", "nothing") from None
        if first["type"] == "extra_forbidden":
            raise InvalidInput(f"{origin}: {field}", "no such key", repr(first["input"])[:200]) from None
        expected = str(first["msg"]).removeprefix("Input should be ")
        raise InvalidInput(f"{origin}: {field}", expected, repr(first["input"])[:200]) from None
