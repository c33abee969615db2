"""Hypernetworks: an invertible flow from noise to theta, and layers that make their own posterior
of their input."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from training.bayes.flows import Composition, ElementwiseAffine, iaf, realnvp
from training.bayes.layers import Stochastic
from training.bayes.posterior import METHODS, Method, Posterior, log_normal, standard_noise
from training.sections import Count, LogStd, Positive, Section

if TYPE_CHECKING:
    from training.networks.networks import DrawnNetwork

CENTRE_DRAWS = 500


class HypernetworkPosterior(Posterior):
    """theta = flow(eps), log q(theta) = log N(eps; 0, I) - log |det dtheta/deps| (Krueger et al.
    2017, section 3.2).

    The prior on theta is N(0, prior_std^2 I). With noise of fewer dimensions than theta, theta = c
    + A flow(eps) lies on a subspace whose centre c and directions A are parameters, as a network's
    directions V are; random are the subspace's coordinates, and the prior is theirs.

    With `follows_paths` the gradient of log q is that along theta alone, without the score of the
    flow's parameters, which is 0 on average (Roeder et al. 2017, "Sticking the landing"): where q
    is the exact posterior each draw's gradient is then 0.
    """

    def __init__(
        self,
        flow: Composition,
        dimension: int,
        prior_std: float,
        lift: "Subspace | None" = None,
        follows_paths: bool = False,
    ) -> None:
        super().__init__()
        self.flow = flow
        self.follows_paths = follows_paths
        self.lift = lift
        self.noise_dimension = dimension
        self.theta_dimension = dimension if lift is None else lift.centre.numel()
        self.prior_std = prior_std

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        z = self.flow(eps)[0]
        return z if self.lift is None else self.lift(z)

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        if self.follows_paths and torch.is_grad_enabled():
            z, log_det, score = self.flow.with_score(eps)
            path = (score * z).sum(-1)
            log_q = (log_normal(eps, 1.0) - log_det - path).detach() + path
        else:
            z, log_det = self.flow(eps)
            log_q = log_normal(eps, 1.0) - log_det
        log_ratio = log_q - log_normal(z, self.prior_std)
        return z if self.lift is None else self.lift(z), log_ratio

    def spread_parameters(self) -> list[nn.Parameter]:
        return [self.output.log_scale]

    def location(self) -> Float[Tensor, "D"] | None:
        """Return the last layer's shift: none on a subspace, whose coordinates are no theta."""
        return self.output.shift if self.lift is None else None

    def log_prior(self, theta: Float[Tensor, "K D"]) -> Float[Tensor, "K"]:
        return log_normal(theta, self.prior_std)

    @torch.no_grad()
    def centre(self) -> Float[Tensor, "D"]:
        eps = standard_noise(CENTRE_DRAWS, self.noise_dimension, 0)
        return self(eps.to(self.output.shift.device)).mean(0)

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        (self.output.shift if self.lift is None else self.lift.centre).copy_(theta)

    @property
    def output(self) -> ElementwiseAffine:
        """The last, elementwise affine layer: its shift is where theta starts."""
        last = self.flow.transforms[-1]
        assert isinstance(last, ElementwiseAffine)
        return last


class Subspace(nn.Module):
    """c + A z: coordinates of a subspace to theta."""

    def __init__(self, coordinates: int, dimension: int, generator: torch.Generator) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(dimension))
        self.directions = nn.Parameter(torch.randn(coordinates, dimension, generator=generator))

    def forward(self, z: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return self.centre + z @ self.directions


class FlowSection(Section):
    """`[posterior]` of bhn-realnvp: the flow from noise to the primary network's scales."""

    couplings: Annotated[int, Field(ge=0)] = 4
    hidden: Count = 200
    initial_log_std: LogStd = -7.0
    prior_std: Positive = 1.0


class IAFSection(FlowSection):
    """`[posterior]` of bhn-iaf."""

    noise_dimension: Count | None = None


class WeightFlowSection(IAFSection):
    """`[posterior]` of bhn-weights: a flow over every weight."""

    flow: Literal["realnvp", "iaf"] = "realnvp"


def hypernetwork(
    flow: Callable[..., Composition],
    section: FlowSection,
    network: "DrawnNetwork",
    generator: torch.Generator,
    follows_paths: bool = False,
) -> HypernetworkPosterior:
    dimension = network.theta_dimension
    inner = section.noise_dimension if isinstance(section, IAFSection) else None
    lift = None if inner is None else Subspace(inner, dimension, generator)
    made = flow(
        inner or dimension, section.couplings, section.hidden, section.initial_log_std, generator
    )
    return HypernetworkPosterior(made, inner or dimension, section.prior_std, lift, follows_paths)


def weight_hypernetwork(
    section: WeightFlowSection, network: "DrawnNetwork", generator: torch.Generator
) -> HypernetworkPosterior:
    has_couplings = section.flow == "realnvp"  # of iaf scores would take an inverse
    flow = realnvp if has_couplings else iaf
    return hypernetwork(flow, section, network, generator, follows_paths=has_couplings)


for name, kind, flow in (("realnvp", FlowSection, realnvp), ("iaf", IAFSection, iaf)):
    METHODS[f"bhn-{name}"] = Method(
        kind,
        partial(hypernetwork, flow),
        lambda _: Stochastic("scales"),
        is_variational=True,
        samples=2,
        has_integers=True,
        groups_rows=True,
    )
METHODS["bhn-weights"] = Method(
    WeightFlowSection,
    weight_hypernetwork,
    lambda _: Stochastic("weights"),
    is_variational=True,
    ramps_kl=True,
    samples=2,
)


class NoisePosterior(Posterior):
    """theta = eps, the E of every layer's M + A^1/2 E B^1/2: M, A, B and the KL come from the
    network's layers, which in training draw values in its place."""

    trains_without_noise = True

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.noise_dimension = self.theta_dimension = dimension

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return eps * 1.0  # a graph needs an operator between its input and its output

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        return eps.new_zeros(()).expand(len(eps), self.theta_dimension), eps.new_zeros(len(eps))

    def centre(self) -> Float[Tensor, "D"]:
        return torch.zeros(self.theta_dimension)


class HypernetSection(Section):
    """`[posterior]` of variational-hypernet."""

    hidden: Count = 50
    mean: Literal["vector-scaling", "naive"] = "vector-scaling"
    initial_log_std: Annotated[LogStd, Field(lt=0)] = -4.0  # below the prior's


METHODS["variational-hypernet"] = Method(
    HypernetSection,
    lambda _, network, __: NoisePosterior(network.theta_dimension),
    lambda section: Stochastic(
        "hypernet",
        hidden=section.hidden,
        vector_scaling=section.mean == "vector-scaling",
        initial_log_std=section.initial_log_std,
    ),
    is_variational=True,
    samples=2,
)
