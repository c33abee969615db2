"""Convergence diagnostics for variational fits, stored in the log and the manifest."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from training.bayes.diagnostics import (
    RATIO_DRAWS,
    active_units,
    bound,
    guess_nll,
    log_ratios,
    pareto_k,
    pareto_k_threshold,
)
from training.bayes.likelihoods import Categorical
from training.bayes.network import BayesianModel
from training.seeds import Stream, hash_key

MAX_CHANGE = 0.2  # median change of uncertainty without a warning
MIN_BALD = 0.01  # nats; added to BALD, because changes below it do not matter


def convergence(
    model: BayesianModel,
    train: tuple[Tensor, Tensor],
    uncertainty: Float[Tensor, "E N"],
    learning_rates: list[float],
    kl_weight: float,
    seed: int,
    has_bound: bool = True,
) -> dict[str, Any]:
    """Compute convergence diagnostics for a fitted model.

    `uncertainty` has each validation row's uncertainty after each epoch, up to the model's epoch.
    `has_bound` is true if the objective is the evidence lower bound.
    """
    facts: dict[str, Any] = {}
    change = uncertainty_change(uncertainty, learning_rates, model)
    if change is not None:
        facts["uncertainty_change"] = change
    units = active_units(model, seed)
    if units:
        facts["active_units"] = sum(active for active, _ in units.values())
        facts["units"] = sum(total for _, total in units.values())
        keys = ("active_units", "units")
        facts["layers"] = {name: dict(zip(keys, unit, strict=True)) for name, unit in units.items()}
    terms = bound(model, *train, seed)
    if not has_bound:
        terms = {key: terms[key] for key in ("nll", "kl")}
    facts |= terms
    if has_bound:
        key = hash_key(seed, Stream.IMPORTANCE)
        ratios = log_ratios(model, *train, kl_weight, RATIO_DRAWS, key)
        if ratios is not None:
            facts["pareto_k"] = pareto_k(ratios)
            facts["pareto_k_threshold"] = pareto_k_threshold(len(ratios))
    if getattr(model.likelihood, "log_weights", None) is None:
        facts["guess_nll"] = guess_nll(train[1])
    facts["summary"] = summarise(facts)
    return facts


def uncertainty_change(
    uncertainty: Float[Tensor, "E N"], learning_rates: list[float], model: BayesianModel
) -> dict[str, float] | None:
    """Summarise how much each row's uncertainty changed over the second half of a fit.

    Both halves have the same sum of learning rates, because the rates decay. The change of a row is
    max(u, v) / min(u, v) - 1, where u and v are its uncertainties in the middle and at the end.

    Returns the median and the 90th percentile over rows, or None after fewer than two epochs.
    """
    if len(uncertainty) < 2:
        return None
    path = np.cumsum(learning_rates)
    middle = min(int(np.searchsorted(path, path[-1] / 2)), len(path) - 2)
    smallest = MIN_BALD if isinstance(model.likelihood, Categorical) else torch.finfo().tiny
    middle_log, end_log = (uncertainty[[middle, -1]].double() + smallest).log()
    changes = torch.expm1((end_log - middle_log).abs())
    median, high = torch.quantile(changes, torch.tensor([0.5, 0.9], dtype=torch.float64)).tolist()
    return {"median": median, "p90": high}


def summarise(facts: dict[str, Any]) -> str:
    parts = []
    change = facts.get("uncertainty_change")
    if change is not None:
        median, high = (_percent(change[key]) for key in ("median", "p90"))
        parts.append(
            f"uncertainty of validation rows changed by {median} over the second half of the fit "
            f"(90th percentile {high})"
        )
    if "units" in facts:
        parts.append(f"{facts['active_units']} of {facts['units']} units active")
    if "negative_elbo" in facts:
        parts.append(f"negative ELBO {facts['negative_elbo']:.4g} nats per row")
    if "pareto_k" in facts:
        good = f"good below {facts['pareto_k_threshold']:.2g}"
        parts.append(f"k-hat {facts['pareto_k']:.2g} ({good})")
    return "; ".join(parts)


def change_warning(facts: dict[str, Any]) -> str | None:
    """Return a warning if the uncertainty has not converged, else None."""
    change = facts.get("uncertainty_change")
    if change is not None and change["median"] <= MAX_CHANGE:
        return None
    remedy = "train for more epochs, or continue with `dubito fit --warm-start NAME`"
    if change is None:
        return f"the fit was too short to measure its convergence: {remedy}"
    share = _percent(change["median"])
    return f"uncertainty still changed by {share} over the second half of the fit: {remedy}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
