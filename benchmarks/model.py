"""A model of `recipes/mnist.toml`'s size to measure speed on: it does not depend on what the
weights are."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load

from model_store.artifacts.store import ModelStore
from training import recipe as recipes
from training.data import Dataset, Rows, SplitSizes, split
from training.fit import Fitted, publish, temper
from training.networks.model import BayesianModel, build, initialise
from training.provenance import Provenance
from training.scoring import draw_counts

ROOT = Path(__file__).parent.parent
NAME = "mnist"
TRAINED_LOG_STD = -0.7


def publish_untrained(store: ModelStore, precision: str | None = None) -> None:
    """Publish a model of the recipe's network and hypernetwork, initialised on random rows and not
    trained; with `precision` in place of the recipe's.

    Its posterior is as wide as a trained one's, so that integers pass publication's check as they
    do there.
    """
    recipe = recipes.load(ROOT / "recipes" / "mnist.toml")
    if precision is not None:
        recipe = recipe.model_copy(
            update={"serving": recipe.serving.model_copy(update={"precision": precision})}
        )
    generator = np.random.default_rng(0)
    rows = Rows(
        generator.uniform(0, 255, (4000, 784)).astype(np.float32),
        np.arange(4000, dtype=np.int64) % 10,
    )
    data = Dataset(rows, rows.take(np.arange(32)), (28, 28), tuple("0123456789"), 0.0, 255.0)
    splits = split(data, SplitSizes(64, 64, 64, seed=0))
    model = build(recipe, (28, 28), 10)
    initialise(model, torch.from_numpy(splits.train.x))
    with torch.no_grad():
        model.posterior.output.log_scale.fill_(TRAINED_LOG_STD)
    assert draw_counts(recipe.serving.draws)[-1] == 100
    temper(model, recipe, splits.validation)
    provenance = Provenance(recipe=recipe.model_dump(mode="json"))
    publish(Fitted(model, recipe, data, splits, provenance), store, name=NAME)
    assert store.manifest(NAME, "1").precision == recipe.serving.precision


def torch_model(store: ModelStore, name: str) -> BayesianModel:
    """Return the torch model of a published version, from its recipe and its weights."""
    artifact = store.open(name, store.resolve(name), wanted=("weights.safetensors",))
    manifest = artifact.manifest
    recipe = recipes.Recipe.model_validate(manifest.training["recipe"])
    model = build(recipe, manifest.input.shape, len(manifest.output.classes))
    model.load_state_dict(load(artifact.files["weights.safetensors"]))
    return model.eval()
