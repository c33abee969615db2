"""A Bayesian model: a primary network, the posterior over its theta, and the likelihood of its
outputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from model_store.errors import InvalidInput, one_line
from training.networks.architectures import (
    channels_first,
    from_factory,
    gal_cnn,
    load_weights,
    mlp,
    papers_cnn,
)
from training.networks.flows import Composition, iaf, realnvp
from training.networks.layers import WeightLayer
from training.networks.likelihoods import Categorical, Gaussian, Likelihood
from training.networks.networks import DrawnNetwork, MemberNetwork, Stochastic, noise_rows
from training.networks.probes import DROPOUTS, ROWS, check_ids, check_width, last_layer
from training.networks.selection import DRAWABLE, drawn_layers, freeze, is_named
from training.networks.split import NotSplit, SplitNetwork, split
from training.posteriors import FactorialGaussian, Posterior
from training.posteriors.dropout import MaskPosterior
from training.posteriors.gaussian import GaussianPosterior, GaussianPrior, ScaleMixturePrior
from training.posteriors.hypernet_noise import NoisePosterior
from training.posteriors.hypernetwork import HypernetworkPosterior, Subspace
from training.posteriors.laplace import LaplacePosterior
from training.posteriors.matrix_normal import MatrixNormalPosterior
from training.posteriors.members import MemberPosterior
from training.recipe import (
    DropoutSection,
    EnsembleSection,
    FlowSection,
    GaussianSection,
    HypernetSection,
    IAFSection,
    LaplaceSection,
    MixtureSection,
    NetworkSection,
    PointSection,
    Recipe,
    WeightFlowSection,
)
from training.seeds import Stream, hash_key

Network = DrawnNetwork | MemberNetwork
# rows x draws of a prediction at a time: of the papers' CNN one activation of them takes 134 MB
CHUNK_ROWS = 512
FLOWS: dict[str, Callable[..., Composition]] = {
    "bhn-realnvp": realnvp,
    "bhn-iaf": iaf,
    "realnvp": realnvp,
    "iaf": iaf,
}


class BayesianModel(nn.Module):
    """outputs[k, n] = f(x[n], theta(eps[k]))."""

    def __init__(
        self,
        network: Network,
        posterior: Posterior,
        likelihood: Likelihood,
        decay_prior_std: float | None = None,
    ) -> None:
        """Make a model; `decay_prior_std` is that of the prior on weights that are not drawn, if
        they have one."""
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
        """Return what is served of each draw and row, rows x draws in chunks."""
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
        return _built(
            recipe,
            tuple(shape),
            likelihood(recipe, classes),
            rows,
            generator,
            encoded,
            weights,
            largest_id,
        )


def likelihood(recipe: Recipe, classes: int) -> Likelihood:
    """Return the likelihood that goes with a recipe's task."""
    if recipe.task == "regression":
        return Gaussian(recipe.noise, recipe.network.is_trained)
    return Categorical(classes, is_weighted=recipe.data.class_weights is not None)


def _built(
    recipe: Recipe,
    shape: tuple[int, ...],
    likelihood: Likelihood,
    rows: Num[Tensor, "R I"] | None,
    generator: torch.Generator,
    encoded: int | None,
    weights: Mapping[str, Tensor] | None,
    largest_id: int | None,
) -> BayesianModel:
    section, wanted = recipe.posterior, recipe.network
    data_shape = shape
    if encoded is not None:
        shape = (encoded,)
    takes_ids = recipe.data.takes_ids and encoded is None
    row_shape = (math.prod(shape),) if wanted.hidden is not None else _shape_taken(shape, takes_ids)
    inputs = (
        standardisation(wanted, row_shape) if encoded is None else (torch.zeros(()), torch.ones(()))
    )
    examples = _examples(wanted, row_shape, inputs, rows)
    examples = examples.long() if takes_ids else examples

    def make() -> nn.Module:
        if wanted.encoder == "frozen":
            head = _head(recipe, data_shape, likelihood, rows is not None and weights is None)
            return head if weights is None else _with_weights(head, weights)
        made = module(wanted, row_shape, likelihood.outputs)
        if weights is not None:
            _with_weights(made, weights)
        elif wanted.weights is not None and rows is not None:
            load_weights(made, Path(wanted.weights))
        if largest_id is not None:
            check_ids(made, row_shape, largest_id)
        if wanted.factory is not None:
            check_width(made, wanted.factory, examples, likelihood.outputs, likelihood.meaning)
        return made

    def drawing(stochastic: Stochastic, made: nn.Module | None = None) -> DrawnNetwork:
        is_trained = wanted.is_trained or weights is not None
        module = make() if made is None else made
        network = DrawnNetwork(module, stochastic, row_shape, wanted.trained, examples, is_trained)
        network.mean, network.std = inputs
        return network

    layers = wanted.bayesian
    if isinstance(section, PointSection):
        if layers is not None:
            raise InvalidInput(
                "network.bayesian", f"none for method {recipe.method}, which draws no layer", "some"
            )
        members = section.members if isinstance(section, EnsembleSection) else 1
        network = MemberNetwork(
            [make() for _ in range(members)], row_shape, wanted.trained, examples
        )
        network.mean, network.std = inputs
        return BayesianModel(network, MemberPosterior(members), likelihood, section.prior_std)
    posterior: Posterior
    decay = None
    if isinstance(section, FlowSection):
        drawn = drawing(
            Stochastic("weights" if recipe.method == "bhn-weights" else "scales", layers)
        )
        posterior = _hypernetwork(recipe.method, section, drawn.theta_dimension, generator)
    elif isinstance(section, GaussianSection | MixtureSection):
        drawn = drawing(Stochastic("weights", layers))
        if isinstance(section, MixtureSection):
            prior = ScaleMixturePrior(section.pi, section.std_1, section.std_2)
            posterior = GaussianPosterior(drawn.theta_dimension, section.initial_log_std, prior)
        elif recipe.method == "mvn":
            posterior = MatrixNormalPosterior(
                drawn.slots, section.initial_log_std, section.prior_std
            )
        else:
            gaussian = GaussianPrior(section.prior_std)
            posterior = GaussianPosterior(drawn.theta_dimension, section.initial_log_std, gaussian)
    elif isinstance(section, LaplaceSection):
        made = make()
        last, gives_outputs = last_layer(made, examples)
        drawn = drawing(Stochastic("weights", _patterns(recipe, made, examples)), made)
        posterior = _laplace(section, drawn, last if gives_outputs else None)
    elif isinstance(section, DropoutSection):
        drawn = drawing(Stochastic("masks", layers, section.rate, section.input_rate))
        posterior = MaskPosterior(drawn.slots, is_served=recipe.method != "mle-dropout")
        decay = section.prior_std
    else:
        assert isinstance(section, HypernetSection)
        stochastic = Stochastic(
            "hypernet",
            layers,
            hidden=section.hidden,
            vector_scaling=section.mean == "vector-scaling",
            initial_log_std=section.initial_log_std,
        )
        drawn = drawing(stochastic)
        posterior = NoisePosterior(drawn.theta_dimension)
    return BayesianModel(drawn, posterior, likelihood, decay)


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
    """Return the shape in which a module takes rows: pictures have a channel, ids are as they
    are."""
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
    if (
        layers is not None
        or not isinstance(recipe.posterior, LaplaceSection)
        or isinstance(made, DRAWABLE)
    ):
        return layers
    name, _ = last_layer(made, examples)
    return None if name is None else [name]


def _staying(recipe: Recipe, made: nn.Module, examples: Num[Tensor, "R ..."]) -> list[str]:
    """Return the names of the layers that are drawn, masked or trained."""
    section, layers = recipe.posterior, _patterns(recipe, made, examples)
    names = [] if isinstance(section, PointSection) else list(drawn_layers(made, layers))
    drops = isinstance(section, DropoutSection)
    own = (
        [
            n
            for n, layer in made.named_modules()
            if isinstance(layer, DROPOUTS) and is_named(n, layers)
        ]
        if drops
        else []
    )
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
    """Return what of a network comes after its encoder.

    Raises:
        InvalidInput: if the network is not cut any more where it was.
    """
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
    """Return the module that a recipe names, for rows of a shape."""
    if section.hidden is not None:
        return mlp(math.prod(shape), section.hidden, outputs)
    if section.factory is not None:
        return from_factory(section.factory, shape, outputs)
    return (papers_cnn if section.kind == "papers-cnn" else gal_cnn)(shape, outputs)


def _laplace(
    section: LaplaceSection, drawn: DrawnNetwork, output_layer: str | None
) -> LaplacePosterior:
    """Return the posterior of a network's drawn layers; `output_layer` is one whose values are the
    outputs.

    Raises:
        InvalidInput: if a full covariance is wanted of other layers than that, or of one that is
            too large.
    """
    names = [slot.name for slot in drawn.slots]
    if section.structure == "full" and names != [output_layer]:
        expected = "kronecker or diagonal, or a last layer alone whose values are the outputs"
        raise InvalidInput("posterior.structure", expected, f"'full' of {', '.join(names)}")
    of_layers = {
        layer.place.slot.name: layer.groups
        for layer in drawn.modules()
        if isinstance(layer, WeightLayer)
    }
    prior_std = section.prior_std if isinstance(section.prior_std, float | int) else None
    return LaplacePosterior(
        drawn.slots, [of_layers[name] for name in names], section.structure, prior_std
    )


def _hypernetwork(
    method: str, section: FlowSection, dimension: int, generator: torch.Generator
) -> HypernetworkPosterior:
    flow = FLOWS[section.flow if isinstance(section, WeightFlowSection) else method]
    inner = section.noise_dimension if isinstance(section, IAFSection) else None
    lift = None if inner is None else Subspace(inner, dimension, generator)
    made = flow(
        inner or dimension, section.couplings, section.hidden, section.initial_log_std, generator
    )
    return HypernetworkPosterior(made, inner or dimension, section.prior_std, lift)


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
    """Return rows as the network takes them: noise if they are standardised, since it then takes
    any numbers."""
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
