"""Plots, drawn without pyplot to leave a notebook's backend unchanged."""

import io
import math
from pathlib import Path

from matplotlib.figure import Figure

from model_store.artifacts.disk import replace_file


def plot_run(history: list[dict[str, float | int]], path: Path, title: str) -> None:
    """Plot the loss, KL, accuracy or RMSE, and spread of theta by epoch."""
    panels = {
        "nats a row": {
            "loss": "-ELBO",
            "nll": "training -log p",
            "validation_log_likelihood": "validation -log p",
        },
        "bound, nats a row": {"objective": "KL at its full weight"},
        "KL to the prior (nats)": {"kl": "KL"},
        "error (%)": {"train_accuracy": "training, one draw", "validation_accuracy": "validation"},
        "root mean squared error": {
            "train_rmse": "training, one draw",
            "validation_rmse": "validation",
        },
        "std of theta": {"log_std": "geometric mean"},
    }
    panels = {label: curves for label, curves in panels.items() if set(curves) <= set(history[0])}
    figure = Figure(figsize=(19, 4.0), layout="constrained")
    axes = figure.subplots(1, len(panels))
    epochs = [metrics["epoch"] for metrics in history]
    for axis, (label, curves) in zip(axes, panels.items(), strict=True):
        for key, name in curves.items():
            values = [metrics[key] for metrics in history]
            if key.endswith("accuracy"):
                values = [100 * (1 - value) for value in values]
            elif key.endswith("log_likelihood"):
                values = [-value for value in values]
            elif key == "log_std":
                values = [math.exp(value) for value in values]
            axis.plot(epochs, values, label=name, marker="o" if len(epochs) == 1 else None)
        axis.set(xlabel="epoch", ylabel=label)
        axis.grid(alpha=0.3)
        if min(line.get_ydata().min() for line in axis.lines) > 0:
            axis.set_yscale("log")
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
        axis.legend(**place, ncols=2, fontsize="small", frameon=False)
    figure.suptitle(title)
    replace_file(path, render_png(figure))


def render_png(figure: Figure, dpi: int = 100) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
