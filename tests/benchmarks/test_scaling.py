"""The simulation of replicas: cases whose answer is known, what no simulation may break, and its
rules."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scaling.fitting import as_measured, undisturbed
from benchmarks.scaling.measure import OTHERS, Measured
from benchmarks.scaling.scenarios import Spread, by_second, most_rate
from benchmarks.scaling.simulation import (
    LOST,
    OK,
    REFUSED,
    Autoscaler,
    Cluster,
    Costs,
    Failure,
    Outcome,
    Publication,
    poisson_times,
    simulate,
)

pytestmark = pytest.mark.slow

ALONE = 6_400  # draws of which one row fills a micro-batch
SERVICE_S = 0.01
ARITHMETIC = Costs(0.0, 0.0, 0.0, SERVICE_S / ALONE, 0.0)  # a server with a queue and nothing else
OURS = Costs(2e-4, 2e-4, 6e-4, 5.5e-6, 2.6e-5, 1e-4)  # about what a core of ours takes
ENDLESS = {
    "draws": ALONE,
    "ready_sets": 0,
    "max_queued_row_draws": 10**12,
    "overload_row_draws": 10**12,
}


def arrivals(rate, seconds):
    """A Poisson process."""
    return poisson_times([(seconds, rate)], np.random.default_rng(0))


def mean_and_error(outcome, warm_up_s):
    """The mean latency after a warm-up, and its standard error by the means of 20 intervals."""
    kept = outcome.of(warm_up_s)
    means = [part.mean() for part in np.array_split(kept.latency_s[np.argsort(kept.due_s)], 20)]
    return kept.latency_s.mean(), np.std(means, ddof=1) / math.sqrt(len(means))


@pytest.mark.parametrize(("replicas", "load"), [(1, 0.5), (1, 0.8), (10, 0.8)])
def test_without_batches_a_replica_is_the_queue_m_d_1(replicas, load):
    """Mean time in the system by Pollaczek and Khinchine; a random balancer splits a Poisson
    process into several."""
    cluster = Cluster(replicas, balance="random", **ENDLESS)
    outcome = simulate(
        cluster, ARITHMETIC, arrivals(replicas * load / SERVICE_S, 600 / replicas), 0
    )
    mean, error = mean_and_error(outcome, 10 / replicas)
    assert error < 0.05 * mean
    assert mean == pytest.approx(SERVICE_S * (1 + load / (2 * (1 - load))), abs=5 * error)


def test_replicas_of_one_core_share_it_as_the_queue_m_g_1_ps():
    load, replicas = 0.6, 40
    cluster = Cluster(replicas, cores=(0,) * replicas, balance="least", **ENDLESS)
    outcome = simulate(cluster, ARITHMETIC, arrivals(load / SERVICE_S, 400), 0)
    mean, error = mean_and_error(outcome, 10)
    assert error < 0.05 * mean
    assert mean == pytest.approx(SERVICE_S / (1 - load), abs=5 * error)


def test_two_choices_have_the_mean_that_mitzenmacher_computed():
    """Exponential service times, many servers: E[T] = sum over i of load^(2^i - 2), for a mean
    service time of 1."""
    load, replicas, mean_rows = 0.9, 100, 50
    times = arrivals(replicas * load / SERVICE_S, 14)
    rows = np.random.default_rng(1).geometric(1 / mean_rows, len(times))
    costs = Costs(0.0, 0.0, 0.0, SERVICE_S / (ALONE * mean_rows), 0.0)
    outcome = simulate(Cluster(replicas, balance="two", **ENDLESS), costs, times, 0, rows)
    mean, error = mean_and_error(outcome, 2)
    expected = SERVICE_S * sum(load ** (2**i - 2) for i in range(1, 8))
    assert error < 0.02 * mean
    assert mean == pytest.approx(
        expected, abs=5 * error + 0.01 * expected
    )  # 1 %: there are 100 servers, not all


def test_the_least_busy_of_two_servers_is_between_two_queues_and_one_of_two_servers():
    load, mean_rows = 0.8, 50
    times = arrivals(2 * load / SERVICE_S, 400)
    rows = np.random.default_rng(1).geometric(1 / mean_rows, len(times))
    costs = Costs(0.0, 0.0, 0.0, SERVICE_S / (ALONE * mean_rows), 0.0)
    means = {}
    for balance in ("random", "least"):
        means[balance], error = mean_and_error(
            simulate(Cluster(2, balance=balance, **ENDLESS), costs, times, 0, rows), 10
        )
        assert error < 0.1 * means[balance]
    m_m_1, m_m_2 = SERVICE_S / (1 - load), SERVICE_S / (1 - load**2)
    assert means["random"] == pytest.approx(m_m_1, rel=0.2)
    assert 0.97 * m_m_2 < means["least"] < 0.6 * means["random"]


BUSY = Cluster(
    4,
    retries=2,
    hedge_s=0.02,
    failure=Failure(1.0, 1, 0.5, 0.01),
    publication=Publication(0.5, 1.0, 0.2),
    max_queued_row_draws=5_000,
    overload_row_draws=2_000,
)


@pytest.mark.parametrize("cluster", [Cluster(1), Cluster(3, cores=(0, 0, 1), client_core=1), BUSY])
def test_every_request_ends_once_and_time_adds_up(cluster):
    times = arrivals(1_500, 3)
    outcome = simulate(cluster, replace(OURS, client_s=1e-4), times, 0)
    assert np.array_equal(np.sort(outcome.due_s), times)
    assert set(outcome.status) <= {OK, REFUSED, LOST}
    assert (outcome.latency_s > 0).all()
    assert outcome.inside_s == pytest.approx(
        outcome.latency_s.sum()
    )  # Little's law, as an identity
    assert (outcome.busy_s <= outcome.end_s * (1 + 1e-9)).all()


def test_processors_do_the_work_that_requests_and_batches_ask_for():
    costs = replace(OURS, draw_s=0.0)
    times = arrivals(600, 5)
    outcome = simulate(Cluster(2), costs, times, 0)
    assert outcome.batches.sum() == len(times)
    work = len(times) * costs.request_s(100, math.inf) + len(outcome.batches) * costs.batch_s
    assert outcome.busy_s.sum() == pytest.approx(work)


def test_as_many_draws_are_made_as_micro_batches_take_but_for_those_in_stock():
    times = arrivals(300, 10)
    outcome = simulate(Cluster(1), OURS, times, 0)
    rest = len(times) * OURS.request_s(100, math.inf) + len(outcome.batches) * OURS.batch_s
    sets = (outcome.busy_s.sum() - rest) / (100 * OURS.draw_s)
    assert len(outcome.batches) - 64 <= sets + 1e-6 and sets <= len(outcome.batches) + 1e-6


def test_the_same_seed_gives_the_same_and_another_does_not():
    times = arrivals(2_000, 1)
    first, again, other = (simulate(Cluster(4), OURS, times, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.latency_s, again.latency_s) and np.array_equal(
        first.due_s, again.due_s
    )
    assert not np.array_equal(first.latency_s, other.latency_s)


def test_a_lone_request_is_computed_at_once_under_ready_draws():
    outcome = simulate(Cluster(1), replace(OURS, network_s=0.003), np.array([1.0, 2.0]), 0)
    alone = OURS.request_s(100, 1) - 100 * OURS.draw_s + 0.003
    assert outcome.latency_s == pytest.approx([alone, alone])
    assert outcome.busy_s.sum() == pytest.approx(
        2 * (alone - 0.003)
    )  # half the sets are still there: none is made
    cold = simulate(Cluster(1), replace(OURS, cold_s=0.001), np.array([1.0, 1.0, 2.0]), 0)
    assert cold.latency_s[-1] == pytest.approx(alone - 0.003 + 0.001)
    assert cold.busy_s.sum() > outcome.busy_s.sum()


def test_requests_that_come_together_share_a_micro_batch():
    """The first is read, and sees the others; they are computed together but for at most 16 at
    first."""
    outcome = simulate(Cluster(1), OURS, np.full(30, 1.0), 0)
    assert (
        outcome.batches.tolist()[0] <= 2
        and max(outcome.batches) <= 16
        and outcome.batches.sum() == 30
    )


def test_a_full_queue_refuses_and_those_let_in_are_answered():
    """A burst of 5,000 fills a queue of 2,000 requests; later ones are let in again, 64 at a time,
    and then all."""
    burst = np.concatenate(
        [np.full(5_000, 1.0), np.arange(1.0, 8.0, 0.01), np.arange(10.0, 12.0, 0.01)]
    )
    outcome = simulate(Cluster(1), OURS, burst, 0)
    of_burst = outcome.of(1.0, 1.0 + 1e-9)
    assert (of_burst.status == OK).sum() == pytest.approx(
        2_000, rel=0.2
    )  # some are answered while others are read
    assert 0 < outcome.of(1.1, 8.0).share(REFUSED) < 0.6
    assert outcome.of(9.0).share(OK) == 1.0
    assert outcome.percentile(100) < 5_000 * OURS.refuse_s + 2_500 * OURS.request_s(100, 16)


def test_requests_of_a_lost_replica_are_lost_or_sent_again():
    times = arrivals(1_000, 4)
    lost = Cluster(10, balance="random", failure=Failure(1.0, 2, 1.0))
    once = simulate(lost, OURS, times, 0).of(1.0, 2.0)
    assert once.share(LOST) == pytest.approx(0.2, abs=5 * math.sqrt(0.2 * 0.8 / len(once.due_s)))
    assert simulate(lost, OURS, times, 0).of(2.0).share(LOST) == 0.0
    again = simulate(replace(lost, retries=6), OURS, times, 0)
    assert again.share(OK) == 1.0 and again.tries.max() > 1
    assert again.replicas == [(0.0, 10), (2.0, 8)]


def test_a_hedge_is_sent_when_an_answer_is_late_and_answers_once():
    times = arrivals(200, 5)
    slow = Cluster(4, publication=Publication(1.0, 0.0, 0.5))
    plain, hedged = (
        simulate(replace(slow, hedge_s=hedge), OURS, times, 0) for hedge in (None, 0.005)
    )
    assert plain.tries.max() == 1 and hedged.tries.max() == 2
    assert len(hedged.due_s) == len(times)


def test_a_publication_takes_processor_time_that_requests_wait_for():
    times = arrivals(1_000, 6)
    quiet = simulate(Cluster(4), OURS, times, 0)
    at_once, spread = (
        simulate(Cluster(4, publication=Publication(2.0, over, 0.5)), OURS, times, 0)
        for over in (0.0, 4.0)
    )
    assert at_once.percentile(99) > spread.percentile(99) > quiet.percentile(99)


def test_the_autoscaler_comes_to_the_processors_that_it_is_to_and_goes_back():
    """Load 1, then 10 processors for 150 s, then 1: at a busy share of .6 that is 2 replicas, 17,
    and 2 again."""
    costs = replace(ARITHMETIC, row_draw_s=0.1 / ALONE)
    times = poisson_times([(60, 10.0), (150, 100.0), (600, 10.0)], np.random.default_rng(0))
    cluster = Cluster(
        2,
        autoscaler=Autoscaler(start_s=5.0, most=50, target_busy=0.6, target_row_draws=math.inf),
        **ENDLESS,
    )
    counts = simulate(cluster, costs, times, 0).replicas
    at_150 = [count for time, count in counts if time < 200][-1]
    assert 10 / (0.6 * 1.1) <= at_150 <= 10 / 0.6 * 1.5
    first_fewer = min(
        time
        for (time, count), (_, before) in zip(counts[1:], counts, strict=False)
        if count < before
    )
    assert (
        210 + 300 - 60 <= first_fewer <= 210 + 300 + 60
    )  # stabilised; the load's changes are seen a while later
    assert counts[-1][1] < 6
    by_queue = replace(
        cluster, autoscaler=Autoscaler(start_s=5.0, most=50, target_row_draws=2 * ALONE)
    )
    most = max(count for _, count in simulate(by_queue, costs, times, 0).replicas)
    assert most > 10


def test_percentiles_are_of_answers_alone():
    statuses = np.array([OK, OK, REFUSED, OK])
    outcome = Outcome(
        np.arange(4.0),
        np.array([1.0, 2.0, 50.0, 3.0]),
        statuses,
        np.ones(4),
        np.zeros(1),
        np.zeros(0),
        4.0,
        0.0,
    )
    assert outcome.percentile(50) == 2.0 and outcome.percentile(99) == 3.0
    assert outcome.share(REFUSED) == 0.25
    assert math.isnan(outcome.of(10.0).percentile(50))


def measured(seed, others, failed=0.0):
    """What a load of 200 requests a second might have given."""
    return Measured(1, 200, seed, 200.0, failed, 0.01, 0.02, 0.03, 0.9, others, 0.5)


def test_of_the_tries_of_a_load_the_least_disturbed_counts_if_it_was_little():
    tries = [
        measured(0, 0.5),
        measured(0, 0.1),
        measured(1, OTHERS + 0.1),
        measured(2, 0.05, failed=0.1),
    ]
    assert undisturbed(tries) == [tries[1]]


def test_what_is_simulated_beside_a_measurement_has_its_arrival_times_and_leaves_the_client_out():
    costs = replace(OURS, draw_s=0.0, client_s=1e-4)
    outcome, busy = as_measured(costs, measured(3, 0.0))
    assert outcome.due_s.min() >= 1.0 and len(outcome.due_s) == pytest.approx(800, rel=0.2)
    assert busy == pytest.approx(200 * costs.request_s(100, 1), rel=0.2)


def test_the_largest_rate_is_within_the_limit_and_the_next_is_not():
    """M/D/1: the wait exceeds t service times with a probability of about C exp(-z t), load (exp(z)
    - 1) = z.

    So the 99th percentile of the time in the system is 4.3 service times at a load of .5, and 3.5
    at .4.
    """
    rate = most_rate(Cluster(1, balance="random", **ENDLESS), ARITHMETIC, limit_s=4 * SERVICE_S)
    assert rate == 0.4 / SERVICE_S


def test_seconds_of_a_scenario_are_counted_by_when_requests_were_due():
    outcome = simulate(Cluster(2, failure=Failure(1.0, 1, 0.5)), OURS, arrivals(300, 3), 0)
    seconds = by_second(outcome)
    assert [one.replicas for one in seconds] == [2, 2, 1]
    assert sum(one.rate for one in seconds) == pytest.approx(900, rel=0.2)
    assert seconds[1].lost > 0 == seconds[2].lost
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
