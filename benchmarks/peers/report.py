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
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


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
        f"Requests/s are on {CONNECTIONS} connections; the ratio is that of the fastest Dubito. "
        "Latencies are in ms, at a fifth of the server's capacity with Poisson arrivals. Figures are medians of rounds (minimum–maximum).",
        "",
        "| server | requests/s | ratio | p50 / p99, a fifth | memory, MB |",
        "|---|---|---|---|---|",
    ]
    for label, measured in results.items():
        capacity = statistics.median(m.capacity for m in measured)
        lines.append(
            f"| {label} | {spread([m.capacity for m in measured], 1 if capacity < 100 else 0)} | "
            f"{ours / capacity if capacity else float('nan'):.1f} | "
            f"{latencies([m.low for m in measured])} | "
            f"{statistics.median(m.megabytes for m in measured):.0f} |"
        )
    lines += [f"| {label} | {reason} | | | |" for label, reason in broken.items()]
    lines += [
        "",
        f"The network alone, in process, computes {spread(kernel, 0)} rows/s on batches of "
        f"{CONNECTIONS} rows. Dubito's most requests/s are {ours / statistics.median(kernel):.2f} "
        "of that.",
        "",
        f"Before the load, {CHECKED_ROUNDS} answers to each of {CHECKED_ROWS} rows agree in their "
        f"means with {REFERENCE_DRAWS} draws in process, and differ from one another.",
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
