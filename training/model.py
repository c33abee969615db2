"""A Bayesian model: a primary network and the posterior over its theta."""

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.flows import iaf, realnvp
from training.networks import MLP
from training.posteriors import HypernetworkPosterior, hash_key
from training.recipe import Recipe

FLOWS = {"bhn-realnvp": realnvp, "bhn-iaf": iaf}


class BayesianModel(nn.Module):
    """outputs[k, n] = f(x[n], theta(eps[k]))."""

    def __init__(self, network: MLP, posterior: HypernetworkPosterior) -> None:
        super().__init__()
        self.network = network
        self.posterior = posterior

    @torch.no_grad()
    def predict(
        self, x: Num[Tensor, "N I"], eps: Float[Tensor, "K D"], chunk_rows: int = 512
    ) -> Float[Tensor, "N C"]:
        """Return the mean class probabilities over draws."""
        theta = self.posterior(eps)[:, None]
        return torch.cat([self.network(part.float(), theta)[0].exp().mean(0) for part in torch.split(x, chunk_rows)])


def build(recipe: Recipe, inputs: int, classes: int) -> BayesianModel:
    """Return a model as a recipe says, its parameters a function of the recipe's seed."""
    generator = torch.Generator().manual_seed(hash_key(recipe.seed, 0))
    network = MLP((inputs, *recipe.network.hidden, classes), generator)
    section = recipe.hypernetwork
    flow = FLOWS[recipe.method](
        network.theta_dimension, section.couplings, section.hidden, section.initial_log_std, generator
    )
    return BayesianModel(network, HypernetworkPosterior(flow, network.theta_dimension, section.prior_std))


def initialise(model: BayesianModel, x: Float[Tensor, "N I"]) -> None:
    """Start from a batch: unit variance before every nonlinearity, theta's mean the scales that give it."""
    scales = model.network.initialise(x)
    with torch.no_grad():
        model.posterior.output.shift.copy_(scales)
