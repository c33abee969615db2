"""The simulation's constants, fitted to one replica at a few loads; other loads and more replicas
are the check."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize

from benchmarks.load import arrival_times
from benchmarks.scaling.measure import CLIENT_CORE, LOAD_S, OTHERS, PLACES, WARM_UP_S, Measured
from benchmarks.scaling.simulation import Cluster, Costs, Outcome, simulate

FIT_LOADS = (50, 300, 600)  # requests a second, of one replica
PERCENTS = (50, 95)  # the 99th of a few seconds is mostly about what else the machine did


def as_measured(costs: Costs, one: Measured) -> tuple[Outcome, float]:
    """Simulate what was measured, at the same arrival times; return also processor seconds a second
    of replicas."""
    times = arrival_times(one.rate, WARM_UP_S + LOAD_S, True, one.seed)
    cluster = Cluster(one.replicas, cores=PLACES[one.replicas], client_core=CLIENT_CORE)
    outcome = simulate(cluster, costs, times, one.seed)
    busy = (float(outcome.busy_s.sum()) - len(times) * costs.client_s) / (WARM_UP_S + LOAD_S)
    return outcome.of(WARM_UP_S), busy


def undisturbed(measured: Iterable[Measured]) -> list[Measured]:
    """Return of each round, load and number of replicas the try that others disturbed least, if
    little enough."""
    best: dict[tuple[int, float, int], Measured] = {}
    for one in measured:
        key = one.replicas, one.rate, one.seed
        if key not in best or disturbance(one) < disturbance(best[key]):
            best[key] = one
    return [one for one in best.values() if one.others <= OTHERS and not one.failed]


def disturbance(one: Measured) -> float:
    """Return the processors that other programs took, niced ones as well."""
    return one.others + (one.niced or 0.0)


def fit_costs(costs: Costs, measured: Sequence[Measured]) -> tuple[Costs, float]:
    """Fit three figures to the percentiles of `FIT_LOADS`, by least squares of their logarithms.

    They are what a request costs more that finds its core cold, the time on its way, and a factor
    of all processor times: in open loop these are longer than in the closed loops that gave the
    costs.

    Returns:
        the costs, and the factor.
    """
    wanted = [one for one in measured if one.replicas == 1 and one.rate in FIT_LOADS]
    if {one.rate for one in wanted} != set(FIT_LOADS):
        raise ValueError(
            f"expected undisturbed measurements of one replica at {FIT_LOADS}, got {wanted}"
        )

    def of(logs: np.ndarray) -> tuple[Costs, float]:
        cold_s, network_s, factor = (float(value) for value in np.exp(logs))
        names = ("read_s", "answer_s", "batch_s", "row_draw_s", "draw_s", "refuse_s")
        scaled = {name: factor * getattr(costs, name) for name in names}
        return replace(costs, cold_s=cold_s, network_s=network_s, **scaled), factor

    def loss(logs: np.ndarray) -> float:
        total = 0.0
        for one in wanted:
            outcome, _ = as_measured(of(logs)[0], one)
            total += sum(
                math.log(outcome.percentile(p) / getattr(one, f"p{p}")) ** 2 for p in PERCENTS
            )
        return total

    start = np.log([1e-3, 2e-4, 1.1])
    simplex = np.vstack([start, start + np.diag([0.3, 0.3, 0.05])])
    options = {"maxfev": 100, "xatol": 0.005, "fatol": 0.002, "initial_simplex": simplex}
    return of(minimize(loss, start, method="Nelder-Mead", options=options).x)
