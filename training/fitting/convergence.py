"""Convergence diagnostics of a variational fit."""

import math
from typing import Any

import numpy as np
from torch import Tensor

from training.bayes.diagnostics import (
    RATIO_DRAWS,
    bound,
    guess_nll,
    log_ratios,
    log_std_by_layer,
    pareto_k,
    pulls,
)
from training.bayes.network import BayesianModel
from training.bayes.variational_hypernet import HyperLayer
from training.seeds import Stream, hash_key

WINDOW = 0.2  # share of the last epochs over which curves must be level
HALF_WINDOW = 0.05  # share of the epochs over which `later_fall` averages
# Maximum relative change of a level curve: of the bound over half of the path, of the spread per
# epoch.
LEVEL = 0.01
# The remaining fall is proportional to path^-EXPONENT. The exponent was measured on digits.
EXPONENT = 0.5
SETTLED_PULL = 0.25


def convergence(
    model: BayesianModel,
    train: tuple[Tensor, Tensor],
    history: list[dict[str, float | int]],
    kl_weight: float,
    start: dict[str, float],
    seed: int,
    alpha: float = 0.0,
) -> dict[str, Any]:
    """Compute convergence diagnostics for the manifest, with a one-line summary in `says`.

    Bound and pulls are omitted if the objective is not the evidence lower bound: for another
    `alpha`, and for layers whose posterior depends on their input.
    """
    facts: dict[str, Any] = bound(model, *train, len(train[0]), seed)
    has_bound = alpha == 0 and not any(isinstance(m, HyperLayer) for m in model.modules())
    if not has_bound:
        del facts["negative_elbo"], facts["negative_elbo_error"]
    if getattr(model.likelihood, "log_weights", None) is None:
        facts["guess_nll"] = guess_nll(train[1])
    slopes = {
        key: slope([m[key] for m in history])
        for key in ("objective", "log_std")
        if key in history[-1]
    }
    facts["objective_slope"], facts["objective_slope_error"] = slopes["objective"]
    if "log_std" in slopes:
        facts["spread_rise"] = math.expm1(slopes["log_std"][0])
    ends = log_std_by_layer(model, seed)
    pulled = pulls(model, *train, kl_weight, seed) if has_bound else {}
    prior_std = getattr(model.posterior, "prior_std", None)
    facts["layers"] = {
        name: {
            "std": math.exp(end),
            **({"start_std": math.exp(start[name])} if name in start else {}),
            **({} if prior_std is None else {"prior_std": prior_std}),
            **({"pull": pulled[name][0], "pull_error": pulled[name][1]} if name in pulled else {}),
        }
        for name, end in ends.items()
    }
    ratios = log_ratios(model, *train, kl_weight, RATIO_DRAWS, hash_key(seed, Stream.IMPORTANCE))
    if ratios is not None:
        facts["pareto_k"] = pareto_k(ratios)
    faults = list(_faults(facts, history))
    facts["settled"] = not faults
    facts["says"] = "the posterior has settled"
    if faults:
        facts["says"] = "the posterior had not converged: " + "; ".join(faults)
    return facts


def slope(values: list[float | int], share: float = WINDOW) -> tuple[float, float]:
    """Estimate the slope per epoch at the end of a curve by least squares.

    Returns the slope and its standard error.
    """
    last = np.array(values[-_window(len(values), share) :], dtype=np.float64)
    if len(last) < 3:
        return math.nan, math.nan
    epochs = np.arange(len(last)) - (len(last) - 1) / 2
    estimate = float(epochs @ last / (epochs @ epochs))
    residuals = last - last.mean() - estimate * epochs
    variance = float(residuals @ residuals) / (len(last) - 2) / float(epochs @ epochs)
    return estimate, math.sqrt(variance)


def later_fall(history: list[dict[str, float | int]]) -> tuple[float, float]:
    """Compute the decrease of the bound over the second half of the path, and its standard error.

    The path is the cumulative learning rate. After the learning rate has decayed, the slope per
    epoch is small even if the bound could still fall. The fall over half of the path is comparable
    to the fall that a path of twice the length would add.
    """
    path = np.cumsum([m["learning_rate"] for m in history])
    half, window = int(np.searchsorted(path, path[-1] / 2)), _window(len(history), HALF_WINDOW)
    begin = max(0, half - window // 2)
    bounds = np.array([m["objective"] for m in history], dtype=np.float64)
    middle, end = bounds[begin : begin + window], bounds[-window:]
    return float(middle.mean() - end.mean()), float(end.std(ddof=1) * math.sqrt(2 / window))


def _window(epochs: int, share: float = WINDOW) -> int:
    return max(3, math.ceil(share * epochs))


def _faults(facts: dict[str, Any], history: list[dict[str, float | int]]) -> list[str]:
    if len(history) < 3:
        return ["too few epochs to tell"]
    faults = []
    size = abs(float(np.mean([m["objective"] for m in history[-_window(len(history)) :]])))
    fall, error = later_fall(history)
    if fall > max(2 * error, LEVEL * size):
        share, times = 100 * fall / size, math.ceil((fall / (LEVEL * size)) ** (1 / EXPONENT))
        factor = "more than ten" if times > 10 else f"about {times}"
        fault = f"its bound fell {share:.2g} % over the second half of the path of learning rates"
        advice = f"train {factor} times as many epochs, or continue with fit --warm-start"
        faults.append(f"{fault} ({advice})")
    rise = facts.get("spread_rise", 0.0)
    if abs(rise) > LEVEL:
        change = "rose" if rise > 0 else "fell"
        faults.append(f"its spread still {change} {100 * abs(rise):.2g} % an epoch")
    for name, layer in facts["layers"].items():
        pull = layer.get("pull", 0.0)
        if abs(pull) > max(SETTLED_PULL, 3 * layer.get("pull_error", 0.0)):
            direction = "less" if pull > 0 else "more"
            faults.append(f"the bound favours {direction} spread in layer {name}")
    return faults
