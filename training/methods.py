"""Training methods, one class for each value of the recipe key `method`.

A method is also the recipe's `[posterior]` section. It builds the network and the posterior, and
has training defaults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Num
from pydantic import Field
from torch import Tensor, nn

from model_store.errors import InvalidInput
from training.bayes.dropout import MaskPosterior
from training.bayes.flows import Composition, iaf, realnvp
from training.bayes.gaussian import (
    GaussianPosterior,
    MixturePriorPosterior,
    NormalPriorPosterior,
    ScaleMixturePrior,
)
from training.bayes.hamiltonian import SampledPosterior
from training.bayes.hypernetwork import HypernetworkPosterior
from training.bayes.laplace import LaplacePosterior
from training.bayes.layers import Stochastic
from training.bayes.matrix_normal import MatrixNormalPosterior
from training.bayes.members import MemberPosterior, MixturePosterior
from training.bayes.network import Network
from training.bayes.posterior import FactorialGaussian, Posterior
from training.bayes.variational_hypernet import NoisePosterior
from training.networks.batch_ensemble import BatchEnsemble
from training.networks.fixed_layers import with_random_features
from training.networks.networks import DrawnNetwork, MemberNetwork
from training.networks.probes import output_layer
from training.sections import Count, LogStd, Positive, Rate, Section

MemberCount = Annotated[int, Field(ge=2, le=100)]


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A recipe's module, with the settings that a method needs to build a network."""

    make: Callable[[], nn.Module]  # returns a new module
    shape: tuple[int, ...]  # of a row
    examples: Num[Tensor, "R ..."]  # valid rows
    layers: Sequence[str] | None = None  # patterns of layers to draw; None for all
    trained: Sequence[str] | None = None  # patterns of other layers to train; None for all
    is_trained: bool = False  # the posterior starts at the module's weights


class Method(Section):
    """The base class for methods.

    Fields are recipe keys, and class variables are training defaults.
    """

    name: ClassVar[str]
    is_variational: ClassVar[bool] = False  # maximises a bound
    is_post_hoc: ClassVar[bool] = False  # can be added to a trained network
    supports_int8: ClassVar[bool] = False
    groups_rows: ClassVar[bool] = False  # groups of rows have separate draws in a training step
    # With the full KL weight from the start, weights could collapse to the prior.
    ramps_kl: ClassVar[bool] = False
    alpha: ClassVar[float] = 0.0  # of the objective
    samples: ClassVar[int] = 1  # draws per training step
    learning_rate: ClassVar[float] = 1e-3

    def network(self, blueprint: Blueprint) -> Network:
        raise NotImplementedError

    def posterior(self, network: Network, generator: torch.Generator) -> Posterior:
        raise NotImplementedError

    @property
    def decay_prior_std(self) -> float | None:
        """The prior's standard deviation for fixed weights, or None if there is no prior."""
        return None

    def _check_random_start(self, blueprint: Blueprint) -> None:
        if blueprint.is_trained or blueprint.trained:
            expected = f"no trained layers with {self.name}, which starts at random"
            raise InvalidInput("network", expected, "some")


class DrawnMethod(Method):
    """A method that draws the parameters of layers in a single network."""

    kind: ClassVar[Literal["scales", "weights"]] = "weights"  # of the drawn parameters

    @property
    def stochastic(self) -> Stochastic:
        return Stochastic(self.kind)

    def patterns(self, _: nn.Module, blueprint: Blueprint) -> Sequence[str] | None:
        return blueprint.layers

    def network(self, blueprint: Blueprint) -> DrawnNetwork:
        module = blueprint.make()
        stochastic = replace(self.stochastic, layers=self.patterns(module, blueprint))
        shape, trained, examples = blueprint.shape, blueprint.trained, blueprint.examples
        return DrawnNetwork(module, stochastic, shape, trained, examples, blueprint.is_trained)


class RealNVP(DrawnMethod):
    """A coupling flow over the scales of weight-normalised layers (Krueger et al. 2017)."""

    name = "bhn-realnvp"
    is_variational = True
    supports_int8 = True
    groups_rows = True
    samples = 2
    # A lower rate leaves the scales far from converged (`experiments/certify/exact.py`).
    learning_rate = 1e-2
    kind: ClassVar[Literal["scales", "weights"]] = "scales"
    flow: ClassVar[Callable[..., Composition]] = realnvp
    follows_paths: ClassVar[bool] = False

    couplings: Annotated[int, Field(ge=0)] = 4
    hidden: Count = 50
    initial_log_std: LogStd = -7.0
    prior_std: Positive = 1.0

    def posterior(self, network: Network, generator: torch.Generator) -> HypernetworkPosterior:
        size = network.theta_dimension
        flow = self.flow(size, self.couplings, self.hidden, self.initial_log_std, generator)
        return HypernetworkPosterior(flow, size, self.prior_std, self.follows_paths)


class IAF(RealNVP):
    """An inverse autoregressive flow over the scales of weight-normalised layers."""

    name = "bhn-iaf"
    flow = iaf


class WeightHypernetwork(RealNVP):
    """A coupling flow over all weights of a small network."""

    name = "bhn-weights"
    supports_int8 = False
    groups_rows = False
    ramps_kl = True
    kind = "weights"
    follows_paths = True
    # Couplings need many draws to learn the correlations of weights.
    samples = 16


class VariationalHypernet(DrawnMethod):
    """A network that infers each layer's weight posterior from the layer's input."""

    name = "variational-hypernet"
    is_variational = True
    samples = 2

    hidden: Count = 50
    initial_log_std: Annotated[LogStd, Field(lt=0)] = -4.0  # below the prior's

    @property
    def stochastic(self) -> Stochastic:
        return Stochastic("hypernet", hidden=self.hidden, initial_log_std=self.initial_log_std)

    def posterior(self, network: Network, _: torch.Generator) -> NoisePosterior:
        return NoisePosterior(network.theta_dimension)


class GaussianWeights(DrawnMethod):
    """The base class for methods with Gaussian weights."""

    is_variational = True
    ramps_kl = True
    samples = 2

    initial_log_std: LogStd = -5.0


class BayesByBackprop(GaussianWeights):
    """Independent Gaussians over weights (Blundell et al. 2015)."""

    name = "bbb-gaussian"

    prior_std: Positive = 1.0

    def posterior(self, network: Network, _: torch.Generator) -> FactorialGaussian:
        return NormalPriorPosterior(network.theta_dimension, self.initial_log_std, self.prior_std)


class BayesByBackpropMixture(GaussianWeights):
    """Independent Gaussians over weights, with a Gaussian mixture prior."""

    name = "bbb-mixture"

    pi: Annotated[float, Field(gt=0, lt=1)] = 0.5
    std_1: Positive = 1.0
    std_2: Positive = 0.0025

    def posterior(self, network: Network, _: torch.Generator) -> GaussianPosterior:
        prior = ScaleMixturePrior(self.pi, self.std_1, self.std_2)
        return MixturePriorPosterior(network.theta_dimension, self.initial_log_std, prior)


class MatrixNormal(BayesByBackprop):
    """Matrix-variate Gaussians over each layer's weights (Louizos and Welling 2016)."""

    name = "mvn"

    def posterior(self, network: Network, _: torch.Generator) -> MatrixNormalPosterior:
        assert isinstance(network, DrawnNetwork)
        return MatrixNormalPosterior(network.slots, self.initial_log_std, self.prior_std)


class Dropout(DrawnMethod):
    """Random masks over units (Gal and Ghahramani 2016)."""

    name = "dropout"
    groups_rows = True
    is_served_with_masks: ClassVar[bool] = True

    rate: Rate = 0.5
    input_rate: Rate = 0.0
    prior_std: Positive | None = None

    @property
    def stochastic(self) -> Stochastic:
        return Stochastic("masks", rate=self.rate, input_rate=self.input_rate)

    def posterior(self, network: Network, _: torch.Generator) -> MaskPosterior:
        assert isinstance(network, DrawnNetwork)
        return MaskPosterior(network.slots, self.is_served_with_masks)

    @property
    def decay_prior_std(self) -> float | None:
        return self.prior_std


class AlphaDropout(Dropout):
    """Dropout trained with an alpha-divergence (Li and Gal 2017)."""

    name = "dropout-alpha"
    alpha = 0.5
    samples = 10


class PlainDropout(Dropout):
    """Dropout that is active only during training."""

    name = "mle-dropout"
    is_served_with_masks = False


class Laplace(DrawnMethod):
    """A Gaussian around the trained last-layer weights (Daxberger et al. 2021)."""

    name = "laplace"
    is_post_hoc = True

    prior_std: Positive | Literal["auto"] = "auto"

    def patterns(self, module: nn.Module, blueprint: Blueprint) -> Sequence[str] | None:
        if blueprint.layers is not None:
            expected = f"no layers for method {self.name}, which draws only the last layer"
            raise InvalidInput("network.bayesian", expected, "some")
        return None if isinstance(module, nn.Linear) else [output_layer(module, blueprint.examples)]

    def posterior(self, network: Network, _: torch.Generator) -> LaplacePosterior:
        assert isinstance(network, DrawnNetwork)
        (slot,) = network.slots
        return LaplacePosterior(slot, None if self.prior_std == "auto" else self.prior_std)


class LastLayerHMC(Laplace):
    """Hamiltonian Monte Carlo over the last layer's weights (Neal 2011)."""

    name = "last-layer-hmc"

    draws: Annotated[int, Field(ge=2, le=1000)] = 100

    def posterior(self, network: Network, _: torch.Generator) -> SampledPosterior:
        assert isinstance(network, DrawnNetwork)
        (slot,) = network.slots
        prior_std = None if self.prior_std == "auto" else self.prior_std
        return SampledPosterior(slot, prior_std, self.draws)


class GaussianProcessLayer(Laplace):
    """A Gaussian process on the network's features (Liu et al. 2020, "SNGP")."""

    name = "gp-layer"
    is_post_hoc = False

    features: Annotated[int, Field(ge=16, le=8192)] = 1024
    prior_std: Positive = 1.0

    def network(self, blueprint: Blueprint) -> DrawnNetwork:
        self._check_random_start(blueprint)

        def make() -> nn.Module:
            return with_random_features(blueprint.make(), blueprint.examples, self.features)

        return super().network(replace(blueprint, make=make))


class MaximumLikelihood(Method):
    """A single network without uncertainty, e.g. as a starting point for other methods."""

    name = "mle"

    prior_std: Positive | None = None

    def network(self, blueprint: Blueprint) -> Network:
        return self._members(blueprint, 1)

    def posterior(self, _: Network, __: torch.Generator) -> MemberPosterior:
        return MemberPosterior(1)

    def _members(
        self, blueprint: Blueprint, count: int, anchor_std: float | None = None
    ) -> MemberNetwork:
        self._check_no_drawn_layers(blueprint)
        modules = [blueprint.make() for _ in range(count)]
        shape, trained, examples = blueprint.shape, blueprint.trained, blueprint.examples
        return MemberNetwork(modules, shape, trained, examples, anchor_std)

    def _check_no_drawn_layers(self, blueprint: Blueprint) -> None:
        if blueprint.layers is not None:
            expected = f"no layers for method {self.name}, which draws none"
            raise InvalidInput("network.bayesian", expected, "some")

    @property
    def decay_prior_std(self) -> float | None:
        return self.prior_std


class Ensemble(MaximumLikelihood):
    """An ensemble of differently initialised networks (Lakshminarayanan et al. 2017)."""

    name = "ensemble"

    members: MemberCount = 5

    def network(self, blueprint: Blueprint) -> Network:
        return self._members(blueprint, self.members)

    def posterior(self, _: Network, __: torch.Generator) -> MemberPosterior:
        return MemberPosterior(self.members)


class AnchoredEnsemble(Ensemble):
    """An ensemble with weights that decay towards prior draws (Pearce et al. 2020)."""

    name = "anchored-ensemble"

    members: MemberCount = 10
    prior_std: Positive = 1.0

    def network(self, blueprint: Blueprint) -> Network:
        self._check_random_start(blueprint)
        return self._members(blueprint, self.members, anchor_std=self.prior_std)


class BatchEnsembleMethod(Ensemble):
    """An ensemble whose members share most weights (Wen et al. 2020)."""

    name = "batch-ensemble"

    members: MemberCount = 8

    def network(self, blueprint: Blueprint) -> Network:
        self._check_no_drawn_layers(blueprint)
        self._check_random_start(blueprint)
        module, shape = blueprint.make(), blueprint.shape
        return BatchEnsemble(module, self.members, shape, blueprint.examples)

    def posterior(self, _: Network, __: torch.Generator) -> MixturePosterior:
        return MixturePosterior(self.members)


METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        RealNVP,
        IAF,
        WeightHypernetwork,
        VariationalHypernet,
        BayesByBackprop,
        BayesByBackpropMixture,
        MatrixNormal,
        Dropout,
        AlphaDropout,
        PlainDropout,
        Laplace,
        LastLayerHMC,
        GaussianProcessLayer,
        MaximumLikelihood,
        Ensemble,
        AnchoredEnsemble,
        BatchEnsembleMethod,
    )
}
