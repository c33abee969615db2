"""Small models without a fit."""

from collections.abc import Callable
from pathlib import Path

import torch

from model_store.artifacts.store import ModelStore
from training.bayes.flows import Composition
from training.bayes.hypernetwork import HypernetworkPosterior
from training.bayes.layers import Stochastic
from training.bayes.likelihoods import Categorical
from training.bayes.network import BayesianModel
from training.data import load
from training.data.rows import split, split_sizes
from training.fit import Fitted, publish, temper
from training.model import build, initialise
from training.networks.architectures import mlp
from training.networks.networks import DrawnNetwork
from training.recipe import Recipe
from training.versions import Provenance


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
    provenance = Provenance(recipe=recipe.model_dump(mode="json"))
    temperature = temper(model, recipe, splits.validation)
    if temperature is not None:
        provenance = provenance.model_copy(update={"temperature": temperature})
    publish(Fitted(model, recipe, data, splits, provenance), store, anyway=True)
