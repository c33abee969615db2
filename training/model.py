"""Construction of Bayesian models from recipes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from model_store.errors import InvalidInput
from training import log
from training.bayes.likelihoods import Categorical, Gaussian, Likelihood
from training.bayes.network import BayesianModel
from training.data.rows import Dataset, Rows
from training.methods import Blueprint
from training.networks.architectures import (
    ARCHITECTURES,
    call_factory,
    channels_first,
    load_state,
    load_weights,
    mlp,
)
from training.networks.fixed_layers import PiecewiseLinear, quantile_knots, select_inputs
from training.networks.networks import DrawnNetwork, noise_rows
from training.networks.probes import ROWS, check_ids, check_outputs
from training.recipe import Recipe
from training.sections import NetworkSection
from training.seeds import Stream, hash_key

if TYPE_CHECKING:
    from training.versions import Parent


def build(
    recipe: Recipe,
    shape: Sequence[int],
    classes: int,
    rows: Num[Tensor, "R I"] | None = None,
    encoded: int | None = None,
    weights: Mapping[str, Tensor] | None = None,
    largest_id: int | None = None,
) -> BayesianModel:
    """Build a recipe's model, and initialise it from the recipe's seed.

    Args:
        shape: the shape of a raw row.
        classes: the number of classes; 0 for regression.
        rows: some training rows, or None if the caller loads parameters afterwards.
        encoded: the length of an encoded row, if there is an encoder.
        weights: the `state_dict` of a trained network, which replaces the recipe's weights.
        largest_id: the largest id that the module must accept, if rows consist of ids.
    """
    section, likelihood = recipe.network, get_likelihood(recipe, classes)
    row_shape = _row_shape(recipe, shape, encoded)
    mean, std = standardisation(section, row_shape if encoded is None else None)
    examples = _examples(recipe, row_shape, rows, mean, std, takes_ids=encoded is None)

    def make() -> nn.Module:
        module = make_module(section, row_shape, likelihood.outputs)
        if weights is not None:
            load_state(module, weights, "network", "the network of the version to start from")
        elif section.weights is not None and rows is not None:
            load_weights(module, Path(section.weights))
        if largest_id is not None:
            check_ids(module, row_shape, largest_id)
        if section.factory is not None:
            check_outputs(module, section.factory, examples, likelihood)
        return module

    is_trained = section.is_trained or weights is not None
    blueprint = Blueprint(make, row_shape, examples, section.bayesian, section.trained, is_trained)
    seed = hash_key(recipe.seed, Stream.INITIALISATION)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = recipe.posterior.network(blueprint)
        network.mean, network.std = mean, std
        posterior = recipe.posterior.posterior(network, torch.Generator().manual_seed(seed))
    return BayesianModel(network, posterior, likelihood, recipe.posterior.decay_prior_std)


def _row_shape(recipe: Recipe, shape: Sequence[int], encoded: int | None) -> tuple[int, ...]:
    if encoded is not None:
        return (encoded,)
    if recipe.network.hidden is not None:
        return (math.prod(shape),)
    return tuple(shape) if recipe.data.takes_ids else channels_first(shape)


def _examples(
    recipe: Recipe,
    shape: tuple[int, ...],
    rows: Num[Tensor, "R I"] | None,
    mean: Tensor,
    std: Tensor,
    takes_ids: bool,
) -> Num[Tensor, "R ..."]:
    """Return example inputs for testing a network.

    They are noise if the network standardises its inputs. Otherwise they are real rows, or zeros
    if there are none.
    """
    if recipe.is_standardised:
        examples = noise_rows(shape)
    elif rows is None:
        examples = torch.zeros(ROWS, *shape)
    else:
        examples = (rows[:ROWS].float().unflatten(1, shape) - mean) / std
    return examples.long() if recipe.data.takes_ids and takes_ids else examples


def with_knots(recipe: Recipe, data: Dataset, train: Rows, start: "Parent | None" = None) -> Recipe:
    """If a recipe has `bins`, set its knots from `start` or from quantiles of training rows.

    With `max_inputs`, the knots of unimportant numbers are None.
    """
    network = recipe.network
    if network.bins is None or network.knots is not None:
        return recipe
    if not data.columns:
        expected = "no bins, since rows have no columns"
        raise InvalidInput("network.bins", expected, str(network.bins))
    knots = None if start is None else start.recipe.network.knots
    if knots is None:
        knots = _make_knots(recipe, network.bins, train)
    return recipe.model_copy(update={"network": network.model_copy(update={"knots": knots})})


def _make_knots(recipe: Recipe, bins: int, train: Rows) -> list[list[float] | None]:
    inputs, max_inputs = train.x.shape[1], recipe.network.max_inputs
    if max_inputs is None or max_inputs >= inputs:
        return [*quantile_knots(train.x, bins)]
    log.info("selecting the most important of %d numbers per row", inputs)
    selected = select_inputs(train.x, train.y, max_inputs, recipe.task == "regression")
    log.info("the networks read %d of them", len(selected))
    bins = bins * max_inputs // max(max_inputs, len(selected))
    knots: list[list[float] | None] = [None] * inputs
    for i, edges in zip(selected, quantile_knots(train.x[:, selected], bins), strict=True):
        knots[i] = edges
    return knots


def get_likelihood(recipe: Recipe, classes: int) -> Likelihood:
    if recipe.task == "regression":
        return Gaussian(recipe.likelihood.noise, recipe.network.is_trained)
    return Categorical(classes, is_weighted=recipe.data.class_weights is not None)


def make_module(section: NetworkSection, shape: Sequence[int], outputs: int) -> nn.Module:
    if section.hidden is not None:
        if section.knots is None:
            return mlp(math.prod(shape), section.hidden, outputs, section.dropout)
        first = PiecewiseLinear(section.knots)
        return nn.Sequential(first, *mlp(first.outputs, section.hidden, outputs, section.dropout))
    if section.factory is not None:
        return call_factory("network.factory", section.factory, tuple(shape), outputs)
    assert section.kind is not None
    return ARCHITECTURES[section.kind](shape, outputs)


def standardisation(
    section: NetworkSection, shape: tuple[int, ...] | None
) -> tuple[Tensor, Tensor]:
    """Return a recipe's pixel mean and standard deviation, by default 0 and 1.

    `shape` is None for encoded rows, which are not standardised by pixel statistics.
    """
    pixels = section.pixels
    if pixels is None or shape is None:
        return torch.zeros(()), torch.ones(())
    channels = shape[0] if len(shape) == 3 else 1
    if len(pixels.mean) != channels:
        expected = f"{channels} numbers, one per channel"
        raise InvalidInput("network.standardise.mean", expected, str(len(pixels.mean)))
    mean, std = (
        255.0 * torch.tensor(numbers, dtype=torch.float32).view(-1, *[1] * (len(shape) - 1))
        for numbers in (pixels.mean, pixels.std)
    )
    return mean, std


def initialise(model: BayesianModel, x: Float[Tensor, "N I"], standardise: bool = True) -> None:
    """Initialise standardisation and theta from rows (Salimans and Kingma 2016, section 3)."""
    start = model.network.initialise(x, standardise)
    if start is not None:
        model.posterior.start_at(start)
        # `start_at` sets the shift, but the mean must equal the scales of the trained network.
        if isinstance(model.network, DrawnNetwork) and model.network.is_trained:
            model.posterior.start_at(2 * start - model.posterior.centre())
