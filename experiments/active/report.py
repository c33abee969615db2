"""The report of a simulation: a page with a table and a plot, and the same as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.active.protocol import End, Protocol
from experiments.active.rounds import (
    Curves,
    Mean,
    Needed,
    Saved,
    count_needed,
    has_ended,
    mean_needed,
    measure_saved,
)
from model_store.errors import InvalidInput
from model_store.types import Task
from training.evaluation.figures import LEVEL
from training.fitting.plots import png_of

SHOWN_COUNTS = 5  # numbers of labels at which the metric is in the table
DOTS = 100  # to an inch
STYLES = ("-", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))  # of acquisitions; random choice is dashed


@dataclass(frozen=True, eq=False)
class Findings:
    curves: Curves
    needed: dict[int, Needed]  # by seed
    mean: Mean
    saved: Saved | None  # against random choice


@dataclass(frozen=True, eq=False)
class Report:
    task: Task
    source: str
    protocol: Protocol
    end: End
    target: float
    is_given: bool  # else the target is what random choice comes to
    unit: str  # of an error: the target's name; "" of an accuracy
    arms: list[Findings]
    unfinished: dict[str, list[int]]  # seeds that did not end yet, by arm

    @property
    def metric(self) -> str:
        return "accuracy" if self.task == "classification" else "rmse"

    def text(self) -> str:
        metric, counts = self.metric, self._shown_counts()
        lines = [
            f"# Labels needed for a test {metric} of {number(self.target)}",
            "",
            *self._protocol(),
            "",
            f"| arm | labels needed | seeds there | {self.end.rounds} rounds in a row | saved "
            f"against random ({100 * LEVEL:g} % interval) "
            f"|{''.join(f' {metric} at {count} |' for count in counts)}",
            f"|---|---|---|---|---|{'---|' * len(counts)}",
        ]
        lines += [self._row(found, counts) for found in self.arms]
        lines += ["", *filter(None, map(_verdict, self.arms)), *self._unfinished(), ""]
        lines += ["Labels needed by seed (`>`: not reached with this many):", ""]
        seeds = sorted({seed for found in self.arms for seed in found.needed})
        lines.append(f"| arm |{''.join(f' seed {seed} |' for seed in seeds)}")
        lines.append(f"|---|{'---|' * len(seeds)}")
        for found in self.arms:
            cells = [_needed(found.needed[seed]) if seed in found.needed else "" for seed in seeds]
            lines.append(f"| {found.curves.arm.label} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def files(self) -> dict[str, bytes]:
        content: dict[str, Any] = {
            "source": self.source,
            "task": self.task,
            "metric": self.metric,
            "target": self.target,
            "protocol": asdict(self.protocol),
            "end": asdict(self.end),
            "unfinished": self.unfinished,
            "arms": [_arm(found) for found in self.arms],
        }
        return {
            "active.md": f"{self.text()}\n\n![learning curves](active.png)\n".encode(),
            "active.json": json.dumps(content, indent=1, allow_nan=False).encode(),
            "active.png": draw_curves(self.arms, self.target, self.metric, self.unit),
        }

    def _protocol(self) -> list[str]:
        p = self.protocol
        origin = "as asked for" if self.is_given else "what random choice comes to with all labels"
        return [
            f"Simulated on `{self.source}`: {p.initial} labels first, {p.batch} an acquisition "
            f"out of {p.candidates} random rows without a label, scored by {p.draws} draws"
            + (f" in a race (probability {p.race:g})" if p.race is not None else "")
            + (f", power_bald with beta {p.beta:g}" if p.beta != 1.0 else "")
            + f"; {p.epochs} epochs a fit; the test {self.metric}"
            + (f", in the units of `{self.unit}`," if self.unit else "")
            + f" is of {p.test_draws} draws, on test rows that are used for nothing else. The "
            f"target is {origin}. A fit sees the labels counted here and no others: none are held "
            "out for a checkpoint, a temperature or anything else. Labels needed are those of the "
            "first round at the target; in brackets the least and the most of the seeds."
        ]

    def _unfinished(self) -> list[str]:
        begun = {found.curves.arm.label for found in self.arms}
        lines = [
            f"* {label}: **not finished**, of seeds {', '.join(map(str, seeds))}."
            for label, seeds in self.unfinished.items()
            if label in begun
        ]
        others = [label for label in self.unfinished if label not in begun]
        return [*lines, *([f"* **Not begun**: {'; '.join(others)}."] if others else [])]

    def _shown_counts(self) -> list[int]:
        every = set.intersection(*(set(found.curves.counts) for found in self.arms))
        counts = sorted(every)
        places = np.linspace(0, len(counts) - 1, min(SHOWN_COUNTS, len(counts))).round().astype(int)
        return [counts[i] for i in sorted(set(places.tolist()))]

    def _row(self, found: Findings, counts: Sequence[int]) -> str:
        of_seeds = list(found.needed.values())
        there = sum(one.is_reached for one in of_seeds)
        kept = [one.kept for one in of_seeds if one.kept is not None]
        least, most = min(one.labels for one in of_seeds), max(one.labels for one in of_seeds)
        or_more = "" if there == len(of_seeds) else " or more"
        spread = f" ({least} to {most}{or_more})" if there else ""
        in_a_row = f"{np.mean(kept):.0f} ({len(kept)} of {len(of_seeds)})" if kept else "none"
        cells = [
            found.curves.arm.label,
            f"{_mean(found.mean)}{spread}",
            f"{there} of {len(of_seeds)}",
            in_a_row,
            "" if found.saved is None else _saved(found.saved),
        ]
        for count in counts:
            values = found.curves.at(count)
            spread = f" ± {number(float(np.std(values, ddof=1)), 2)}" if len(values) > 1 else ""
            cells.append(f"{number(float(np.mean(values)))}{spread}")
        return f"| {' | '.join(cells)} |"


def report(wanted: Sequence[Curves], source: str, protocol: Protocol, end: End) -> Report:
    """Return the report; the default target is what random choice comes to, over all its seeds."""
    curves = [
        Curves(one.arm, {seed: rounds for seed, rounds in one.seeds.items() if rounds})
        for one in wanted
    ]
    curves = [one for one in curves if one.seeds]
    task, target = wanted[0].arm.recipe.task, end.target
    controls = [one for one in curves if one.arm.is_control]
    if target is None and controls:
        last = [rounds[-1].metric for one in controls for rounds in one.seeds.values()]
        target = float(np.mean(last))
    if not curves or target is None:
        raise InvalidInput("--report", "rounds that were simulated, of random choice too", "none")
    by_arm = [
        {seed: count_needed(rounds, target, task, end.rounds) for seed, rounds in one.seeds.items()}
        for one in curves
    ]
    found = []
    for one, mine in zip(curves, by_arm, strict=True):
        against = [
            its for other, its in zip(curves, by_arm, strict=True) if other.arm.controls(one.arm)
        ]
        both = [seed for seed in mine if against and seed in against[0]]
        savings = None
        if both:
            savings = measure_saved([mine[s] for s in both], [against[0][s] for s in both])
        found.append(Findings(one, mine, mean_needed(list(mine.values())), savings))
    unfinished: dict[str, list[int]] = {}
    for one in wanted:
        for seed, rounds in one.seeds.items():
            if not has_ended(rounds, end, task, protocol.batch):
                unfinished.setdefault(one.arm.label, []).append(seed)
    is_given = end.target is not None
    unit = "" if task == "classification" else wanted[0].arm.recipe.data.target or "y"
    return Report(task, source, protocol, end, target, is_given, unit, found, unfinished)


def _verdict(found: Findings) -> str | None:
    if found.saved is None:
        return None
    one = found.saved
    if one.low is not None and one.low > 0:
        says = "saves labels against random choice"
    elif one.high is not None and one.high < 0:
        says = "**random choice wins**"
    elif one.mean.bound in ("", "at most") and one.mean.value < 0:
        says = "random choice needs fewer labels on average, within chance"
    else:
        says = "no difference from random choice beyond chance is shown"
    return f"* {found.curves.arm.label}: {says}."


def _needed(one: Needed) -> str:
    return f"{one.labels}" if one.is_reached else f"> {one.labels}"


def _mean(mean: Mean) -> str:
    return f"{mean.bound} {mean.value:.0f}".strip()


def _saved(one: Saved) -> str:
    if one.mean.bound == "unknown":
        return "unknown: some seeds of both end below the target"
    ends = ["..." if end is None else f"{end:.0f}" for end in (one.low, one.high)]
    return f"{_mean(one.mean)} ({ends[0]} to {ends[1]}; {one.seeds} seeds)"


def _arm(found: Findings) -> dict[str, Any]:
    arm = found.curves.arm
    return {
        "recipe": arm.recipe.model_dump(mode="json"),
        "acquisition": arm.acquisition,
        "start": arm.start,
        "needed": {str(seed): asdict(one) for seed, one in found.needed.items()},
        "mean": asdict(found.mean),
        "saved": None if found.saved is None else asdict(found.saved),
        "rounds": {
            str(seed): [asdict(done) for done in rounds]
            for seed, rounds in found.curves.seeds.items()
        },
    }


def number(value: float, digits: int = 4) -> str:
    """Return a number in a few digits, and whole from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def draw_curves(arms: Sequence[Findings], target: float, metric: str, unit: str = "") -> bytes:
    """Draw the metric against labels as a PNG, a panel for each start: an arm's mean over seeds
    within least and most, and its labels needed.

    Means go as far as all seeds of an arm do; beyond, its seeds are thin lines.
    """
    every = [found.curves.arm for found in arms]
    starts, recipes, acquisitions = (
        list(dict.fromkeys(of))
        for of in (
            (arm.start for arm in every),
            (arm.recipe.name for arm in every),
            (arm.acquisition for arm in every if not arm.is_control),
        )
    )
    figure = Figure((1 + 6.5 * len(starts), 5.5), layout="constrained")
    axes = figure.subplots(1, len(starts), sharey=True, squeeze=False)
    for axis, start in zip(axes[0], starts, strict=True):
        axis.axhline(target, color="grey", linewidth=0.8)
        for found in arms:
            arm = found.curves.arm
            if arm.start == start:
                place = 0 if arm.is_control else acquisitions.index(arm.acquisition)
                colour = place + (not arm.is_control)
                if len(recipes) > 1:
                    colour = recipes.index(arm.recipe.name)
                style = "--" if arm.is_control else STYLES[place % len(STYLES)]
                _draw(axis, found.curves, found.mean, f"C{colour % 10}", style)
        axis.legend(loc="best", fontsize="small")
        of_what = f"test {metric}, in the units of {unit}" if unit else f"test {metric}"
        axis.set(xlabel="labels", ylabel=of_what, title=f"{start} start; target {number(target)}")
        axis.grid(alpha=0.3)
    return png_of(figure, DOTS)


def _draw(
    axis: Axes, one: Curves, mean: Mean, colour: str, style: str | tuple[int, tuple[int, ...]]
) -> None:
    counts = one.counts
    values = np.array([one.at(count) for count in counts])
    label = f"{one.arm.recipe.name}, {one.arm.acquisition}: {_mean(mean)} labels"
    axis.plot(counts, values.mean(1), linestyle=style, color=colour, label=label)
    axis.fill_between(counts, values.min(1), values.max(1), color=colour, alpha=0.1, linewidth=0)
    for rounds in one.seeds.values():
        rest = rounds[len(counts) - 1 :]
        labels, metrics = [done.labels for done in rest], [done.metric for done in rest]
        axis.plot(labels, metrics, linestyle=style, color=colour, alpha=0.4, linewidth=0.8)
    if not mean.bound:
        height = np.interp(mean.value, counts, values.mean(1))
        axis.plot(mean.value, height, "o", color=colour, markeredgecolor="black")
