"""HTML pages for evaluation reports, with embedded plots."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from model_store.inference.prediction import Prediction
from model_store.scores.regression import MixtureScores
from training.evaluation.metrics import Ends, Record, risk_coverage
from training.evaluation.quality import ServedPrediction
from training.fitting.plots import render_png
from training.methods import AnchoredEnsemble, MaximumLikelihood

MEASURES = {"auroc": "AUROC", "average_precision": "Average precision"}
SHADES = colormaps["tab20"].colors  # type: ignore[attr-defined]
COLOURS = [*SHADES[::2], *SHADES[1::2]]  # dark ones first
DPI = 100


def percent(share: float | None, ends: Ends | None = None) -> str:
    if share is None:
        return ""
    text = f"{100 * share:.2f}"
    return text if ends is None else f"{text} ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"


def number(value: float | None, ends: Ends | None = None) -> str:
    if value is None:
        return "infinite"
    return f"{value:.4g}" if ends is None else f"{value:.4g} ({ends[0]:.3g} to {ends[1]:.3g})"


def _share(record: Record, name: str) -> str:
    return percent(record[name], record["confidence_intervals"].get(name))


def _figure(record: Record, name: str) -> str:
    return number(record[name], record["confidence_intervals"].get(name))


def _flag_rate(record: Record, fpr: str) -> str:
    return percent(record["flagged"].get(fpr), record["confidence_intervals"].get(f"flagged.{fpr}"))


_TEMPLATES = Environment(
    loader=PackageLoader("training.evaluation"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_TEMPLATES.globals.update(
    percent=percent, number=number, share=_share, figure=_figure, flag_rate=_flag_rate
)


def render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(template).render(values)


def report_page(report: Record, plots: Mapping[str, bytes]) -> str:
    """Render a report as HTML, with PNG plots by file name."""
    test = report["test"]
    return render(
        "report.html",
        report=report,
        test=test,
        is_regression="rmse" in test,
        figures={name: v for name, v in test.items() if isinstance(v, float)},
        has_gaps=report["method"] not in (AnchoredEnsemble.name, MaximumLikelihood.name),
        base_rates=sorted({percent(entry["base_rate"]) for entry in report["outliers"].values()}),
        measures=MEASURES,
        plots={
            name.removesuffix(".png"): base64.b64encode(plots[name]).decode()
            for name in sorted(plots)
        },
    )


def reliability_plot(bins: list[Record]) -> bytes:
    figure, (axis, counts) = _panels(2)
    confidence, rows = np.array([(b["confidence"], b["rows"]) for b in bins]).T
    axis.plot([0, 1], [0, 1], color="grey", linestyle=":")
    axis.plot(confidence, [b["accuracy"] for b in bins], "o")
    axis.vlines(confidence, *np.array([b["confidence_intervals"]["accuracy"] for b in bins]).T)
    axis.set(xlabel="confidence", ylabel="accuracy (95 % interval)")
    axis.set(xlim=(0, 1.02), ylim=(-0.02, 1.02))
    counts.bar(confidence, rows, width=0.02)
    counts.set(xlabel="confidence", ylabel="test rows", xlim=(0, 1.04), yscale="log")
    return _png(figure, "Reliability")


def predicted_plot(prediction: Prediction, y: np.ndarray) -> bytes:
    scores = prediction.scores
    assert isinstance(scores, MixtureScores)
    figure, (actual, error) = _panels(2)
    ends = [float(min(scores.mean.min(), y.min())), float(max(scores.mean.max(), y.max()))]
    actual.plot(ends, ends, color="grey", linestyle=":")
    actual.plot(scores.mean, y, ".", alpha=0.5, markersize=4)
    actual.set(xlabel="predicted mean", ylabel="target")
    error.axhline(0.0, color="grey", linestyle=":")
    error.plot(scores.mean, (y - scores.mean) / scores.std, ".", alpha=0.5, markersize=4)
    error.set(xlabel="predicted mean", ylabel="(target - mean) / predicted standard deviation")
    return _png(figure, "Targets against predictions")


def risk_coverage_plot(test: ServedPrediction, loss: Float64[np.ndarray, "N"], label: str) -> bytes:
    figure, (axis,) = _panels(1, width=8.0)
    for colour, (name, score) in zip(COLOURS, test.scores.items(), strict=False):
        coverage, risk = risk_coverage(score, loss)
        axis.plot(coverage, risk, label=name, color=colour)
    axis.set(xlabel="coverage: share of rows answered, surest first", ylabel=label)
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1))
    return _png(figure, "Risk against coverage")


def _panels(count: int, width: float = 6.0) -> tuple[Figure, list[Axes]]:
    figure = Figure((width * count, 4.2), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure, list(axes[0])


def _png(figure: Figure, title: str) -> bytes:
    figure.suptitle(title)
    return render_png(figure, DPI)
