"""The picture of a simulation."""

import io
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np

from training.active.records import Curves
from training.active.savings import Mean

DOTS = 100  # to an inch


def learning_curves(curves: Sequence[Curves], means: Sequence[Mean], target: float, metric: str) -> bytes:
    """Draw the metric against labels: each arm's mean over seeds within least and most, and where its labels needed
    lie; as a PNG.

    Means go as far as all seeds of an arm do; beyond, its seeds are thin lines.
    """
    plt.switch_backend("Agg")
    figure, axis = plt.subplots(figsize=(9, 5.5), layout="constrained")
    axis.axhline(target, color="grey", linestyle=":", label=f"target, {target:.4g}")
    for number, (one, mean) in enumerate(zip(curves, means, strict=True)):
        colour, counts = f"C{number % 10}", one.counts
        values = np.array([one.at(count) for count in counts])
        style = "--" if one.arm.is_control else "-"
        told = f"{mean.bound} {mean.value:.0f}".strip()
        axis.plot(counts, values.mean(1), style, color=colour, label=f"{one.arm.label}: {told} labels")
        axis.fill_between(counts, values.min(1), values.max(1), color=colour, alpha=0.12, linewidth=0)
        for rounds in one.seeds.values():
            rest = rounds[len(counts) - 1 :]
            axis.plot(
                [r.labels for r in rest], [r.metric for r in rest], style, color=colour, alpha=0.35, linewidth=0.8
            )
        if not mean.bound:
            axis.plot(mean.value, target, "o", color=colour, markeredgecolor="black", zorder=3)
    axis.set(xlabel="labels", ylabel=f"test {metric}")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right" if metric == "accuracy" else "upper right", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS)
    plt.close(figure)
    return picture.getvalue()
