"""Measurements shared by several targets."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from PIL import Image

from experiments.attacks import measure_attacks
from experiments.cells import ROOT, Measured
from model_store.artifacts.manifest import InputSpec, Manifest
from model_store.artifacts.store import ModelStore
from model_store.inference.model import Model
from model_store.scores.classification import Scores
from model_store.sources.images import image_row
from training import recipe as recipes
from training.data.arrays import find_idx, read_idx
from training.data.rows import Dataset, Rows
from training.evaluation.evaluate import EvaluationOptions, evaluate_version
from training.evaluation.outliers import OutlierSource, image_spec, sample_rows, scale_pixels
from training.fit import Fitted, fit, publish
from training.fitting.stopping import LEVELLED_OFF, find_moving
from training.folders import data_root
from training.recipe import Recipe
from training.versions import Parent, open_parent

RECIPES = (ROOT / "experiments" / "recipes", ROOT / "recipes")
IDX_STEMS = ("t10k-images-idx3-ubyte", "train-images-idx3-ubyte", "images-idx3-ubyte")
CHUNK_ROWS = 500
LEVEL_SHARE = 0.2  # share of the epochs in which a curve must be level
MIN_LEVEL_EPOCHS = 3


def load_recipe(base: str, seed: int, /, **changes: Any) -> Recipe:
    """Load a recipe from the repository, with a seed and overridden keys.

    Sections are merged, except for the posterior of another method, which is replaced.
    """
    paths = [folder / f"{base}.toml" for folder in RECIPES]
    recipe = recipes.load(next(path for path in paths if path.exists()))
    content: dict[str, Any] = recipe.model_dump(exclude_unset=True) | {"seed": seed}
    for key, value in changes.items():
        is_replaced = key == "posterior" and "method" in changes
        is_merged = isinstance(value, dict) and not is_replaced
        content[key] = {**content.get(key, {}), **value} if is_merged else value
    return recipes.validate(content, base)


@dataclass(frozen=True)
class IdxOutliers(OutlierSource):
    """Images in MNIST's file format, resized to the model's shape."""

    @classmethod
    def named(cls, name: str) -> "IdxOutliers":
        return cls(name, "idx", data_root() / name)

    def rows(
        self,
        spec: InputSpec,
        max_rows: int,
        seed: int,
        encoder: Any = None,  # noqa: ARG002
    ) -> Float32[np.ndarray, "N I"]:
        stems = [s for s in IDX_STEMS if list(self.path.glob(f"{s}*"))]
        images = read_idx(find_idx(self.path, [*stems, *IDX_STEMS][0]), 3)
        images, decoding = sample_rows(images, max_rows, seed), image_spec(spec)
        pixels = [image_row(Image.fromarray(image), spec.shape, decoding) for image in images]
        return scale_pixels(np.stack(pixels), spec)


@dataclass(frozen=True)
class Published:
    store: ModelStore
    manifest: Manifest
    model: Model
    data: Dataset

    @property
    def parent(self) -> Parent:
        return open_parent(self.store, f"{self.manifest.name}:{self.manifest.version}", "model")

    def evaluate(self, rows: int, outliers: Sequence[OutlierSource] = ()) -> dict[str, Any]:
        """Evaluate a version on up to `rows` test rows and on each outlier set."""
        options = EvaluationOptions(tuple(outliers), rows=rows)
        arguments = self.store, self.parent, self.model, options
        return evaluate_version(*arguments, quiet=True, fit_data=self.data).report

    def attack(self, rows: int) -> dict[str, Any]:
        return measure_attacks(self.parent, self.model, data_root(), rows)


@contextmanager
def published(result: Fitted) -> Iterator[Published]:
    """Publish a fit to a temporary store."""
    with tempfile.TemporaryDirectory() as folder:
        store = ModelStore(Path(folder))
        manifest = publish(result, store)
        model = Model.load(store.open(manifest.name, manifest.version))
        yield Published(store, manifest, model, result.data)


def measure_fit(recipe: Recipe, runs: Path, data: Dataset | None = None) -> Measured:
    result = fit(recipe, data, runs=runs, quiet=True)
    return make_measured(result, measure_rows(result, result.data.test))


def make_measured(result: Fitted, values: dict[str, Any]) -> Measured:
    return Measured(values, result.data.digest()[:16], find_moving_curves(result))


def find_moving_curves(result: Fitted) -> list[str]:
    """Describe the validation curves that are still changing in their last fifth.

    The result is empty if the fit stopped because its curves were level.
    """
    assert result.folder is not None
    if LEVELLED_OFF in (result.provenance.stopped or ""):
        return []
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    window = max(MIN_LEVEL_EPOCHS, round(LEVEL_SHARE * len(history)))
    likelihoods = [{**epoch, "objective": 0.0} for epoch in history]
    return find_moving(likelihoods, window, has_bound=False)


def measure_rows(result: Fitted, rows: Rows) -> dict[str, Any]:
    """Measure the accuracy in % or the RMSE, and the mean log-likelihood in nats."""
    likelihoods, errors = [], []
    for first in range(0, len(rows), CHUNK_ROWS):
        part = rows.take(np.arange(first, min(first + CHUNK_ROWS, len(rows))))
        scores, likelihood = result.score(part)
        likelihoods.append(likelihood)
        if isinstance(scores, Scores):
            errors.append(scores.label != part.y)
        else:
            errors.append(scores.in_units.mean - part.y)
    mean_square = float(np.square(np.concatenate(errors).astype(np.float64)).mean())
    is_regression = result.recipe.task == "regression"
    return {
        "log_likelihood": float(np.concatenate(likelihoods).mean()),
        **({"rmse": mean_square**0.5} if is_regression else {"accuracy": 100 * (1 - mean_square)}),
    }
