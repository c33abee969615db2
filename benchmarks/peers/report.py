"""Table and plot of the comparison with other servers."""

import re
import statistics
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from benchmarks.common import RESULTS
from benchmarks.load import Load
from benchmarks.peers.check import CHECKED_ROUNDS, CHECKED_ROWS, REFERENCE_DRAWS
from model_store.processes import processors

CONNECTIONS = 64  # when capacity is measured
COLUMNS = 5


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
        "",
        "![Plot](peers.png)",
        "",
        "Dubito is the furthest to the right.",
    ]
    return "\n".join(lines) + "\n"


def latencies(loads: list[Load]) -> str:
    return " / ".join(
        f"{1e3 * statistics.median(load.percentile(p) for load in loads):.1f}" for p in (50, 99)
    )


def plot(page: str) -> Figure:
    """Plot the requests per second and the latencies in the page's table."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if " / " in line]
    rows = [line for line in lines if len(line) == COLUMNS][1:]
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 0.4 * len(rows) + 1.7), layout="constrained", sharey=True
    )
    kinds = {"Dubito": "C0", "batched by hand": "0.35", "textbook loop": "0.7"}
    for position, (label, requests, _, latency, _) in enumerate(rows):
        ours, batched, textbook = kinds.values()
        colour = ours if is_ours(label) else batched if label.endswith("batched") else textbook
        median, low, high = map(float, re.findall(r"[\d.]+", requests))
        axes[0].plot([low, high], [position] * 2, color=colour)
        axes[0].plot(median, position, "o", color=colour)
        axes[1].plot(float(latency.split(" / ")[0]), position, "o", color=colour)
    names = [label for label, *_ in rows]
    axes[0].set(xlabel="requests/s on 64 connections (right is better)", xscale="log")
    axes[0].set(yticks=range(len(rows)), yticklabels=names)
    axes[1].set(xlabel="median latency, ms, at a fifth of capacity (right is better)", xscale="log")
    axes[1].invert_xaxis()
    axes[0].invert_yaxis()
    for axis in axes:
        axis.grid(axis="x", alpha=0.3)
    for label, colour in kinds.items():
        axes[1].plot([], [], "o", color=colour, label=label)
    axes[1].legend()
    figure.suptitle("One-row requests with 100 fresh draws: Dubito and other servers")
    return figure


if __name__ == "__main__":  # redraw the figure of the stored page
    plot((RESULTS / "peers.md").read_text()).savefig(RESULTS / "peers.png", dpi=100)
