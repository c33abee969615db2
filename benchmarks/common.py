"""What benchmarks share: options, the published model that they measure and its rows, and an
untrained model of `recipes/mnist.toml`'s size to measure speed on."""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load as load_weights

from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from training import recipe as recipes
from training.data import Dataset, Rows, Splits, SplitSizes, load, split, split_sizes
from training.fit import Fitted, publish, temper
from training.model import BayesianModel, build, initialise
from training.provenance import Provenance
from training.scoring import draw_counts
from training.versions import recipe_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
NAME = "mnist"
TRAINED_LOG_STD = -0.7


def parser_of(
    description: str | None, written: str, name: str | None = "name"
) -> argparse.ArgumentParser:
    """Return a parser with the model that is measured, `--store`, and `--write`, which keeps
    results as `written`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if name is not None:
        parser.add_argument(name)
    parser.add_argument(
        "--store", type=Path, default=Path(os.environ.get("DUBITO_STORE", "models"))
    )
    parser.add_argument("--write", action="store_true", help=f"write docs/results/{written}")
    return parser


def add_splits(parser: argparse.ArgumentParser, splits: int = 200) -> None:
    """Add how many random splits of rows are counted over, and their seed."""
    parser.add_argument("--splits", type=int, default=splits)
    parser.add_argument("--seed", type=int, default=0)


def data_root() -> Path:
    return Path(os.environ.get("DUBITO_DATA", "data"))


def open_model(options: argparse.Namespace) -> Model:
    store = ModelStore(options.store)
    return Model.load(store.open(options.name, store.resolve(options.name), wanted=NEEDED))


def splits_of(model: Model) -> Splits:
    recipe = recipe_of(model.manifest, "name")
    return split(load(recipe, data_root(), model.manifest.input.columns), split_sizes(recipe))


def unseen_rows(model: Model) -> Rows:
    """Return all rows that a model was not fitted on and that did not choose its checkpoint."""
    splits = splits_of(model)
    parts = (splits.reference, splits.ranking, splits.test)
    return Rows(
        np.concatenate([rows.x for rows in parts]), np.concatenate([rows.y for rows in parts])
    )


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
    artifact = store.open(name, store.resolve(name), wanted=("weights.safetensors",))
    manifest = artifact.manifest
    recipe = recipes.Recipe.model_validate(manifest.training["recipe"])
    model = build(recipe, manifest.input.shape, len(manifest.output.classes))
    model.load_state_dict(load_weights(artifact.files["weights.safetensors"]))
    return model.eval()
