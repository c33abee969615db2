"""What the simulation is asked: how much replicas answer in time, and what steps, lost nodes and
new versions do."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.scaling.simulation import (
    LOST,
    REFUSED,
    Autoscaler,
    Balance,
    Cluster,
    Costs,
    Failure,
    Outcome,
    Publication,
    poisson_times,
    simulate,
)

LIMIT_S = 0.05
SEEDS = range(3)
WARM_UP_S, SECONDS = 0.5, 0.5
LASTING_SETS = 16  # draw sets that are ready under a lasting load: a quarter of 64
STEP_AT_S = 60.0
STEP = 10.0  # requests a second: the grid of rates
SHARE = 0.8  # of the rate within the limit, that scenarios load replicas with


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))

    def shown(self, factor: float = 1.0, form: str = ".1f") -> str:
        """Return it as text, in another unit."""
        return f"{factor * self.median:{form}} ({factor * self.least:{form}} - {factor * self.most:{form}})"


def steady(
    cluster: Cluster,
    costs: Costs,
    rate: float,
    seed: int,
    seconds: float = SECONDS,
    warm_up_s: float = WARM_UP_S,
) -> Outcome:
    """Return what comes of requests at a rate of each replica, once draws are made as fast as they
    are taken."""
    cluster = replace(cluster, sets_at_first=LASTING_SETS)
    generator = np.random.default_rng([seed, 1])
    times = poisson_times([(warm_up_s + seconds, rate * cluster.replicas)], generator)
    return simulate(cluster, costs, times, seed).of(warm_up_s)


def p99(cluster: Cluster, costs: Costs, rate: float, seeds: Iterable[int] = SEEDS) -> Spread:
    seconds = SECONDS * max(1.0, 50.0 / cluster.replicas)
    return Spread.of(steady(cluster, costs, rate, seed, seconds).percentile(99) for seed in seeds)


def most_rate(
    cluster: Cluster, costs: Costs, seeds: Sequence[int] = (0,), limit_s: float = LIMIT_S
) -> float:
    """Return the largest rate of a replica, on a grid, whose 99th percentile, the median of seeds,
    is within a limit.

    The percentile is taken to grow with the rate.
    """
    low, high = 1, int(1.0 / costs.request_s(cluster.draws, np.inf) / STEP) + 1
    while high - low > 1:
        middle = (low + high) // 2
        within = p99(cluster, costs, middle * STEP, seeds).median <= limit_s
        low, high = (middle, high) if within else (low, middle)
    return low * STEP


def bursts(
    cluster: Cluster, costs: Costs, rate: float, times: float, lasts_s: float, seed: int
) -> Outcome:
    """Return what comes of requests whose rate is some times as high for a while, in the last
    second."""
    steps = [(WARM_UP_S, rate), (lasts_s, times * rate), (1.0, rate)]
    generator = np.random.default_rng([seed, 2])
    arrivals = poisson_times([(s, r * cluster.replicas) for s, r in steps], generator)
    return simulate(cluster, costs, arrivals, seed).of(WARM_UP_S)


@dataclass(frozen=True)
class Second:
    """A second of a scenario: requests a second, p99 in seconds, shares that were refused or lost,
    replicas."""

    at_s: float
    rate: float
    p99: float
    refused: float
    lost: float
    replicas: int


def by_second(outcome: Outcome, width_s: float = 1.0) -> list[Second]:
    """Return what came of each second."""
    found = []
    for begin in np.arange(0.0, outcome.due_s.max(), width_s):
        here = outcome.of(begin, begin + width_s)
        count = [c for t, c in outcome.replicas if t <= begin][-1]
        found.append(
            Second(
                float(begin),
                len(here.due_s) / width_s,
                here.percentile(99),
                here.share(REFUSED),
                here.share(LOST),
                count,
            )
        )
    return found


def step_of_load(
    costs: Costs, rate: float, start_s: float, seed: int, target_busy: float = math.inf
) -> Outcome:
    """Return a step from the load of 2 replicas to that of 8, with the autoscaler of
    docker/kubernetes."""
    scaler = Autoscaler(start_s=start_s, least=2, most=40, target_busy=target_busy)
    steps = [(STEP_AT_S, 2 * rate), (150.0, 8 * rate)]
    cluster = Cluster(2, autoscaler=scaler)
    return simulate(cluster, costs, poisson_times(steps, np.random.default_rng([seed, 3])), seed)


def lost_node(
    costs: Costs,
    rate: float,
    retries: int,
    seed: int,
    balance: Balance = "two",
    noticed_s: float = 4.0,
) -> Outcome:
    """Return 50 replicas of which 2 are lost at once, and are noticed as lost by two probes of 2
    s."""
    cluster = Cluster(50, balance=balance, retries=retries, failure=Failure(2.0, 2, noticed_s))
    times = poisson_times([(2.0 + noticed_s + 1.0, rate * 50)], np.random.default_rng([seed, 4]))
    return simulate(cluster, costs, times, seed)


def published(costs: Costs, rate: float, work_s: float, spread_s: float, seed: int) -> Outcome:
    """Return 20 replicas that find and try a new version, each at its own moment within some
    seconds."""
    cluster = Cluster(20, publication=Publication(2.0, spread_s, work_s))
    times = poisson_times(
        [(2.0 + spread_s + 3.0 * work_s + 1.0, rate * 20)], np.random.default_rng([seed, 5])
    )
    return simulate(cluster, costs, times, seed)


def over(
    seeds: Iterable[int], outcome: Callable[[int], Outcome], figure: Callable[[Outcome], float]
) -> Spread:
    return Spread.of(figure(outcome(seed)) for seed in seeds)
