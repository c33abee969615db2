"""HTML pages for evaluation reports, with embedded plots."""

import base64
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from training.evaluation.figures import Ends, Record
from training.methods import AnchoredEnsemble, MaximumLikelihood

MEASURES = {
    "auroc": "AUROC",
    "average_precision": "Average precision",
}


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
