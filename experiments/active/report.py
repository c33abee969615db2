"""Reports of a simulation, as JSON and as a page with a table and a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
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
from training.evaluation.metrics import LEVEL
from training.fitting.plots import render_png

DPI = 100


@dataclass(frozen=True, eq=False)
class Findings:
    """The number of labels an arm needs, and how many it saves over random choice."""

    curves: Curves
    needed: dict[int, Needed]  # by seed
    mean: Mean
    saved: Saved | None  # None for random choice itself

    @property
    def label(self) -> str:
        return self.curves.arm.label


@dataclass(frozen=True, eq=False)
class Report:
    task: Task
    source: str
    protocol: Protocol
    end: End
    target: float
    unit: str  # the target's name for a regression, or ""
    arms: list[Findings]
    unfinished: dict[str, list[int]]  # seeds by arm

    @property
    def metric(self) -> str:
        return "accuracy" if self.task == "classification" else "rmse"

    def text(self) -> str:
        labels = min(arm.curves.counts[-1] for arm in self.arms)
        p = self.protocol
        origin = "" if self.end.target else " The target is the last mean of random choice."
        lines = [
            f"# Labels needed for a test {self.metric} of {number(self.target)}",
            "",
            f"Simulated on `{self.source}`: {p.initial} labels first, then {p.batch} per "
            f"acquisition out of {p.candidates} random unlabelled rows, scored by {p.draws} draws; "
            f"{p.epochs} epochs per fit, {p.test_draws} draws per test row. Every label is used "
            "for training: none are held out for a checkpoint or a temperature. Labels needed are "
            "those at the first round that reaches the target; brackets show the range of seeds."
            f"{origin}",
            "",
            f"| arm | labels needed | seeds at the target | saved against random "
            f"({100 * LEVEL:g} % interval) | {self.metric} at {labels} labels |",
            "|---|---|---|---|---|",
            *(_line(arm, labels) for arm in self.arms),
            "",
            *(
                f"* {label}: **unfinished** seeds {', '.join(map(str, seeds))}."
                for label, seeds in self.unfinished.items()
            ),
        ]
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
            "arms": [_content(arm) for arm in self.arms],
        }
        return {
            "active.md": f"{self.text()}\n\n![learning curves](active.png)\n".encode(),
            "active.json": json.dumps(content, indent=1, allow_nan=False).encode(),
            "active.png": draw_curves(self.arms, self.target, self.metric, self.unit),
        }


def report(simulated: Sequence[Curves], source: str, protocol: Protocol, end: End) -> Report:
    """Compare all measured arms with random choice.

    The default target is the last metric of random choice, averaged over its seeds.
    """
    task, recipe = simulated[0].arm.recipe.task, simulated[0].arm.recipe
    all_curves = [
        Curves(curves.arm, {seed: rounds for seed, rounds in curves.seeds.items() if rounds})
        for curves in simulated
    ]
    all_curves = [curves for curves in all_curves if curves.seeds]
    controls = [curves for curves in all_curves if curves.arm.is_control]
    if not all_curves or (end.target is None and not controls):
        raise InvalidInput("--report", "simulated rounds, also of random choice", "none")
    target = end.target
    if target is None:
        last = [rounds[-1].metric for curves in controls for rounds in curves.seeds.values()]
        target = float(np.mean(last))
    all_needed = [
        {seed: count_needed(rounds, target, task) for seed, rounds in curves.seeds.items()}
        for curves in all_curves
    ]
    arms = []
    for curves, needed in zip(all_curves, all_needed, strict=True):
        pairs = zip(all_curves, all_needed, strict=True)
        control = next((labels for arm, labels in pairs if arm.arm.controls(curves.arm)), {})
        seeds = [seed for seed in needed if seed in control]
        saved = None
        if seeds:
            saved = measure_saved([needed[s] for s in seeds], [control[s] for s in seeds])
        arms.append(Findings(curves, needed, mean_needed([*needed.values()]), saved))
    unfinished: dict[str, list[int]] = {}
    for curves in simulated:
        for seed, rounds in curves.seeds.items():
            if not has_ended(rounds, end, task, protocol.batch):
                unfinished.setdefault(curves.arm.label, []).append(seed)
    unit = "" if task == "classification" else recipe.data.target or "y"
    return Report(task, source, protocol, end, target, unit, arms, unfinished)


def _line(arm: Findings, labels: int) -> str:
    seeds = [*arm.needed.values()]
    reached = sum(seed.is_reached for seed in seeds)
    counts, values = [seed.labels for seed in seeds], arm.curves.metrics(labels)
    spread = f" ± {number(float(np.std(values, ddof=1)), 2)}" if len(values) > 1 else ""
    cells = [
        arm.label,
        f"{_mean(arm.mean)} ({min(counts)} to {max(counts)})",
        f"{reached} of {len(seeds)}",
        "" if arm.saved is None else _saved(arm.saved),
        f"{number(float(np.mean(values)))}{spread}",
    ]
    return f"| {' | '.join(cells)} |"


def _mean(mean: Mean) -> str:
    return f"{mean.bound} {mean.value:.0f}".strip()


def _saved(saved: Saved) -> str:
    if saved.mean.bound == "unknown":
        return "unknown: some seeds of both arms end below the target"
    low, high = ("..." if end is None else f"{end:.0f}" for end in (saved.low, saved.high))
    return f"{_mean(saved.mean)} ({low} to {high}; {saved.seeds} seeds)"


def _content(findings: Findings) -> dict[str, Any]:
    arm = findings.curves.arm
    return {
        "recipe": arm.recipe.model_dump(mode="json"),
        "acquisition": arm.acquisition,
        "start": arm.start,
        "needed": {str(seed): asdict(needed) for seed, needed in findings.needed.items()},
        "mean": asdict(findings.mean),
        "saved": None if findings.saved is None else asdict(findings.saved),
        "rounds": {
            str(seed): [asdict(step) for step in rounds]
            for seed, rounds in findings.curves.seeds.items()
        },
    }


def number(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits, or as an integer from 1,000 upwards."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def draw_curves(arms: Sequence[Findings], target: float, metric: str, unit: str = "") -> bytes:
    """Plot each arm's metric against labels, and return the plot as a PNG.

    Curves show the mean over seeds, and shading shows the range.

    Random choice is dashed; a dot marks the labels needed. Curves end with the shortest seed.
    """
    figure = Figure((7.5, 5.5), layout="constrained")
    axis = figure.subplots()
    axis.axhline(target, color="grey", linewidth=0.8)
    for i, arm in enumerate(arms):
        counts, color = arm.curves.counts, f"C{i % 10}"
        values = np.array([arm.curves.metrics(count) for count in counts])
        style = "--" if arm.curves.arm.is_control else "-"
        label = f"{arm.label}: {_mean(arm.mean)} labels"
        axis.plot(counts, values.mean(1), style, color=color, label=label)
        axis.fill_between(counts, values.min(1), values.max(1), color=color, alpha=0.1)
        if not arm.mean.bound:
            height = np.interp(arm.mean.value, counts, values.mean(1))
            axis.plot(arm.mean.value, height, "o", color=color, markeredgecolor="black")
    axis.legend(loc="best", fontsize="small")
    ylabel = f"test {metric}, in the units of {unit}" if unit else f"test {metric}"
    axis.set(xlabel="labels", ylabel=ylabel, title=f"target {number(target)}")
    axis.grid(alpha=0.3)
    return render_png(figure, DPI)
