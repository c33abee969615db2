"""Plots of an evaluation report, as PNG."""

import io

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from training.evaluation.metrics import risk_coverage, roc_curve
from training.evaluation.quality import ServedPrediction
from training.evaluation.records import Attack, Bin

SHADES = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
COLOURS = [*SHADES[::2], *SHADES[1::2]]  # dark ones first
LEAST_RATE = 1e-3
DOTS = 100  # to an inch


def reliability_plot(bins: list[Bin]) -> bytes:
    """Draw accuracy against confidence, and how many rows each bin of confidence holds."""
    figure, (axis, counts) = _panels(2)
    confidence, accuracy, rows = np.array([(b.confidence, b.accuracy, b.rows) for b in bins]).T
    # Wilson's interval, which has a length even where all rows of a bin, or none, are right.
    centre = (accuracy + 0.5 / rows) / (1 + 1 / rows)
    half = np.sqrt(accuracy * (1 - accuracy) / rows + 0.25 / rows**2) / (1 + 1 / rows)
    axis.plot([0, 1], [0, 1], color="grey", linestyle=":")
    axis.vlines(confidence, centre - half, centre + half)
    axis.plot(confidence, accuracy, "o")
    axis.set(xlabel="confidence", ylabel="accuracy (with one standard error)", xlim=(0, 1.02), ylim=(-0.02, 1.02))
    counts.bar(confidence, rows, width=0.02)
    counts.set(xlabel="confidence", ylabel="test rows", xlim=(0, 1.04), yscale="log")
    return _png(figure, "Reliability")


def risk_coverage_plot(test: ServedPrediction, loss: Float64[np.ndarray, "N"], label: str) -> bytes:
    """Draw the risk of the rows that each score is surest of, against how many they are."""
    figure, (axis,) = _panels(1)
    for colour, name in zip(COLOURS, _whole(test), strict=False):
        coverage, risk = risk_coverage(test.scores[name], loss)
        axis.plot(coverage, risk, label=name, color=colour)
    axis.set(xlabel="coverage: share of rows answered, surest first", ylabel=label)
    axis.legend(fontsize="small")
    return _png(figure, "Risk against coverage")


def cdf_plot(test: ServedPrediction, sets: dict[str, ServedPrediction], score: str) -> bytes:
    """Draw the distribution of a score over the test rows and over each set."""
    figure, (axis,) = _panels(1, width=8.0)
    for colour, (name, predicted) in zip(["black", *COLOURS], {"test rows": test, **sets}.items(), strict=False):
        values = np.sort(predicted.scores[score])
        shares = np.arange(1, len(values) + 1) / len(values)
        axis.step(values, shares, where="post", label=name, color=colour)
    axis.set(xlabel=f"{score} (nats)" if score == "entropy" else score, ylabel="share of rows at or below")
    _legend_beside(axis)
    return _png(figure, f"Distribution of {score}")


def roc_plot(test: ServedPrediction, sets: dict[str, ServedPrediction], scores: list[str]) -> bytes:
    """Draw the ROC curve of each score for each set."""
    figure, axes = _panels(len(scores), width=5.0)
    for axis, score in zip(axes, scores, strict=True):
        for colour, (name, predicted) in zip(COLOURS, sets.items(), strict=False):
            false, true = roc_curve(predicted.scores[score], test.scores[score])
            axis.step(np.maximum(false, LEAST_RATE), true, where="post", label=name, color=colour)
        axis.set(xscale="log", xlim=(LEAST_RATE, 1), ylim=(0, 1.02), title=score)
        axis.set(xlabel="false-positive rate (test rows)", ylabel="detection rate")
    _legend_beside(axes[-1])
    return _png(figure, "ROC curves")


def attacks_plot(clean_accuracy: float, clean_scores: dict[str, float], attacks: dict[str, Attack]) -> bytes:
    """Draw accuracy, mean scores and detection against the step size of FGSM, by draws of the gradient."""
    fgsm = [entry for entry in attacks.values() if entry.facts.attack == "fgsm"]
    counts = sorted({entry.facts.draws for entry in fgsm})
    figure, axes = _panels(4, width=4.6)
    styles = dict(zip(counts, ("-", "--", ":", "-."), strict=False))
    for count, style in styles.items():
        steps_of = {e.facts.step: e.measures for e in fgsm if e.facts.draws == count and e.facts.step is not None}
        taken = sorted(steps_of)
        entries = [steps_of[step] for step in taken]
        steps = [0.0, *taken]
        suffix = f"{count} draw" + ("s" if count > 1 else "")
        axes[0].plot(steps, [clean_accuracy, *(e.accuracy for e in entries)], style, marker=".", label=suffix)
        axes[0].plot(steps[1:], [e.hits for e in entries], style, marker="x", label=f"wrong, unflagged; {suffix}")
        for colour, (name, clean) in zip(COLOURS, clean_scores.items(), strict=False):
            values = np.array([clean, *(entry.mean_scores[name] for entry in entries)])
            axes[1].plot(steps, values / clean, style, color=colour)
        for colour, name in zip(COLOURS, [*clean_scores, "flag"], strict=False):
            values = np.array([0.5, *(entry.scores[name].auroc for entry in entries)])
            axes[2].plot(steps, values, style, color=colour, label=name if count == counts[0] else None)
            errors = [
                (step, entry.error_detection.scores[name].auroc)
                for step, entry in zip(taken, entries, strict=True)
                if entry.error_detection
            ]
            axes[3].plot(*np.array(errors).T, style, color=colour)
    axes[0].set(ylabel="share of rows", title="accuracy", ylim=(-0.02, 1.02))
    axes[0].legend(fontsize="small")
    axes[1].set(ylabel="mean score over that of test rows", yscale="log", title="scores")
    axes[2].set(ylabel="AUROC", title="adversary detection", ylim=(None, 1.02))
    axes[3].set(ylabel="AUROC", title="error detection", ylim=(None, 1.02), xlim=axes[2].get_xlim())
    for axis in axes:
        axis.set(xlabel="FGSM step (of the data's range)")
    handles, labels = axes[2].get_legend_handles_labels()
    title = ", ".join(f"{style} {count} draws" for count, style in styles.items())
    axes[3].legend(handles, labels, title=title, fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1))
    return _png(figure, "FGSM")


def _whole(predicted: ServedPrediction) -> list[str]:
    """Return the scores but for the flag with detectors left out."""
    return [name for name in predicted.scores if " without " not in name]


def _panels(count: int, width: float = 6.0) -> tuple[Figure, list[Axes]]:
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(1, count, figsize=(width * count, 4.2), layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure, list(axes[0])


def _legend_beside(axis: Axes) -> None:
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1))


def _png(figure: Figure, title: str) -> bytes:
    figure.suptitle(title)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS)
    plt.close(figure)
    return picture.getvalue()
