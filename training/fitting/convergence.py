"""Whether a variational fit has converged: its diagnostics, and what is left to do."""

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
from training.seeds import Stream, hash_key

WINDOW = 0.2  # share of the epochs, the last, over which curves must be level
HALF_WINDOW = 0.05  # share of the epochs, around half of the path and at its end
# a bound's fall over half of the path, a spread's rise an epoch: shares below which they are level
LEVEL = 0.01
EXPONENT = 0.5  # of the path, to minus which what is left falls, as on digits
SETTLED_PULL = 0.25


def convergence(
    model: BayesianModel,
    train: tuple[Tensor, Tensor],
    history: list[dict[str, float | int]],
    kl_weight: float,
    start: dict[str, float],
    seed: int,
) -> dict[str, Any]:
    """Return what the manifest says of a variational fit's end; `says` is one line of it."""
    facts: dict[str, Any] = bound(model, *train, len(train[0]), seed)
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
    ends, pulled = log_std_by_layer(model, seed), pulls(model, *train, kl_weight, seed)
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
    """Return the slope an epoch of the last epochs' values, a share of all, and its error, by least
    squares."""
    last = np.array(values[-_window(len(values), share) :], dtype=np.float64)
    if len(last) < 3:
        return math.nan, math.nan
    epochs = np.arange(len(last)) - (len(last) - 1) / 2
    fitted = float(epochs @ last / (epochs @ epochs))
    residuals = last - last.mean() - fitted * epochs
    variance = float(residuals @ residuals) / (len(last) - 2) / float(epochs @ epochs)
    return fitted, math.sqrt(variance)


def later_fall(history: list[dict[str, float | int]]) -> tuple[float, float]:
    """Return by how much the bound fell while means went the later half of their path, the sum of
    learning rates, and its error.

    Rates that have decayed hide in an epoch's slope what is left to fall, but not in this: a path
    twice as long would bring about as much again, less where it slows down.
    """
    path = np.cumsum([m["learning_rate"] for m in history])
    half, window = int(np.searchsorted(path, path[-1] / 2)), _window(len(history), HALF_WINDOW)
    begin = max(0, half - window // 2)
    bounds = np.array([m["objective"] for m in history], dtype=np.float64)
    then, now = bounds[begin : begin + window], bounds[-window:]
    return float(then.mean() - now.mean()), float(now.std(ddof=1) * math.sqrt(2 / window))


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
        longer = "more than ten" if times > 10 else f"about {times}"
        fell = f"its bound fell {share:.2g} % over the later half of its means' path"
        wants = f"so it wants {longer} times as many epochs"
        faults.append(f"{fell}, {wants} (fit --warm-start goes on from its version)")
    rise = facts.get("spread_rise", 0.0)
    if abs(rise) > LEVEL:
        went = "rose" if rise > 0 else "fell"
        faults.append(f"its spread still {went} {100 * abs(rise):.2g} % an epoch")
    for name, layer in facts["layers"].items():
        pull = layer.get("pull", 0.0)
        if abs(pull) > max(SETTLED_PULL, 3 * layer.get("pull_error", 0.0)):
            wants = "less" if pull > 0 else "more"
            faults.append(f"the bound wants {wants} spread in layer {name}")
    return faults
