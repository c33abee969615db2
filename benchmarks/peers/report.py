"""Table and plot of the comparison with other servers."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from benchmarks.load import Load
from benchmarks.peers.check import CHECKED_ROUNDS, CHECKED_ROWS, REFERENCE_DRAWS
from model_store.processes import processors

CONNECTIONS = 64  # when capacity is measured


@dataclass(frozen=True)
class Measured:
    capacity: float  # requests per second
    alone: Load
    low: Load
    low_rate: float
    ready_s: float
    megabytes: float
    failures: int


def is_ours(label: str) -> bool:
    return label.startswith("Dubito")


def spread(values: list[float], digits: int) -> str:
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def table(
    results: dict[str, list[Measured]],
    broken: dict[str, str],
    kernel: list[float],
    precision: str,
    seconds: float,
    rounds: int,
) -> str:
    """Format the results as Markdown."""
    ours = max(
        (
            statistics.median(m.capacity for m in results[label])
            for label in results
            if is_ours(label)
        ),
        default=float("nan"),
    )
    lines = [
        "# One-row requests, 100 fresh draws, 784-800-800-10, RealNVP 4: Dubito and other servers",
        "",
        f"`python -m benchmarks.peers --seconds {seconds:g} --rounds {rounds} --write`; "
        f"{processors()} processors, torch {torch.__version__.split('+')[0]}, Dubito's "
        f"weights in {precision}.",
        "",
        f"Capacity: closed loop, {CONNECTIONS} connections. Latencies in ms, p50 / p99: of one "
        "connection that never pauses, and at a fifth of the server's own capacity (Poisson "
        "arrivals, from the time at which a request was to be sent). Medians of rounds (least - "
        "most). Memory is of all the server's processes after the load.",
        "",
        "| server | requests/s | the faster Dubito by | p50 / p99, one connection | p50 / p99, a "
        "fifth | ready, s | memory, MB | not 200 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, measured in results.items():
        capacity = statistics.median(m.capacity for m in measured)
        lines.append(
            f"| {label} | {spread([m.capacity for m in measured], 1 if capacity < 100 else 0)} | "
            f"{ours / capacity if capacity else float('nan'):.1f} | "
            f"{latencies([m.alone for m in measured])} | {latencies([m.low for m in measured])} | "
            f"{statistics.median(m.ready_s for m in measured):.1f} | "
            f"{statistics.median(m.megabytes for m in measured):.0f} | "
            f"{sum(m.failures for m in measured)} |"
        )
    lines += [f"| {label} | {reason} | | | | | | |" for label, reason in broken.items()]
    lines += [
        "",
        f"The network alone, in process, {CONNECTIONS} rows at a time, draws made ahead: "
        f"{spread(kernel, 0)} rows/s; Dubito's most requests/s over HTTP are "
        f"{ours / statistics.median(kernel):.2f} of that.",
        "",
        f"Checked in the first round, before the load: {CHECKED_ROUNDS} answers to each of "
        f"{CHECKED_ROWS} rows, all asked at a time, agree in their means with {REFERENCE_DRAWS} "
        "draws in process within Monte Carlo error, and differ from one another.",
    ]
    return "\n".join(lines) + "\n"


def latencies(loads: list[Load]) -> str:
    return " / ".join(
        f"{1e3 * statistics.median(load.percentile(p) for load in loads):.1f}" for p in (50, 99)
    )


def plot(results: dict[str, list[Measured]]) -> Figure:
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 0.4 * len(results) + 1.5), layout="constrained", sharey=True
    )
    figures: list[tuple[str, Callable[[Measured], float]]] = [
        (f"requests/s, {CONNECTIONS} connections", lambda m: m.capacity),
        ("p50 at a fifth of capacity, ms", lambda m: 1e3 * m.low.percentile(50)),
    ]
    for axis, (title, value) in zip(axes, figures, strict=True):
        for position, (label, measured) in enumerate(results.items()):
            colour = "C3" if is_ours(label) else "C0" if label.endswith("batched") else "C7"
            axis.plot(
                [value(m) for m in measured],
                [position] * len(measured),
                "o",
                color=colour,
                alpha=0.7,
            )
        axis.set(xscale="log", xlabel=title, yticks=range(len(results)), yticklabels=list(results))
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    return figure
