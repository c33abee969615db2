"""How fits went, epoch by epoch, from the `metrics.jsonl` that each run keeps.

`python -m benchmarks.runs FOLDER ... [--write]` draws, of classifications, the bound that is
minimised, the error of the validation rows and the spread of theta (geometric mean of its standard
deviations), and prints where each ended.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.options import RESULTS

ID_CHARACTERS = 13  # that a run's folder has behind the recipe's name


def main() -> None:
    """Print a line for each run, and with `--write` draw them in
    docs/results/convergence-runs.png."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument(
        "--write", action="store_true", help="write docs/results/convergence-runs.png"
    )
    options = parser.parse_args()
    runs = {folder.name[:-ID_CHARACTERS]: history(folder) for folder in options.folders}
    for name, epochs in runs.items():
        last = epochs[-1]
        error = 100.0 * (1.0 - last["validation_accuracy"])
        print(
            f"{name}: {len(epochs)} epochs, bound {last['objective']:.4f}, validation error "
            f"{error:.2f} %"
        )
    if options.write:
        plot(runs, RESULTS / "convergence-runs.png")


def history(folder: Path) -> list[dict[str, Any]]:
    """Return what a run wrote of each epoch."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw bound, validation error and spread by epoch."""
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for name, epochs in runs.items():
        numbers = [one["epoch"] for one in epochs]
        axes[0].plot(numbers, [one["objective"] for one in epochs], ".-", label=name)
        axes[1].plot(numbers, [100.0 * (1.0 - one["validation_accuracy"]) for one in epochs], ".-")
        axes[2].plot(numbers, [np.exp(one.get("log_std", np.nan)) for one in epochs], ".-")
    axes[0].set(ylim=(0, None), ylabel="bound as it is minimised, nats a row")
    axes[1].set(ylim=(0, None), ylabel="validation error, %")
    axes[2].set(ylim=(0, None), ylabel="standard deviation of theta")
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
