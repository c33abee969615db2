"""Small models without a fit."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from model_store.artifacts.manifest import ImageSpec
from model_store.artifacts.store import ModelStore
from training.bayes.flows import Composition
from training.bayes.hypernetwork import HypernetworkPosterior
from training.bayes.layers import Stochastic
from training.bayes.likelihoods import Categorical
from training.bayes.network import BayesianModel
from training.data import Dataset, Rows, load, split, split_sizes
from training.fit import Fitted, publish, temper
from training.model import build, initialise
from training.networks.architectures import mlp
from training.networks.networks import DrawnNetwork
from training.provenance import Provenance
from training.recipe import Recipe


def scale_mlp(*sizes: int, seed: int = 0) -> DrawnNetwork:
    """Create a multilayer perceptron with random weight-norm scales."""

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DrawnNetwork(
            mlp(sizes[0], sizes[1:-1], sizes[-1]), Stochastic("scales"), (sizes[0],)
        )


def scale_model(
    flow: Callable[..., Composition],
    *sizes: int,
    couplings: int = 2,
    hidden: int = 8,
    log_scale: float = -2.0,
) -> BayesianModel:
    """Create a Bayesian hypernetwork with initial parameters."""

    network = scale_mlp(*sizes)
    dimension = network.theta_dimension
    created = flow(dimension, couplings, hidden, log_scale, torch.Generator().manual_seed(0))
    return BayesianModel(
        network, HypernetworkPosterior(created, dimension, 1.0), Categorical(sizes[-1])
    )


def publish_unfitted(store: ModelStore, recipe: Recipe, root: Path) -> None:
    """Publish a recipe's model with initial parameters and fitted detectors."""
    data = load(recipe, root)
    splits = split(data, split_sizes(recipe))
    model = build(recipe, data.shape, len(data.classes))
    initialise(model, torch.from_numpy(splits.train.x))
    _publish(store, model, recipe, data, splits, root)


def _publish(store, model, recipe, data, splits, root=None):
    provenance = Provenance(recipe=recipe.model_dump(mode="json"))
    temperature = temper(model, recipe, splits.validation)
    if temperature is not None:
        provenance = provenance.model_copy(update={"temperature": temperature})
    publish(Fitted(model, recipe, data, splits, provenance), store, root=root, anyway=True)


def publish_wide(store: ModelStore, name: str = "wide", classes: int = 1000) -> None:
    """Publish an unfitted image model with many classes."""
    recipe = Recipe.model_validate(
        {
            "name": name,
            "method": "bhn-realnvp",
            "data": {
                "source": "digits",
                "validation": 100,
                "reference": 100,
                "ranking": 100,
            },
            "network": {"hidden": [8]},
            "posterior": {"couplings": 1, "hidden": 8},
            "training": {"epochs": 1},
            "serving": {"draws": 20, "temperature": False, "combined": ["entropy", "residual"]},
        }
    )
    pixels = np.random.default_rng(0).integers(0, 256, (6 * classes, 256)).astype(np.float32)
    rows = Rows(pixels, np.arange(len(pixels), dtype=np.int64) % classes)
    names = tuple(f"class {i}" for i in range(classes))
    image = ImageSpec(mode="L", resize=True)
    data = Dataset(rows, rows.take(np.arange(100)), (16, 16), names, 0.0, 255.0, image=image)
    splits = split(data, split_sizes(recipe))
    model = build(recipe, data.shape, classes)
    initialise(model, torch.from_numpy(splits.train.x))
    _publish(store, model, recipe, data, splits)
