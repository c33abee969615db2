"""Warm start: a new model begins at a published one's weights, its last layer with more classes
where there are more.

Everything is carried over but the temperature, which is fitted again at the end: parameters,
standardisation of rows, statistics of normalisation. Old classes come first, so that of a tensor
with a class axis the leading part is carried over, and the rest is fresh: weights as the module
starts them, V random, biases 0, scales g at the mean of the old classes' and with the recipe's
initial spread.

A flow over scales or weights cannot take on a coordinate: its couplings split them in halves. If
there are more of them, the flow starts again near the identity, and its last, affine layer takes
each old coordinate's mean and standard deviation: the factorial Gaussian nearest to the old
posterior. (With `noise_dimension` the flow draws coordinates of a subspace, whose number stays, and
is carried over whole.)

Another method may begin at the network of a version of `mle`, as at any network that was trained
before.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from model_store.errors import InvalidInput
from training.bayes.hypernetwork import HypernetworkPosterior
from training.bayes.layers import Slot
from training.bayes.network import BayesianModel
from training.bayes.posterior import standard_noise
from training.data import Dataset
from training.methods import DrawnMethod, Laplace
from training.model import initialise
from training.networks.networks import DrawnNetwork
from training.recipe import Recipe
from training.versions import Parent

MOMENT_DRAWS = 4096
# What of `[posterior]` may differ: the prior, and where a fresh posterior starts.
FREE = {"prior_std", "pi", "std_1", "std_2", "initial_log_std"}


def check_compatible(recipe: Recipe, data: Dataset, parent: Parent) -> None:
    """Check that a recipe's model can take a published one's weights."""
    old = parent.recipe
    of_parent = f"as of {parent.label}"
    had_transform, wanted = parent.manifest.transform, recipe.data.target_transform
    kind = "none" if had_transform is None else had_transform.kind
    is_point, is_drawn = old.method == "mle", isinstance(recipe.posterior, DrawnMethod)
    changes_method = is_point and is_drawn
    may_differ = {"bayesian", "trained"} if changes_method else None
    had_network, has_network = (
        section.model_dump(exclude_none=True, exclude=may_differ)
        for section in (old.network, recipe.network)
    )
    for field, had, has in (
        ("data.target_transform", kind, kind if wanted == "auto" else wanted),
        ("method", recipe.method if changes_method else old.method, recipe.method),
        ("likelihood.noise", old.noise, recipe.noise),
        ("network", had_network, has_network),
        ("data.source: rows of shape", parent.manifest.input.shape, data.shape),
        ("data.source: columns", parent.manifest.input.columns, tuple(data.columns)),
    ):
        if had != has:
            raise InvalidInput(field, f"{had}, {of_parent}"[:300], f"{has}"[:300])
    if changes_method:
        count = len(parent.classes)
        if count != len(data.classes):
            new = ", ".join(data.classes[count:])
            expected = f"{count} classes, {of_parent}, for another method than its own"
            raise InvalidInput("data.source: classes", expected, f"also {new}"[:300])
        return
    had_posterior, has_posterior = old.posterior.model_dump(), recipe.posterior.model_dump()
    # one that is fitted after the network is found again at the end
    for field in () if isinstance(recipe.posterior, Laplace) else has_posterior.keys() - FREE:
        if had_posterior.get(field) != has_posterior[field]:
            expected = f"{had_posterior.get(field)}, {of_parent}"
            raise InvalidInput(f"posterior.{field}", expected, f"{has_posterior[field]}")


@torch.no_grad()
def begin_at(model: BayesianModel, parent: BayesianModel, x: Float[Tensor, "N I"]) -> None:
    """Begin a model that was built with the weights of an `mle` version's network; `x` are rows of
    a first batch."""
    initialise(model, x, standardise=False)
    model.network.mean, model.network.std = parent.network.mean, parent.network.std
    kept = model.likelihood.state_dict()
    for name, old in parent.likelihood.state_dict().items():
        if name != "log_weights":  # of the new data
            kept[name].copy_(old)
    model.likelihood.temperature.fill_(1.0)


@torch.no_grad()
def carry_over(model: BayesianModel, parent: BayesianModel, more_classes: int) -> None:
    """Begin a model, as it was built, at another's weights; it has `more_classes` classes than
    that."""
    posterior, old_posterior = model.posterior, parent.posterior
    old_slots: list[Slot] = getattr(parent.network, "slots", [])
    slots: list[Slot] = getattr(model.network, "slots", [])
    grows = posterior.theta_dimension != old_posterior.theta_dimension
    if grows and (model.network.initial or isinstance(posterior, HypernetworkPosterior)):
        posterior.start_at(_fresh(model, parent))
    starts_again = (
        grows
        and isinstance(posterior, HypernetworkPosterior)
        and posterior.lift is None
        and len(posterior.flow.transforms) > 1
    )
    carried = parent.state_dict()
    for name, tensor in model.state_dict().items():
        if name == "likelihood.log_weights":  # of the new data
            continue
        if starts_again and name.startswith("posterior."):
            continue
        old = carried.get(name)
        if name.startswith("posterior.spread.") and (old is None or old.shape != tensor.shape):
            continue  # a Laplace approximation's, which is fitted again
        if old is None:
            came = f"one with a {name}, which that has not"
            raise InvalidInput("network", "the network that was published", came)
        lengths = old_posterior.theta_dimension, posterior.theta_dimension
        is_laid_out_as_theta = (*old.shape[-1:], *tensor.shape[-1:]) == lengths
        if grows and is_laid_out_as_theta:
            _carry_theta(old, tensor, old_slots, slots, more_classes)
        else:
            _carry(name, old, tensor, more_classes)
    model.likelihood.temperature.fill_(1.0)  # fitted again after the fit
    if starts_again:
        assert isinstance(posterior, HypernetworkPosterior)
        mean, std = _moments(parent)
        _carry_theta(mean, posterior.output.shift, old_slots, slots, more_classes)
        _carry_theta(std.log(), posterior.output.log_scale, old_slots, slots, more_classes)


def _fresh(model: BayesianModel, parent: BayesianModel) -> Float[Tensor, "D"]:
    """Return where theta starts: the module's weights, or scales at the mean of the old ones of
    their layer."""
    network, old_network = model.network, parent.network
    assert isinstance(network, DrawnNetwork)
    assert isinstance(old_network, DrawnNetwork)
    if network.initial:
        return torch.cat([network.initial[slot.name].flatten() for slot in network.slots])
    parts = _moments(parent)[0].split([slot.size for slot in old_network.slots])
    return torch.cat(
        [part.mean().expand(slot.size) for part, slot in zip(parts, network.slots, strict=True)]
    )


def _moments(parent: BayesianModel) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
    eps = standard_noise(MOMENT_DRAWS, parent.posterior.noise_dimension, 0)
    theta = parent.posterior(eps.to(next(parent.parameters()).device))
    return theta.mean(0), theta.std(0).clamp(min=1e-8)


def _carry_theta(
    old: Shaped[Tensor, "*lead D"],
    new: Shaped[Tensor, "*lead E"],
    old_slots: list[Slot],
    slots: list[Slot],
    more: int,
) -> None:
    old_parts = old.split([slot.size for slot in old_slots], dim=-1)
    new_parts = new.split([slot.size for slot in slots], dim=-1)
    for was, slot, old_part, part in zip(old_slots, slots, old_parts, new_parts, strict=True):
        carried = old_part.unflatten(-1, was.shape)
        _carry(slot.name, carried, part.unflatten(-1, slot.shape), more)


def _carry(name: str, old: Tensor, new: Tensor, more: int) -> None:
    """Copy a tensor into the leading part of another that has `more` places along one axis at
    most."""
    gains = sorted(b - a for a, b in zip(old.shape, new.shape, strict=False))
    fits = old.ndim == new.ndim and not any(gains[:-1])
    if not fits or max(gains, default=0) not in (0, more):
        shape = f"{name} of shape {tuple(old.shape)}"
        expected = f"{shape}, or with {more} more along one axis for more classes"
        raise InvalidInput("network", expected, f"{tuple(new.shape)}")
    new[tuple(slice(size) for size in old.shape)] = old
