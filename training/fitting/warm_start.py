"""Warm starts from a published version, possibly with additional classes.

Parameters and statistics are copied; the temperature is fitted again. Old classes come first, so
tensors with a class axis are copied into the leading part of the new ones. The rest is initialised
as usual, except that new scales start at the mean of the old ones.

A flow cannot gain coordinates. If theta grows, its couplings start near the identity, and its last
layer gets the mean and standard deviation of the old coordinates.

Other methods can start from the network of an `mle` version.
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
from training.methods import DrawnMethod
from training.model import initialise
from training.networks.networks import DrawnNetwork
from training.recipe import Recipe
from training.versions import Parent

MOMENT_DRAWS = 4096
# Keys of `[posterior]` that can differ from the parent's.
FREE_KEYS = {"prior_std", "pi", "std_1", "std_2", "initial_log_std", "structure"}


def check_compatible(recipe: Recipe, data: Dataset, parent: Parent) -> None:
    """Check that a recipe's model can be initialised from a published version."""
    old = parent.recipe
    origin = f"as in {parent.label}"
    had_transform, configured = parent.manifest.transform, recipe.data.target_transform
    kind = "none" if had_transform is None else had_transform.kind
    is_point, is_drawn = old.method == "mle", isinstance(recipe.posterior, DrawnMethod)
    changes_method = is_point and is_drawn
    free_keys = {"bayesian", "trained"} if changes_method else None
    had_network, has_network = (
        section.model_dump(exclude_none=True, exclude=free_keys)
        for section in (old.network, recipe.network)
    )
    for field, had, has in (
        ("data.target_transform", kind, kind if configured == "auto" else configured),
        ("method", recipe.method if changes_method else old.method, recipe.method),
        ("likelihood.noise", old.likelihood.noise, recipe.likelihood.noise),
        ("network", had_network, has_network),
        ("data.source: rows of shape", parent.manifest.input.shape, data.shape),
        ("data.source: columns", parent.manifest.input.columns, tuple(data.columns)),
    ):
        if had != has:
            raise InvalidInput(field, f"{had}, {origin}"[:300], f"{has}"[:300])
    if changes_method:
        count = len(parent.classes)
        if count != len(data.classes):
            new = ", ".join(data.classes[count:])
            expected = f"{count} classes, {origin}, if the method changes"
            raise InvalidInput("data.source: classes", expected, f"also {new}"[:300])
        return
    had_posterior, has_posterior = old.posterior.model_dump(), recipe.posterior.model_dump()
    for field in has_posterior.keys() - FREE_KEYS:
        if had_posterior.get(field) != has_posterior[field]:
            expected = f"{had_posterior.get(field)}, {origin}"
            raise InvalidInput(f"posterior.{field}", expected, f"{has_posterior[field]}")


@torch.no_grad()
def start_from_network(
    model: BayesianModel, parent: BayesianModel, x: Float[Tensor, "N I"]
) -> None:
    """Initialise a model from the network of an `mle` version."""
    initialise(model, x, standardise=False)
    model.network.mean, model.network.std = parent.network.mean, parent.network.std
    state = model.likelihood.state_dict()
    for name, old in parent.likelihood.state_dict().items():
        if name != "log_weights":  # depends on the new data
            state[name].copy_(old)
    model.likelihood.temperature.fill_(1.0)


@torch.no_grad()
def copy_weights(model: BayesianModel, parent: BayesianModel, new_classes: int) -> None:
    """Copy a parent's weights to a model with `new_classes` additional classes."""
    posterior, old_posterior = model.posterior, parent.posterior
    old_slots: list[Slot] = getattr(parent.network, "slots", [])
    slots: list[Slot] = getattr(model.network, "slots", [])
    grows = posterior.theta_dimension != old_posterior.theta_dimension
    if grows and (model.network.initial or isinstance(posterior, HypernetworkPosterior)):
        posterior.start_at(_fresh(model, parent))
    starts_again = (
        grows
        and isinstance(posterior, HypernetworkPosterior)
        and len(posterior.flow.transforms) > 1
    )
    parent_state = parent.state_dict()
    for name, tensor in model.state_dict().items():
        if name == "likelihood.log_weights":  # depends on the new data
            continue
        if starts_again and name.startswith("posterior."):
            continue
        old = parent_state.get(name)
        if name.startswith("posterior.spread.") and (old is None or old.shape != tensor.shape):
            continue  # the Laplace approximation is fitted again
        if old is None:
            actual = f"a network with a new tensor {name}"
            raise InvalidInput("network", "the published network", actual)
        lengths = old_posterior.theta_dimension, posterior.theta_dimension
        has_theta_axis = (*old.shape[-1:], *tensor.shape[-1:]) == lengths
        if grows and has_theta_axis:
            _copy_theta(old, tensor, old_slots, slots, new_classes)
        else:
            _copy_leading(name, old, tensor, new_classes)
    model.likelihood.temperature.fill_(1.0)  # fitted again after the fit
    if starts_again:
        assert isinstance(posterior, HypernetworkPosterior)
        mean, std = _moments(parent)
        _copy_theta(mean, posterior.output.shift, old_slots, slots, new_classes)
        _copy_theta(std.log(), posterior.output.log_scale, old_slots, slots, new_classes)


def _fresh(model: BayesianModel, parent: BayesianModel) -> Float[Tensor, "D"]:
    """Compute initial values of theta: the module's weights, or each layer's mean old scale."""
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


def _copy_theta(
    old: Shaped[Tensor, "*lead D"],
    new: Shaped[Tensor, "*lead E"],
    old_slots: list[Slot],
    slots: list[Slot],
    new_classes: int,
) -> None:
    old_parts = old.split([slot.size for slot in old_slots], dim=-1)
    new_parts = new.split([slot.size for slot in slots], dim=-1)
    for old_slot, slot, old_part, part in zip(old_slots, slots, old_parts, new_parts, strict=True):
        source, target = old_part.unflatten(-1, old_slot.shape), part.unflatten(-1, slot.shape)
        _copy_leading(slot.name, source, target, new_classes)


def _copy_leading(name: str, old: Tensor, new: Tensor, new_classes: int) -> None:
    """Copy a tensor into the leading part of a tensor that may have more classes."""
    gains = sorted(b - a for a, b in zip(old.shape, new.shape, strict=False))
    fits = old.ndim == new.ndim and not any(gains[:-1])
    if not fits or max(gains, default=0) not in (0, new_classes):
        shape = f"{name} of shape {tuple(old.shape)}"
        expected = f"{shape}, or {new_classes} longer along the class axis"
        raise InvalidInput("network", expected, f"{tuple(new.shape)}")
    new[tuple(slice(size) for size in old.shape)] = old
