"""Warm starts from a published version.

Parameters and statistics are copied; the temperature is fitted again. Other methods can start from
the network of an `mle` version.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from model_store.errors import InvalidInput
from training.bayes.network import BayesianModel
from training.data.rows import Dataset
from training.methods import DrawnMethod
from training.model import initialise
from training.networks.architectures import load_state
from training.recipe import Recipe
from training.versions import Parent

# The Laplace approximation and the linear model's share are set after the fit.
SET_AGAIN = ("posterior.spread.", "posterior.deviations", "posterior._extra_state")
# Keys of `[posterior]` that can differ from the parent's.
FREE_KEYS = {"prior_std", "pi", "std_1", "std_2", "initial_log_std"}


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
    keys = [
        ("data.target_transform", kind, kind if configured == "auto" else configured),
        ("method", recipe.method if changes_method else old.method, recipe.method),
        ("likelihood.noise", old.likelihood.noise, recipe.likelihood.noise),
        ("network", had_network, has_network),
        ("data.source: rows of shape", parent.manifest.input.shape, data.shape),
        ("data.source: columns", parent.manifest.input.columns, tuple(data.columns)),
    ]
    if not changes_method:
        had_posterior, has_posterior = old.posterior.model_dump(), recipe.posterior.model_dump()
        shared = has_posterior.keys() - FREE_KEYS
        keys += [(f"posterior.{key}", had_posterior.get(key), has_posterior[key]) for key in shared]
    for field, had, has in keys:
        if had != has:
            raise InvalidInput(field, f"{had}, {origin}"[:300], f"{has}"[:300])


@torch.no_grad()
def start_from_network(
    model: BayesianModel, parent: BayesianModel, x: Float[Tensor, "N I"]
) -> None:
    initialise(model, x, standardise=False)
    model.network.mean, model.network.std = parent.network.mean, parent.network.std
    state = model.likelihood.state_dict()
    for name, old in parent.likelihood.state_dict().items():
        if name != "log_weights":  # depends on the new data
            state[name].copy_(old)
    model.likelihood.temperature.fill_(1.0)


@torch.no_grad()
def copy_weights(model: BayesianModel, parent: BayesianModel) -> None:
    """Copy a parent's weights, except those that are recomputed for the new data."""
    state = parent.state_dict()
    for name, tensor in model.state_dict().items():
        if name == "likelihood.log_weights" or name.startswith(SET_AGAIN):
            state[name] = tensor
    load_state(model, state, "network", "the published network")
    model.likelihood.temperature.fill_(1.0)
