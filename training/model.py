"""A Bayesian model: a primary network, the posterior over its theta, and the likelihood of its
outputs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from model_store.errors import InvalidInput, one_line
from training.bayes.likelihoods import Categorical, Gaussian, Likelihood
from training.bayes.posterior import FactorialGaussian, Posterior
from training.data import Dataset
from training.networks.architectures import (
    ARCHITECTURES,
    channels_first,
    from_factory,
    load_weights,
    mlp,
)
from training.networks.batch_ensemble import BatchEnsemble
from training.networks.networks import DrawnNetwork, MemberNetwork, noise_rows
from training.networks.piecewise import PiecewiseLinear, quantile_knots
from training.networks.probes import ROWS, check_ids, check_outputs, output_layer
from training.recipe import NetworkSection, Recipe
from training.seeds import Stream, hash_key

if TYPE_CHECKING:
    from training.versions import Parent

Network = DrawnNetwork | MemberNetwork | BatchEnsemble
# rows x draws of a prediction at a time: of the papers' CNN one activation of them takes 134 MB
CHUNK_ROWS = 512


class BayesianModel(nn.Module):
    """outputs[k, n] = f(x[n], theta(eps[k]))."""

    def __init__(
        self,
        network: Network,
        posterior: Posterior,
        likelihood: Likelihood,
        decay_prior_std: float | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.posterior = posterior
        self.likelihood = likelihood
        self.decay_prior_std = decay_prior_std

    def sample(
        self, x: Float[Tensor, "N I"], eps: Float[Tensor, "S E"], groups: int = 1
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "K"]]:
        """Return what is served of each draw and row, for training, and each draw's KL, in nats.

        With G `groups` (of rows, in order) there are S = K G draws, the first G of them the first
        draw of each group.
        """
        if isinstance(self.posterior, FactorialGaussian):
            assert isinstance(self.network, DrawnNetwork)
            kl = self.posterior.divergence(eps)
            outputs = self.network.sample_locally(x, *self.posterior.moments(), len(eps))
        else:
            theta, kl = self.posterior.sample(eps)
            theta = theta.unflatten(0, (-1, groups))
            kl = kl.unflatten(0, (-1, groups)).mean(1)
            if groups > 1:
                theta = theta.index_select(
                    1, torch.arange(len(x), device=x.device) * groups // len(x)
                )
            outputs, _, network_kl = self.network.run(x, theta)
            kl = kl if network_kl is None else kl + network_kl
        if self.decay_prior_std is not None:
            kl = kl + self.network.weight_decay(self.decay_prior_std)
        return self.likelihood(outputs), kl

    @torch.no_grad()
    def predict(
        self, x: Num[Tensor, "N I"], eps: Float[Tensor, "K E"], chunk_rows: int = CHUNK_ROWS
    ) -> Float[Tensor, "K N C"]:
        theta = self.posterior(eps)[:, None]
        # whole-weight draws go one by one: convolutions are then torch's own
        is_one_by_one = isinstance(self.network, DrawnNetwork) and not self.network.is_paired
        groups = theta.split(1 if is_one_by_one else len(theta))
        served = [self.serve(x, group, max(1, chunk_rows // len(group))) for group in groups]
        return torch.cat(served)

    def serve(
        self, x: Num[Tensor, "N I"], theta: Float[Tensor, "K P D"], rows: int
    ) -> Float[Tensor, "K N C"]:
        """Return what is served of rows under draws of theta, `rows` at a time."""
        parts = [self.likelihood(self.network(part.float(), theta)[0]) for part in x.split(rows)]
        return torch.cat(parts, dim=1)


def build(
    recipe: Recipe,
    shape: Sequence[int],
    classes: int,
    rows: Num[Tensor, "R I"] | None = None,
    encoded: int | None = None,
    weights: Mapping[str, Tensor] | None = None,
    largest_id: int | None = None,
) -> BayesianModel:
    """Return a model as a recipe says for rows of a shape, its parameters a function of the
    recipe's seed.

    Args:
        recipe: what to build.
        shape: of a row of the data.
        classes: how many there are; a regression has none (0).
        rows: some training rows, where a fit begins; without them, parameters are about to be
            loaded.
        encoded: how many numbers the network takes of a row, and how long `rows` are, where it has
            an encoder.
        weights: the network's `state_dict`, if it was trained already, in place of what the recipe
            says of its start.
        largest_id: of rows of ids; a module that does not take it is refused.
    """
    seed = hash_key(recipe.seed, Stream.INITIALISATION)
    wanted, method, of = recipe.network, recipe.inference, likelihood(recipe, classes)
    row_shape = _row_shape(recipe, shape)
    mean, std = torch.zeros(()), torch.ones(())
    if encoded is not None:
        row_shape = (encoded,)
    else:
        if wanted.hidden is not None:
            row_shape = (math.prod(shape),)
        mean, std = standardisation(wanted, row_shape)
    if wanted.is_standardised:
        examples = noise_rows(row_shape)
    elif rows is None:
        examples = torch.zeros(ROWS, *row_shape)
    else:
        examples = (rows[:ROWS].float().unflatten(1, row_shape) - mean) / std
    if recipe.data.takes_ids and encoded is None:
        examples = examples.long()

    def make() -> nn.Module:
        made = module(wanted, row_shape, of.outputs)
        if weights is not None:
            _load_parent(made, weights)
        elif wanted.weights is not None and rows is not None:
            load_weights(made, Path(wanted.weights))
        if largest_id is not None:
            check_ids(made, row_shape, largest_id)
        if wanted.factory is not None:
            check_outputs(made, wanted.factory, examples, of)
        return made

    network: Network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if method.stochastic is None:
            if wanted.bayesian is not None:
                expected = f"none for method {recipe.method}, which draws no layer"
                raise InvalidInput("network.bayesian", expected, "some")
            count = getattr(recipe.posterior, "members", 1)
            starts_trained = wanted.is_trained or wanted.trained
            if starts_trained and (method.shares_weights or method.is_anchored):
                expected = f"no trained layers with {recipe.method}, whose members start apart"
                raise InvalidInput("network", expected, "some")
            if method.shares_weights:
                network = BatchEnsemble(make(), count, row_shape, examples)
            else:
                members = [make() for _ in range(count)]
                prior = recipe.posterior.prior_std if method.is_anchored else None  # type: ignore[attr-defined]
                network = MemberNetwork(members, row_shape, wanted.trained, examples, prior)
        else:
            made = make()
            layers = _drawn_patterns(recipe, made, examples)
            stochastic = replace(method.stochastic(recipe.posterior), layers=layers)
            is_trained = wanted.is_trained or weights is not None
            network = DrawnNetwork(
                made, stochastic, row_shape, wanted.trained, examples, is_trained
            )
        network.mean, network.std = mean, std
        generator = torch.Generator().manual_seed(seed)
        posterior = method.posterior(recipe.posterior, network, generator)
    decay = recipe.posterior.prior_std if method.decays else None  # type: ignore[attr-defined]
    return BayesianModel(network, posterior, of, decay)


def with_knots(
    recipe: Recipe, data: Dataset, x: Num[np.ndarray, "N I"], start: "Parent | None" = None
) -> Recipe:
    """Return a recipe that says between which knots its network encodes columns: those of `start`,
    else quantiles of rows x."""
    network = recipe.network
    if network.bins is None or network.knots is not None:
        return recipe
    if not data.columns:
        raise InvalidInput("network.bins", "none, since rows have no columns", str(network.bins))
    knots = None if start is None else start.recipe.network.knots
    knots = quantile_knots(x, network.bins) if knots is None else knots
    return recipe.model_copy(update={"network": network.model_copy(update={"knots": knots})})


def likelihood(recipe: Recipe, classes: int) -> Likelihood:
    if recipe.task == "regression":
        return Gaussian(recipe.noise, recipe.network.is_trained)
    return Categorical(classes, is_weighted=recipe.data.class_weights is not None)


def _row_shape(recipe: Recipe, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape) if recipe.data.takes_ids else channels_first(shape)


def _load_parent(made: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Load the weights of a version's network, unless they are another's, as of a factory that has
    changed."""
    try:
        made.load_state_dict(weights)
    except RuntimeError as error:
        expected = "the network of the version to go on from"
        raise InvalidInput("network", expected, one_line(error)[:300]) from None
    return made


def _drawn_patterns(
    recipe: Recipe, made: nn.Module, examples: Num[Tensor, "R ..."]
) -> Sequence[str] | None:
    """Return the patterns of the drawn layers' names; None for all."""
    layers = recipe.network.bayesian
    if not recipe.inference.draws_last_layer:
        return layers
    if layers is not None:
        expected = f"none for method {recipe.method}, which draws the last layer"
        raise InvalidInput("network.bayesian", expected, "some")
    return None if isinstance(made, nn.Linear) else [output_layer(made, examples)]


def module(section: NetworkSection, shape: Sequence[int], outputs: int) -> nn.Module:
    if section.hidden is not None:
        if section.knots is None:
            return mlp(math.prod(shape), section.hidden, outputs, section.dropout)
        first = PiecewiseLinear(section.knots)
        return nn.Sequential(first, *mlp(first.outputs, section.hidden, outputs, section.dropout))
    if section.factory is not None:
        return from_factory(section.factory, shape, outputs)
    assert section.kind is not None
    return ARCHITECTURES[section.kind](shape, outputs)


def standardisation(section: NetworkSection, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return what is taken from a row's numbers and what they are divided by, before any data are
    seen."""
    if section.pixel_mean is None or section.pixel_std is None:
        return torch.zeros(()), torch.ones(())
    channels = shape[0] if len(shape) == 3 else 1
    if len(section.pixel_mean) != channels:
        expected = f"{channels} numbers, one a channel"
        raise InvalidInput("network.pixel_mean", expected, str(len(section.pixel_mean)))
    mean, std = (
        255.0 * torch.tensor(numbers, dtype=torch.float32).view(-1, *[1] * (len(shape) - 1))
        for numbers in (section.pixel_mean, section.pixel_std)
    )
    return mean, std


def initialise(model: BayesianModel, x: Float[Tensor, "N I"], standardise: bool = True) -> None:
    """Start from a batch: standardised rows and, of scales, unit variance before every
    nonlinearity."""
    start = model.network.initialise(x, standardise)
    if start is not None:
        model.posterior.start_at(start)
        # of a trained network the mean is to be there, not the shift
        if isinstance(model.network, DrawnNetwork) and model.network.is_trained:
            model.posterior.start_at(2 * start - model.posterior.centre())
