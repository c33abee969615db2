"""A Bayesian model: a primary network, the posterior over its theta, and the likelihood of its
outputs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from model_store.errors import InvalidInput, one_line
from training.networks.architectures import (
    ARCHITECTURES,
    channels_first,
    from_factory,
    load_weights,
    mlp,
)
from training.networks.likelihoods import Categorical, Gaussian, Likelihood
from training.networks.networks import DrawnNetwork, MemberNetwork, noise_rows
from training.networks.probes import DROPOUTS, ROWS, check_ids, check_width, last_layer
from training.networks.selection import DRAWABLE, drawn_layers, freeze, is_named
from training.networks.split import NotSplit, SplitNetwork, split
from training.posteriors import FactorialGaussian, Posterior
from training.recipe import NetworkSection, Recipe
from training.seeds import Stream, hash_key

Network = DrawnNetwork | MemberNetwork
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
            outputs = self.network.drawn_locally(x, *self.posterior.moments(), len(eps))
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
        groups = theta.split(len(theta) if self.network.is_paired else 1)
        return torch.cat(
            [self._predict(x, group, max(1, chunk_rows // len(group))) for group in groups]
        )

    def _predict(self, x: Tensor, theta: Tensor, rows: int) -> Tensor:
        return torch.cat(
            [self.likelihood(self.network(part.float(), theta)[0]) for part in x.split(rows)], dim=1
        )


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

    Raises:
        InvalidInput: if the network cannot be made Bayesian; it names the layer.
    """
    generator = torch.Generator().manual_seed(hash_key(recipe.seed, Stream.INITIALISATION))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash_key(recipe.seed, Stream.INITIALISATION))
        start = _Start(rows, encoded, weights, largest_id)
        return _build(recipe, tuple(shape), likelihood(recipe, classes), start, generator)


def likelihood(recipe: Recipe, classes: int) -> Likelihood:
    if recipe.task == "regression":
        return Gaussian(recipe.noise, recipe.network.is_trained)
    return Categorical(classes, is_weighted=recipe.data.class_weights is not None)


@dataclass(frozen=True)
class _Start:
    """Where a network begins: see `build`."""

    rows: Num[Tensor, "R I"] | None
    encoded: int | None
    weights: Mapping[str, Tensor] | None
    largest_id: int | None


def _build(
    recipe: Recipe,
    data_shape: tuple[int, ...],
    likelihood: Likelihood,
    start: _Start,
    generator: torch.Generator,
) -> BayesianModel:
    wanted, method = recipe.network, recipe.approximation
    shape = data_shape if start.encoded is None else (start.encoded,)
    takes_ids = recipe.data.takes_ids and start.encoded is None
    row_shape = (math.prod(shape),) if wanted.hidden is not None else _shape_taken(shape, takes_ids)
    inputs = torch.zeros(()), torch.ones(())
    if start.encoded is None:
        inputs = standardisation(wanted, row_shape)
    examples = _examples(wanted, row_shape, inputs, start.rows)
    examples = examples.long() if takes_ids else examples

    def make() -> nn.Module:
        if wanted.encoder == "frozen":
            begins = start.rows is not None and start.weights is None
            head = _head(recipe, data_shape, likelihood, begins)
            return head if start.weights is None else _with_weights(head, start.weights)
        made = module(wanted, row_shape, likelihood.outputs)
        if start.weights is not None:
            _with_weights(made, start.weights)
        elif wanted.weights is not None and start.rows is not None:
            load_weights(made, Path(wanted.weights))
        if start.largest_id is not None:
            check_ids(made, row_shape, start.largest_id)
        if wanted.factory is not None:
            check_width(made, wanted.factory, examples, likelihood.outputs, likelihood.meaning)
        return made

    network: Network
    if method.stochastic is None:
        if wanted.bayesian is not None:
            expected = f"none for method {recipe.method}, which draws no layer"
            raise InvalidInput("network.bayesian", expected, "some")
        members = [make() for _ in range(getattr(recipe.posterior, "members", 1))]
        network = MemberNetwork(members, row_shape, wanted.trained, examples)
    else:
        made = make()
        stochastic = replace(
            method.stochastic(recipe.posterior), layers=_patterns(recipe, made, examples)
        )
        is_trained = wanted.is_trained or start.weights is not None
        output_layer = _output_layer(made, examples) if method.draws_last_layer else None
        network = DrawnNetwork(made, stochastic, row_shape, wanted.trained, examples, is_trained)
        network.output_layer = output_layer
    network.mean, network.std = inputs
    posterior = method.posterior(recipe.posterior, network, generator)
    decay = recipe.posterior.prior_std if method.decays else None  # type: ignore[attr-defined]
    return BayesianModel(network, posterior, likelihood, decay)


def _output_layer(made: nn.Module, examples: Num[Tensor, "R ..."]) -> str | None:
    last, gives_outputs = last_layer(made, examples)
    return last if gives_outputs else None


def _with_weights(made: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Load the weights of a version's network.

    Raises:
        InvalidInput: if they are another's, as of a factory that has changed.
    """
    try:
        made.load_state_dict(weights)
    except RuntimeError as error:
        raise InvalidInput(
            "network", "the network of the version to go on from", one_line(error)[:300]
        ) from None
    return made


def _shape_taken(shape: tuple[int, ...], takes_ids: bool) -> tuple[int, ...]:
    return shape if takes_ids else channels_first(shape)


def split_network(
    recipe: Recipe, shape: Sequence[int], classes: int, with_weights: bool
) -> SplitNetwork | None:
    """Return a recipe's network for rows of a shape, cut before its first layer that is drawn or
    trained; None where nothing with weights comes before.

    Raises:
        NotSplit: if it cannot be cut.
        InvalidInput: if the network is not one that can be fitted.
    """
    wanted, of = recipe.network, likelihood(recipe, classes)
    takes_ids = recipe.data.takes_ids
    row_shape = _shape_taken(tuple(shape), takes_ids)
    made = module(wanted, row_shape, of.outputs)
    if wanted.weights is not None and with_weights:
        load_weights(made, Path(wanted.weights))
    examples = torch.zeros(ROWS, *row_shape)
    examples = examples.long() if takes_ids else examples
    assert wanted.factory is not None
    check_width(made, wanted.factory, examples, of.outputs, of.meaning)
    return split(made, _staying(recipe, made, examples), examples)


def _patterns(
    recipe: Recipe, made: nn.Module, examples: Num[Tensor, "R ..."]
) -> Sequence[str] | None:
    """Return the patterns of the layers that are drawn: those that are named, of laplace else the
    last that runs."""
    layers = recipe.network.bayesian
    is_default = layers is None and recipe.approximation.draws_last_layer
    if not is_default or isinstance(made, DRAWABLE):
        return layers
    name, _ = last_layer(made, examples)
    return None if name is None else [name]


def _staying(recipe: Recipe, made: nn.Module, examples: Num[Tensor, "R ..."]) -> list[str]:
    layers, stochastic = _patterns(recipe, made, examples), recipe.approximation.stochastic
    names = [] if stochastic is None else list(drawn_layers(made, layers))
    has_masks = stochastic is not None and stochastic(recipe.posterior).drawn == "masks"
    own = [
        name
        for name, layer in made.named_modules()
        if has_masks and isinstance(layer, DROPOUTS) and is_named(name, layers)
    ]
    freeze(made, recipe.network.trained, names)
    trained = [
        n
        for n, layer in made.named_modules()
        if any(p.requires_grad for p in layer.parameters(recurse=False))
    ]
    return [*dict.fromkeys([*names, *own, *trained])]


def _head(
    recipe: Recipe, shape: tuple[int, ...], likelihood: Likelihood, with_weights: bool
) -> nn.Module:
    try:
        classes = likelihood.outputs if recipe.task == "classification" else 0
        parts = split_network(recipe, shape, classes, with_weights)
    except NotSplit as error:
        raise InvalidInput(
            "network.encoder", "a network that can be cut in two", str(error)
        ) from None
    if parts is None:
        expected = "frozen layers with weights before those that are drawn or trained"
        raise InvalidInput("network.encoder", expected, "none")
    return parts.head


def module(section: NetworkSection, shape: Sequence[int], outputs: int) -> nn.Module:
    if section.hidden is not None:
        return mlp(math.prod(shape), section.hidden, outputs)
    if section.factory is not None:
        return from_factory(section.factory, shape, outputs)
    assert section.kind is not None
    return ARCHITECTURES[section.kind](shape, outputs)


def standardisation(section: NetworkSection, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return what is taken from a row's numbers and what they are divided by, before any data are
    seen.

    Raises:
        InvalidInput: if there are more or fewer numbers than channels.
    """
    if section.pixel_mean is None or section.pixel_std is None:
        return torch.zeros(()), torch.ones(())
    channels = shape[0] if len(shape) == 3 else 1
    if len(section.pixel_mean) != channels:
        raise InvalidInput(
            "network.pixel_mean", f"{channels} numbers, one a channel", str(len(section.pixel_mean))
        )
    mean, std = (
        255.0 * torch.tensor(numbers, dtype=torch.float32).view(-1, *[1] * (len(shape) - 1))
        for numbers in (section.pixel_mean, section.pixel_std)
    )
    return mean, std


def _examples(
    section: NetworkSection,
    shape: tuple[int, ...],
    inputs: tuple[Tensor, Tensor],
    rows: Num[Tensor, "R I"] | None,
) -> Float[Tensor, "S ..."]:
    if section.is_standardised:
        return noise_rows(shape)
    if rows is None:
        return torch.zeros(ROWS, *shape)
    mean, std = inputs
    return (rows[:ROWS].float().unflatten(1, shape) - mean) / std


def initialise(model: BayesianModel, x: Float[Tensor, "N I"], standardise: bool = True) -> None:
    """Start from a batch: standardised rows and, of scales, unit variance before every
    nonlinearity."""
    start = model.network.initialise(x, standardise)
    if start is not None:
        model.posterior.start_at(start)
        if (
            isinstance(model.network, DrawnNetwork) and model.network.is_trained
        ):  # which the mean is, not the shift
            model.posterior.start_at(2 * start - model.posterior.centre())
