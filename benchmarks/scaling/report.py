"""The page and the picture: measurements against the simulation, and what the simulation says of
many replicas."""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.scaling import scenarios
from benchmarks.scaling.fitting import FIT_LOADS, PERCENTS, as_measured, fit_costs, undisturbed
from benchmarks.scaling.measure import DRAWS, FULL, OTHERS, Measured, Replica
from benchmarks.scaling.scenarios import LIMIT_S, SEEDS, SHARE, Spread, over, p99, steady
from benchmarks.scaling.simulation import LOST, OK, REFUSED, Balance, Cluster, Costs

WANTED = 1e6  # requests a second
CORE_HOUR = 0.04  # an assumption: what a core costs in an hour, in dollars
LIST_REQUEST = 0.005 / 1000  # dollars, Amazon S3's price as docs/buckets.md has it
PREFIX_READS = 5_500.0  # reads a second that S3 promises for a prefix, at least
NETWORK_BYTES = 1.25e9  # bytes a second: a machine's 10 Gbit/s, an assumption
NODE_CORES = 32  # of a machine, an assumption
SCRAPE_S = 15.0
HEDGE_S = 0.03
PLACING_S = 10.0  # an assumption: until a pod has a place and its image is there
COUNTS = (1, 10, 100)
BALANCES: tuple[Balance, ...] = ("random", "two")


@dataclass(frozen=True)
class Plan:
    """What the simulation says, computed once for the page and the picture.

    Attributes:
        rates: requests a second of a replica within the limit, by balancer and number of replicas.
        thousand: p99 of 1,000 replicas at the rate of 100.
        needed: replicas for `WANTED`, and what came of them: p99, mean micro-batch, share of time
            busy.
        curve: rates of one replica and p50, p99 there, for the picture.
    """

    rates: dict[str, dict[int, float]]
    hundred: Spread
    thousand: Spread
    needed: int
    wanted: Spread
    batch: float
    latency: float
    curve: list[tuple[float, float, float]]


def plan(costs: Costs, log: Callable[[str], None]) -> Plan:
    rates: dict[str, dict[int, float]] = {}
    for balance in BALANCES:
        rates[balance] = {
            n: scenarios.most_rate(Cluster(n, balance=balance), costs) for n in COUNTS
        }
        log(f"{balance}: {rates[balance]}")
    rate = rates["two"][COUNTS[-1]]
    hundred = p99(Cluster(100), costs, rate)
    thousand = p99(Cluster(1_000), costs, rate, seeds=SEEDS[:2])
    log(f"100: {hundred}, 1,000: {thousand}")
    needed = math.ceil(WANTED / rate)
    found = [
        steady(Cluster(needed), costs, WANTED / needed, seed, seconds=0.2) for seed in SEEDS[:2]
    ]
    wanted = Spread.of(outcome.percentile(99) for outcome in found)
    log(f"{needed}: {wanted}")
    curve = []
    for one in range(50, 851, 50):
        outcome = steady(Cluster(1), costs, float(one), 0, seconds=10.0)
        curve.append((float(one), outcome.percentile(50), outcome.percentile(99)))
    busy = [outcome.batches.mean() for outcome in found]
    mean = statistics.median(
        float(outcome.latency_s[outcome.status == OK].mean()) for outcome in found
    )
    return Plan(rates, hundred, thousand, needed, wanted, statistics.median(busy), mean, curve)


@dataclass(frozen=True)
class Side:
    """A load as it was measured, the median of rounds, and as it is simulated at the same arrival
    times."""

    replicas: int
    rate: float
    rounds: int
    measured: dict[str, float]
    simulated: dict[str, float]
    niced: float | None

    @property
    def is_fitted(self) -> bool:
        return self.replicas == 1 and self.rate in FIT_LOADS


def sides(costs: Costs, measured: list[Measured]) -> list[Side]:
    """Return each load that was measured undisturbed with its simulation."""
    groups: dict[tuple[int, float], list[Measured]] = {}
    for one in undisturbed(measured):
        groups.setdefault((one.replicas, one.rate), []).append(one)
    found = []
    for (replicas, rate), rounds in sorted(groups.items()):
        outcomes = [as_measured(costs, one) for one in rounds]
        names = ("p50", "p95", "p99")
        simulated = {
            n: statistics.median(o.percentile(float(n[1:])) for o, _ in outcomes) for n in names
        }
        simulated["busy"] = statistics.median(busy for _, busy in outcomes)
        was = {
            n: statistics.median(getattr(one, n) for one in rounds)
            for n in (*names, "busy", "others")
        }
        niced = [one.niced for one in rounds if one.niced is not None]
        found.append(
            Side(
                replicas,
                rate,
                len(rounds),
                was,
                simulated,
                statistics.median(niced) if niced else None,
            )
        )
    return found


def page(
    replica: Replica, costs: Costs, found: dict[str, float], measured: list[Measured], log: Any
) -> tuple[str, Plan]:
    fit, factor = fit_costs(costs, undisturbed(measured))
    checked, of_many = sides(fit, measured), plan(fit, log)
    lines = [
        "# What replicas answer, and how many it takes",
        "",
        "`python -m benchmarks.scaling --measure` measures, `python -m benchmarks.scaling "
        "--write` simulates and writes this page. [Scaling](../scaling.md) says what follows from "
        "it.",
        "",
        "A replica is `python -m service` with one thread on one core, a model of MNIST's size in "
        f"int8, and requests of one row and {DRAWS} fresh draws as JSON. Measured on two cores, "
        "on which a fit at the lowest priority and other programs ran as well; the client is on "
        "the second core. Times are that machine's.",
        "",
        *of_a_core(replica, found, fit, factor),
        *check(checked),
        *rates(of_many),
        *wanted(fit, of_many, replica),
        *step(fit, of_many, replica),
        *failures(fit, of_many),
        *publications(fit, of_many, replica),
        *breaks(of_many, replica),
    ]
    return "\n".join(lines) + "\n", of_many


def of_a_core(
    replica: Replica, found: dict[str, float], fit: Costs, factor: float
) -> Iterator[str]:
    """What a core gives."""
    yield from ("## What a core gives", "", "| measured | |", "|---|---|")
    together, of_batch = found["together, requests a second"], found["together, in a batch"]
    yield f"| requests a second, {FULL} connections, closed loop | {together:.0f} |"
    yield f"| requests of a micro-batch then | {of_batch:.0f} |"
    yield f"| processor time of a request then | {1e3 * found['together']:.2f} ms |"
    yield f"| requests a second, one connection | {found['alone, requests a second']:.0f} |"
    yield f"| processor time of a request alone | {1e3 * found['alone']:.2f} ms |"
    yield f"| of it: making {DRAWS} draws | {1e3 * found['draws']:.2f} ms |"
    yield (
        f"| a row more, of a request of many | {1e3 * found['a row more']:.2f} ms: "
        f"{DRAWS / found['a row more']:,.0f} rows x draws a second |"
    )
    yield f"| a request that is refused | {1e3 * found['refused']:.2f} ms |"
    yield f"| memory (PSS) under load, one version | {replica.memory_bytes / 1e6:.0f} MB |"
    yield f"| of it: 64 ready draw sets | {64 * replica.set_bytes / 1e6:.0f} MB |"
    yield f"| seconds until ready; of processor time | {replica.ready_s:.1f}; {replica.start_processor_s:.1f} |"
    yield f"| a new version: processor time of trying and loading it | {replica.trial_s:.2f} s |"
    yield f"| a version: files, bytes | {replica.version_files}, {replica.version_bytes:,} |"
    yield (
        f"| a page of metrics: bytes, samples, processor time | {replica.metrics_bytes:,}, "
        f"{replica.metrics_series}, {1e3 * replica.metrics_s:.1f} ms |"
    )
    yield ""
    yield (
        f"The simulation's constants, in ms of processor time: {1e3 * fit.read_s:.2f} to read and "
        f"as much to answer, {1e3 * fit.batch_s:.2f} a micro-batch, "
        f"{1e3 * DRAWS * fit.row_draw_s:.2f} a row, {1e3 * DRAWS * fit.draw_s:.2f} its draws; "
        f"{1e3 * fit.cold_s:.2f} more for a request that finds the core idle; "
        f"{1e3 * fit.network_s:.2f} ms on the way. All but the last two are the closed loops' "
        f"processor times, times {factor:.2f}. That factor and the last two are fitted to the "
        f"{' and '.join(f'p{p}' for p in PERCENTS)} of one replica at "
        f"{', '.join(map(str, FIT_LOADS))} requests a second."
    )
    yield ""


def check(checked: list[Side]) -> Iterator[str]:
    yield from ("## Measured and simulated", "")
    yield (
        "Open loop, Poisson arrivals, the less busy of two replicas chosen at random; latencies in "
        "ms, measured / simulated at the same arrival times, medians of rounds. Two replicas have "
        "a core each, of which the second is the client's too; of four, two share a core, which "
        "the simulation has as processor sharing, as it has the client. Rounds in which other "
        f"programs took more than {OTHERS} processors are left out, those of low priority aside: "
        "`others'` are the processors that others took, of normal + of low priority. The latter "
        "run in sessions of their own, among which Linux shares a core equally, so they wait less "
        "for the replicas than their priority says; the simulation knows nothing of them. * fitted."
    )
    yield from (
        "",
        "| replicas | requests/s | rounds | p50 | p95 | p99 | processors busy | others' |",
        "|---|---|---|---|---|---|---|---|",
    )
    for one in checked:
        cells = [
            f"{1e3 * one.measured[n]:.1f} / {1e3 * one.simulated[n]:.1f}"
            for n in ("p50", "p95", "p99")
        ]
        mark = " *" if one.is_fitted else ""
        busy = f"{one.measured['busy']:.2f} / {one.simulated['busy']:.2f}"
        others = f"{one.measured['others']:.2f} + " + (
            f"{one.niced:.2f}" if one.niced is not None else "?"
        )
        yield f"| {one.replicas} | {one.rate:.0f}{mark} | {one.rounds} | {' | '.join(cells)} | {busy} | {others} |"
    yield ""
    for text, group in (
        (
            "One replica, at loads that were not fitted",
            [s for s in checked if s.replicas == 1 and not s.is_fitted],
        ),
        ("Two and four replicas", [s for s in checked if s.replicas > 1]),
    ):
        if group:
            found = []
            for n in ("p50", "p95", "p99"):
                ratios = [one.simulated[n] / one.measured[n] for one in group]
                found.append(
                    f"{n} {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
                )
            yield f"* {text}: simulated over measured {', '.join(found)}; median (least - most)."
    yield (
        "* Two and four replicas were measured later than one, on a quieter machine, once for each "
        "load; one replica while a fit of low priority ran with it."
    )
    yield ""


def rates(of_many: Plan) -> Iterator[str]:
    yield from (f"## Requests a second of a replica within {1e3 * LIMIT_S:.0f} ms", "")
    yield (
        "Simulated: the largest rate, in steps of 10, whose p99 is within the limit. Poisson "
        "arrivals, one core each."
    )
    counts = list(of_many.rates["two"])
    yield from (
        "",
        "| replicas | " + " | ".join(map(str, counts)) + " |",
        "|---|" + "---|" * len(counts),
    )
    for balance, text in (("random", "chosen at random"), ("two", "the less busy of two")):
        yield f"| {text} | " + " | ".join(f"{of_many.rates[balance][n]:.0f}" for n in counts) + " |"
    yield ""
    rate = of_many.rates["two"][counts[-1]]
    yield (
        f"At {rate:.0f} requests a second each, the p99 of 100 replicas is "
        f"{of_many.hundred.shown(1e3)} ms, and of 1,000 {of_many.thousand.shown(1e3)} ms (median, "
        f"least - most of {len(SEEDS)} and of 2 seeds)."
    )
    yield ""


def wanted(fit: Costs, of_many: Plan, replica: Replica) -> Iterator[str]:
    yield from (f"## {WANTED:,.0f} requests a second", "")
    rate = WANTED / of_many.needed
    dollars = of_many.needed * CORE_HOUR / 3600 / WANTED * 1e6
    full = fit.request_s(DRAWS, FULL / 2)
    low = fit.request_s(DRAWS, 1)
    yield f"| replicas of one core, at {rate:.0f} requests a second each | {of_many.needed:,} |"
    yield "|---|---|"
    yield f"| p99, simulated for 0.7 s, of the last 0.2 s | {of_many.wanted.shown(1e3)} ms |"
    yield (
        "| requests of a micro-batch, mean; requests under way at a time, by Little's law | "
        f"{of_many.batch:.1f}; {WANTED * of_many.latency:,.0f} |"
    )
    yield f"| memory | {of_many.needed * replica.memory_bytes / 1e9:,.0f} GB |"
    yield f"| machines of {NODE_CORES} cores | {math.ceil(of_many.needed / NODE_CORES)} |"
    yield f"| core-seconds a million answers | {1e6 / rate:,.0f} |"
    yield f"| dollars a million answers, at {CORE_HOUR} a core-hour | {dollars:.3f} |"
    yield f"| the same with half the replicas idle, for nights and lost zones | {2 * dollars:.3f} |"
    yield ""
    yield (
        f"A request takes {1e3 * low:.2f} ms alone and {1e3 * full:.2f} ms in micro-batches of "
        f"{FULL // 2}: what is shared is {1e3 * (low - full) * FULL / (FULL - 2):.2f} ms, two "
        "thirds of it draws. So the largest saving is in larger micro-batches, that is in a higher "
        "limit of latency, and in requests of several rows."
    )
    yield ""
    for times in (1.5, 2.0):
        one = over(
            SEEDS,
            lambda s, t=times: scenarios.bursts(Cluster(100), fit, rate, t, 0.2, s),
            lambda o: o.percentile(99),
        )
        yield (
            f"* A burst of {times:g} times the rate for 0.2 s: p99 of the 1.2 s from its begin "
            f"{one.shown(1e3)} ms (100 replicas)."
        )
    of_hedged = [steady(Cluster(100, hedge_s=HEDGE_S), fit, SHARE * rate, seed) for seed in SEEDS]
    late, sent = (
        Spread.of(o.percentile(99) for o in of_hedged),
        Spread.of(float(o.tries.mean()) for o in of_hedged),
    )
    yield (
        f"* Clients that ask a second replica after {1e3 * HEDGE_S:.0f} ms, at {SHARE:.0%} of the "
        f"rate: p99 {late.shown(1e3)} ms with {sent.shown(1, '.2f')} requests sent for one; "
        f"without it {p99(Cluster(100), fit, SHARE * rate).shown(1e3)} ms."
    )
    yield ""


def step(fit: Costs, of_many: Plan, replica: Replica) -> Iterator[str]:
    rate = SHARE * of_many.rates["two"][COUNTS[-1]]
    start_s = PLACING_S + replica.ready_s
    yield from ("## A step of load, with the autoscaler", "")
    yield (
        f"The load of 2 replicas ({rate:.0f} requests a second each) becomes that of 8 at once. "
        "The autoscaler is that of docker/kubernetes: it looks every 15 s at a mean of 60 s. A "
        f"replica answers {start_s:.0f} s after it was asked for: {PLACING_S:.0f} s are an "
        f"assumption, {replica.ready_s:.1f} s measured."
    )
    yield ""
    yield (
        "| by | p99 within the limit again after, s | refused, share of the time until then | most "
        "replicas | replicas after 150 s |"
    )
    yield "|---|---|---|---|---|"
    for text, busy in (
        ("the queue: 1,600 rows x draws a replica", math.inf),
        ("the queue, and processors 60 % busy", 0.6),
    ):
        figures: list[tuple[float, float, float, float]] = []
        for seed in SEEDS[:1]:
            outcome = scenarios.step_of_load(fit, rate, start_s, seed, busy)
            seconds = scenarios.by_second(outcome, 5.0)
            after = [one for one in seconds if one.at_s >= scenarios.STEP_AT_S]
            late = [one.at_s + 5.0 for one in after if not one.p99 <= LIMIT_S or one.refused]
            again = max(late, default=scenarios.STEP_AT_S) - scenarios.STEP_AT_S
            refused = outcome.of(scenarios.STEP_AT_S, scenarios.STEP_AT_S + max(again, 5.0)).share(
                REFUSED
            )
            counts = [count for _, count in outcome.replicas]
            figures.append((again, refused, max(counts), counts[-1]))
        columns = [Spread.of(column) for column in zip(*figures, strict=True)]
        cells = [
            columns[0].shown(1, ".0f"),
            columns[1].shown(1, ".2f"),
            columns[2].shown(1, ".0f"),
            columns[3].shown(1, ".0f"),
        ]
        yield f"| {text} | " + " | ".join(cells) + " |"
    yield ""


def failures(fit: Costs, of_many: Plan) -> Iterator[str]:
    rate = SHARE * of_many.rates["two"][COUNTS[-1]]
    yield from ("## A node is lost", "")
    yield (
        f"2 of 50 replicas end at once, at {rate:.0f} requests a second each; the balancer hears "
        "of it after 4 s. Until then what it sends them fails at once."
    )
    yield from (
        "",
        "| balancer | clients send again | failed, share of those 4 s | p99 then, ms |",
        "|---|---|---|---|",
    )
    cases: list[tuple[str, Balance, int]] = [
        ("at random", "random", 0),
        ("the less busy of two", "two", 0),
        ("the less busy of two", "two", 2),
    ]
    for text, balance, retries in cases:
        parts = [
            scenarios.lost_node(fit, rate, retries, seed, balance).of(2.0, 6.0)
            for seed in SEEDS[:2]
        ]
        failed, late = (
            Spread.of(o.share(LOST) for o in parts),
            Spread.of(o.percentile(99) for o in parts),
        )
        yield f"| {text} | {'twice, at once' if retries else 'no'} | {failed.shown(1, '.4f')} | {late.shown(1e3)} |"
    yield ""
    yield "A lost replica looks idle to a balancer that counts what is under way, so it is sent more than its share."
    yield ""


def publications(fit: Costs, of_many: Plan, replica: Replica) -> Iterator[str]:
    rate = SHARE * of_many.rates["two"][COUNTS[-1]]
    yield from ("## A new version is published", "")
    yield (
        "Each replica finds it at its own moment within the time between two looks "
        f"(`DUBITO_POLL_INTERVAL_S`), and then takes {replica.trial_s:.2f} s of processor time to "
        f"try and load it while it answers requests, on its one core. 20 replicas at {rate:.0f} requests a "
        "second."
    )
    yield from ("", "| seconds between looks | p99 meanwhile, ms |", "|---|---|")
    for spread_s in (1.0, 10.0, 30.0):
        seeds = SEEDS[: 1 if spread_s > 10 else 2]
        one = over(
            seeds,
            lambda s, w=spread_s: scenarios.published(fit, rate, replica.trial_s, w, s).of(
                2.0, 2.0 + w + replica.trial_s
            ),
            lambda o: o.percentile(99),
        )
        yield f"| {spread_s:.0f} | {one.shown(1e3)} |"
    yield ""


def breaks(of_many: Plan, replica: Replica) -> Iterator[str]:
    yield from (
        "## What breaks first",
        "",
        "Computed from the figures above; limits and prices are of the documents named in "
        "[Scaling](../scaling.md).",
        "",
    )
    counts = (100, 1_000, of_many.needed)
    yield "| what | " + " | ".join(f"{n:,} replicas" for n in counts) + " |"
    yield "|---|" + "---|" * len(counts)

    def row(text: str, value: Callable[[int], str]) -> str:
        return f"| {text} | " + " | ".join(value(n) for n in counts) + " |"

    month = 30 * 86_400
    yield row(
        "looks at the bucket a second, one a second each (S3 promises 5,500 reads a prefix)",
        lambda n: f"{n:,}",
    )
    yield row("the same, dollars a month", lambda n: f"{n * month * LIST_REQUEST:,.0f}")
    yield row(
        "with `DUBITO_POLL_INTERVAL_S=10`: a second; dollars a month",
        lambda n: f"{n / 10:,.0f}; {n * month * LIST_REQUEST / 10:,.0f}",
    )
    yield row(
        "a publication: reads of files, all within one second (of 5,500)",
        lambda n: f"{n * replica.version_files:,}",
    )
    yield row(
        "a publication: bytes from the bucket",
        lambda n: f"{n * replica.version_bytes / 1e9:.1f} GB",
    )
    yield row(
        f"the same, bytes a second of each machine of {NODE_CORES} replicas within a second (of "
        "1.25 GB/s)",
        lambda n: f"{min(n, NODE_CORES) * replica.version_bytes / 1e6:.0f} MB/s",
    )
    yield row("metrics: series", lambda n: f"{n * replica.metrics_series:,}")
    yield row(
        f"metrics: bytes a second, every {SCRAPE_S:.0f} s",
        lambda n: f"{n * replica.metrics_bytes / SCRAPE_S / 1e6:.1f} MB",
    )
    yield row(
        "metrics: samples a second", lambda n: f"{n * replica.metrics_series / SCRAPE_S:,.0f}"
    )
    yield row(
        "draws: memory of those that are ready",
        lambda n: f"{n * 64 * replica.set_bytes / 1e9:.1f} GB",
    )
    yield row("memory of all replicas", lambda n: f"{n * replica.memory_bytes / 1e9:,.0f} GB")
    yield row("connections of 20 balancers, 4 kept to each replica", lambda n: f"{n * 80:,}")
    yield row("the same, of one replica (of `DUBITO_MAX_CONNECTIONS`, 1,000)", lambda _: "80")
    yield row(
        f"machines of {NODE_CORES} cores (Kubernetes is tested to 5,000)",
        lambda n: f"{math.ceil(n / NODE_CORES)}",
    )
    yield ""


def plot(fit: Costs, measured: list[Measured], of_many: Plan) -> Figure:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    kept = undisturbed(measured)
    rates_, p50s, p99s = zip(*of_many.curve, strict=True)
    for values, name, colour in ((p50s, "p50", "tab:blue"), (p99s, "p99", "tab:red")):
        left.plot(rates_, [1e3 * v for v in values], color=colour, label=f"{name}, simulated")
        points = [(one.rate, 1e3 * getattr(one, name)) for one in kept if one.replicas == 1]
        left.plot(
            *zip(*points, strict=True), "o", color=colour, alpha=0.6, label=f"{name}, measured"
        )
    left.axhline(1e3 * LIMIT_S, color="black", linewidth=0.8, linestyle=":")
    left.set(
        yscale="log", xlabel="requests/s", ylabel="latency, ms", title="One replica on one core"
    )
    left.legend(fontsize="small")
    both = sides(fit, measured)
    for replicas, marker in ((1, "o"), (2, "s"), (4, "^")):
        for name, colour in (("p50", "tab:blue"), ("p95", "tab:green"), ("p99", "tab:red")):
            points = [
                (1e3 * s.measured[name], 1e3 * s.simulated[name])
                for s in both
                if s.replicas == replicas
            ]
            if points:
                middle.plot(
                    *zip(*points, strict=True),
                    marker,
                    color=colour,
                    alpha=0.7,
                    label=f"{name}, {replicas} replicas",
                )
    ends = (2, 400)
    middle.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.5, 2.0):
        middle.plot(
            ends, [factor * end for end in ends], color="black", linewidth=0.6, linestyle=":"
        )
    middle.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured, ms",
        ylabel="simulated, ms",
    )
    middle.set_title("1, 2 and 4 replicas; dotted: a factor of 2")
    middle.legend(fontsize="x-small")
    for balance, text in (("two", "the less busy of two"), ("random", "at random")):
        rate = of_many.rates[balance][COUNTS[-1]]
        totals = [10.0**exponent for exponent in range(3, 7)]
        right.plot(
            totals, [total / rate for total in totals], label=f"{text}: {rate:.0f} requests/s each"
        )
    right.plot([WANTED], [of_many.needed], "o", color="tab:blue", label="simulated")
    right.set(xscale="log", yscale="log", xlabel="requests/s", ylabel="replicas of one core")
    right.set_title(f"99 % within {1e3 * LIMIT_S:.0f} ms")
    right.legend(fontsize="small")
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    return figure


__all__ = ["Plan", "asdict", "page", "plot"]
