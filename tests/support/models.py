"""Small models, not fitted."""

from collections.abc import Callable

import torch

from training.nn.architectures import mlp
from training.nn.flows import Composition
from training.nn.likelihoods import Categorical
from training.nn.model import BayesianModel
from training.nn.networks import DrawnNetwork, Stochastic
from training.nn.posteriors.hypernetwork import HypernetworkPosterior


def scale_mlp(*sizes: int, seed: int = 0) -> DrawnNetwork:
    """A multilayer perceptron whose weight-norm scales are drawn, of layer sizes (inputs, hidden ..., classes)."""

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DrawnNetwork(mlp(sizes[0], sizes[1:-1], sizes[-1]), Stochastic("scales"), (sizes[0],))


def scale_model(
    flow: Callable[..., Composition], *sizes: int, couplings: int = 2, hidden: int = 8, log_scale: float = -2.0
) -> BayesianModel:
    """A Bayesian hypernetwork over the scales of a multilayer perceptron, its parameters as they start."""

    network = scale_mlp(*sizes)
    dimension = network.theta_dimension
    made = flow(dimension, couplings, hidden, log_scale, torch.Generator().manual_seed(0))
    return BayesianModel(network, HypernetworkPosterior(made, dimension, 1.0), Categorical(sizes[-1]))
