"""The picture of a simulation."""

import io
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from model_store.acquisition.choice import RANDOM
from training.active.records import Curves
from training.active.savings import Mean

DOTS = 100  # to an inch
STYLES = (
    "-",
    "-.",
    ":",
    (0, (5, 1, 1, 1, 1, 1)),
)  # of acquisitions other than random choice, which is dashed


def number(value: float, digits: int = 4) -> str:
    """Return a number as people read it: of as many digits, and whole from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def learning_curves(
    curves: Sequence[Curves], means: Sequence[Mean], target: float, metric: str, unit: str = ""
) -> bytes:
    """Draw the metric against labels, a panel for each start: an arm's mean over seeds within least
    and most, and where its labels needed lie; as a PNG.

    Means go as far as all seeds of an arm do; beyond, its seeds are thin lines.
    """
    plt.switch_backend("Agg")
    starts = list(dict.fromkeys(one.arm.start for one in curves))
    figure, axes = plt.subplots(
        1,
        len(starts),
        figsize=(1 + 6.5 * len(starts), 5.5),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    recipes = list(dict.fromkeys(one.arm.recipe.name for one in curves))
    acquisitions = [
        name for name in dict.fromkeys(one.arm.acquisition for one in curves) if name != RANDOM
    ]
    for axis, start in zip(axes[0], starts, strict=True):
        axis.axhline(target, color="grey", linewidth=0.8)
        for one, mean in zip(curves, means, strict=True):
            if one.arm.start == start:
                place = 0 if one.arm.is_control else acquisitions.index(one.arm.acquisition)
                colour = (
                    recipes.index(one.arm.recipe.name)
                    if len(recipes) > 1
                    else place + (not one.arm.is_control)
                )
                _draw(
                    axis,
                    one,
                    mean,
                    f"C{colour % 10}",
                    "--" if one.arm.is_control else STYLES[place % len(STYLES)],
                )
        axis.legend(loc="best", fontsize="small")
        of_what = f"test {metric}, in the units of {unit}" if unit else f"test {metric}"
        axis.set(xlabel="labels", ylabel=of_what, title=f"{start} start; target {number(target)}")
        axis.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS)
    plt.close(figure)
    return picture.getvalue()


def _draw(
    axis: Axes, one: Curves, mean: Mean, colour: str, style: str | tuple[int, tuple[int, ...]]
) -> None:
    """Draw an arm."""
    counts = one.counts
    values = np.array([one.at(count) for count in counts])
    told = f"{mean.bound} {mean.value:.0f}".strip()
    label = f"{one.arm.recipe.name}, {one.arm.acquisition}: {told} labels"
    axis.plot(counts, values.mean(1), linestyle=style, color=colour, label=label)
    axis.fill_between(counts, values.min(1), values.max(1), color=colour, alpha=0.1, linewidth=0)
    for rounds in one.seeds.values():
        rest = rounds[len(counts) - 1 :]
        labels, metrics = [done.labels for done in rest], [done.metric for done in rest]
        axis.plot(labels, metrics, linestyle=style, color=colour, alpha=0.4, linewidth=0.8)
    if not mean.bound:
        height = np.interp(mean.value, counts, values.mean(1))
        axis.plot(mean.value, height, "o", color=colour, markeredgecolor="black")
