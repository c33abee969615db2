"""The text of an evaluation report, block by block, as Markdown and as one HTML page.

The page needs nothing else: no script, no address, its plots within.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from training.evaluation import evidence
from training.evaluation.figures import Ends
from training.methods import METHODS

MEASURES = {
    "auroc": "AUROC",
    "pr_plus": "PR+ (average precision, the set's rows positive)",
    "pr_minus": "PR- (average precision, test rows positive, the score turned round)",
    "fpr_at_95": "False-positive rate at 95 % detection",
}
ABOUT_EVEN_ROWS = (
    "In place of noise, `even`: rows whose every column is drawn by itself, evenly over its "
    "categories, its few values or its range. Noise over numbers that are only ever some few "
    "values is told apart by anything."
)
ABOUT_IDS = (
    "Rows are ids: in place of noise they are drawn evenly from all that there are (`uniform`), "
    "those of two classes are crossed, place by place (`crossed`), and those of a row are put in "
    "another order (`shuffled`). A network that does not look at their order gives shuffled rows "
    "the same answer."
)
FEW_CLASSES = 20  # whose confusion matrix is shown
# what a browser lets the page load
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; \
max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .6rem; }
h2 { border-bottom: 1px solid #ccc; padding-bottom: .2rem; }
.table { overflow-x: auto; margin-bottom: 1em; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: left; \
white-space: nowrap; }
th { background: #f4f4f4; }
tr:hover td { background: #fafafa; }
figure { margin: 1.5rem 0; }
figcaption { color: #666; }
img { max-width: 100%; height: auto; }
code { background: #f2f2f2; padding: 0 .2rem; }
"""


@dataclass(frozen=True)
class Table:
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(map(_escape_markdown, cells))} |" for cells in lines)

    def html(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        rows = "\n".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return (
            f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{rows}\n</tbody></table></div>"
        )


@dataclass(frozen=True)
class Plot:
    file: str

    @property
    def name(self) -> str:
        return self.file.removesuffix(".png")

    def markdown(self) -> str:
        return f"![{self.name}]({self.file})"

    def html(self, png: bytes) -> str:
        name, data = escape(self.name), base64.b64encode(png).decode()
        image = f'<img alt="{name}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{name}</figcaption></figure>"


Block = str | Table | Plot  # a heading (# and more) or a paragraph, a table, a plot


def markdown(parts: list[Block]) -> str:
    texts = (part if isinstance(part, str) else part.markdown() for part in parts)
    return "\n\n".join(texts) + "\n"


def page(title: str, parts: list[Block], files: Mapping[str, bytes]) -> str:
    body = []
    for part in parts:
        if isinstance(part, Table):
            body.append(part.html())
        elif isinstance(part, Plot):
            body.append(part.html(files[part.file]))
        elif heading := re.match(r"(#{1,4}) ", part):
            level = len(heading[1])
            body.append(f"<h{level}>{_inline(part[level + 1 :])}</h{level}>")
        else:
            body.append(f"<p>{_inline(part)}</p>")
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Evidence: {escape(title)}</title>",
        f"<style>{STYLE}</style>",
        "</head>",
        "<body>",
        *body,
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def blocks(report: evidence.Report, plots: list[str]) -> list[Block]:
    """Return a report's text, tables, and plots by name. Shares are given times 100, intervals in
    brackets."""
    test, own = report.test, report.test.confidence_intervals
    attacked = {name: attack.measures for name, attack in report.attacks.items()}
    figures = [
        [key, _plain(value, own.get(key))]
        for key, value in test.content().items()
        if isinstance(value, float)
    ]
    parts: list[Block] = [
        f"# Evidence: {report.model} version {report.version}",
        f"Made {report.created} by `dubito evaluate`, seed {report.seed}: "
        f"`{report.method}`, {test.rows} test rows of `{report.data}`, {report.draws} draws, "
        f"requests of {report.rows_per_request} rows. The flag combines "
        f"{', '.join(report.detectors.combined)}.",
        f"In brackets: {100 * report.confidence_level:g} % confidence intervals, over other rows "
        "of the same kind; where they are bootstrapped, of "
        f"{report.resamples} samples of the rows.",
        *_convergence(report.convergence),
        *_gaps(report.method),
        *(f"Note: {warning}." for warning in report.warnings),
        "## Test rows",
        Table(["", ""], figures),
        _flag_rates({"test rows": test, **report.outliers, **attacked}),
        *_baselines(report.baselines),
    ]
    is_regression = isinstance(test, evidence.RegressionMeasures)
    if isinstance(test, evidence.RegressionMeasures):
        parts += ["## Intervals", *_intervals(test)]
    else:
        parts += ["## Classes", *_classes(test)]
        if test.class_probabilities:
            parts += ["### Probabilities by class", *_class_probabilities(test)]
    if report.parts:
        parts += ["## Parts", *_parts(report.parts)]
    if report.worst_slices is not None:
        parts += ["## Where it is worst", *_worst_slices(report.worst_slices, is_regression)]
    parts += ["## Detection", "Of each set's rows against the test rows."]
    if "even" in report.outliers:
        parts.append(ABOUT_EVEN_ROWS)
    if "uniform" in report.outliers and "gaussian" not in report.outliers:
        parts.append(ABOUT_IDS)
    base_rates = sorted({_percent(entry.base_rate) for entry in report.outliers.values()})
    parts.append(f"Base rate: the set's rows are {', '.join(base_rates)} % of all.")
    for key, title in MEASURES.items():
        parts += [f"### {title}", _detection(report.outliers, key)]
    parts += ["## Errors", *_errors(test)]
    if attacked:
        parts += ["## Attacks", _attacks(attacked)]
        parts += ["### AUROC of attacked against test rows", _detection(attacked, "auroc")]
    return parts + [Plot(name) for name in plots]


def _convergence(fit: dict[str, Any] | None) -> list[Block]:
    if fit is None:
        return []
    bound = f"{fit['negative_elbo']:.4g} ± {fit['negative_elbo_error']:.2g}"
    k_hat = ""
    if "pareto_k" in fit:
        k_hat = f"; k-hat {fit['pareto_k']:.2g} (below .7 it covers the exact one)"
    return [f"Its fit: {fit['says']}; negative ELBO {bound} nats a training row{k_hat}."]


def _gaps(method: str) -> list[Block]:
    if METHODS[method].is_anchored or METHODS[method].is_point:
        return []
    seen = "in a gap between clusters of training rows it doubts less than it should"
    more = "`anchored-ensemble` doubts more (docs/results/reproduce/gap.md)"
    return [f"Of `{method}`: {seen}; {more}."]


def _baselines(baselines: Mapping[str, Mapping[str, float]]) -> list[Block]:
    if not baselines:
        return []
    keys = list(baselines["this model"])
    rows = [[name, *(_plain(found[key]) for key in keys)] for name, found in baselines.items()]
    about = "On the test rows of its fit, when it was published:"
    return ["### Plain models", about, Table(["", *keys], rows)]


def _detection(sets: Mapping[str, evidence.SetMeasures], measure: str) -> Table:
    names = list(next(iter(sets.values())).scores)
    rows = [
        [name, *(_share(entry.scores[score], measure) for score in names)]
        for name, entry in sets.items()
    ]
    return Table(["set", *names], rows)


def _intervals(test: evidence.RegressionMeasures) -> list[Block]:
    own = test.confidence_intervals
    held = [
        [_percent(e.nominal), _share(e, "covered"), _number(e, "width")] for e in test.intervals
    ]
    pinball = [[q, _plain(loss, own[f"pinball.{q}"])] for q, loss in test.pinball.items()]
    spread = [
        [str(b.rows), _number(b, "std"), _number(b, "rmse"), _share(b, "covered")]
        for b in test.by_spread
    ]
    return [
        Table(["nominal coverage", "covered", "mean width (target's units)"], held),
        "Rows by predicted standard deviation:",
        Table(
            ["rows", "predicted standard deviation", "RMSE", "covered by 95 % intervals"], spread
        ),
        "The share of its predictive distribution below each target (PIT) is at most "
        f"{test.pit.distance:.3f} from uniform; by chance it would be as far with probability "
        f"{test.pit.p_value:.2g}.",
        Table(["quantile", "pinball loss (target's units)"], pinball),
    ]


def _classes(test: evidence.ClassMeasures) -> list[Block]:
    header = ["class", "rows", "recall", "precision"]
    rows = [
        [one.name, str(one.rows), _share(one, "recall"), _share(one, "precision")]
        for one in test.by_class
    ]
    if len(test.by_class) > FEW_CLASSES:
        return [Table(header, rows)]
    header += [one.name for one in test.by_class]
    for row, one in zip(rows, test.by_class, strict=True):
        row += map(str, one.labelled)
    return ["Last columns: rows of the class that were given each label.", Table(header, rows)]


def _parts(measured: list[evidence.PartMeasures]) -> list[Block]:
    key, title = ("accuracy", "accuracy (%)") if measured[0].rmse is None else ("rmse", "RMSE")
    show = _share if key == "accuracy" else _number
    rows = []
    for part in measured:
        shares = [_share(part, "covered"), _share(part, "flagged")]
        rows.append([f"{part.by} {part.name}", str(part.rows), show(part, key), *shares])
    return [
        "Rows of each class, given each label, and of each group: one that is served worse than "
        "the others.",
        Table(["part", "rows", title, "covered at .95 (%)", "flagged at .05 (%)"], rows),
    ]


def _class_probabilities(test: evidence.ClassMeasures) -> list[Block]:
    names = ("calibration_error", "average_precision")
    rows = [
        [one.name, str(one.rows), *(_share(one, name) for name in names)]
        for one in test.class_probabilities
    ]
    return [
        "Each class against all others, by its probability.",
        Table(["class", "rows", "calibration error", "average precision"], rows),
    ]


def _worst_slices(found: evidence.Slices, is_regression: bool) -> list[Block]:
    loss, show = ("RMSE", _plain) if is_regression else ("wrong labels", _percent)
    rows = []
    for one in found.slices:
        measured = [show(one.loss, one.confidence_intervals["loss"]), show(one.where_chosen)]
        rows.append([one.column, one.rows_are, str(one.rows), *measured])
    return [
        f"Of {found.candidates} slices by one column (categories, quarters, missing values), the "
        f"worst on a random half of the test rows ({found.chosen_rows}), at most one of a column, "
        f"measured on the other half ({found.rows}), which had no part in the choice. The "
        "intervals hold together: each is of "
        f"{100 * found.interval_level:.4g} %. All rows of that half: {show(found.all_rows)}.",
        Table(["column", "rows", "how many", loss, "where chosen (too high as a rule)"], rows),
    ]


def _flag_rates(
    measured: Mapping[
        str, evidence.ClassMeasures | evidence.RegressionMeasures | evidence.SetMeasures
    ],
) -> Table:
    fprs = list(measured["test rows"].flagged)
    rows = [[name, *(_flag_rate(entry, fpr) for fpr in fprs)] for name, entry in measured.items()]
    return Table(["rows flagged (%) at fpr", *fprs], rows)


def _errors(test: evidence.ClassMeasures | evidence.RegressionMeasures) -> list[Block]:
    own = test.confidence_intervals
    header = ["score", "AURC"]
    rows = [[name, _plain(area, own[f"aurc.{name}"])] for name, area in test.aurc.items()]
    found: list[Block] = []
    if isinstance(test, evidence.ClassMeasures) and (detected := test.error_detection):
        share = _share(detected, "base_rate")
        found = [f"{detected.rows} of {test.rows} test rows are misclassified, {share} %."]
        header += ["AUROC", "PR+", "PR-", "FPR at 95 %"]
        for row in rows:
            row += [_share(detected.scores[row[0]], key) for key in MEASURES]
    about = "AURC is the area under risk against coverage, lower is better."
    return [*found, about, Table(header, rows)]


def _attacks(attacks: dict[str, evidence.AttackMeasures]) -> Table:
    rows = [
        [name, _share(entry, "accuracy"), _flag_rate(entry, "0.05"), _share(entry, "hits")]
        for name, entry in attacks.items()
    ]
    return Table(["attack", "accuracy", "flagged at .05", "wrong and not flagged"], rows)


def _flag_rate(record: Any, fpr: str) -> str:
    return _percent(record.flagged.get(fpr), record.confidence_intervals.get(f"flagged.{fpr}"))


def _share(record: Any, name: str) -> str:
    return _percent(getattr(record, name), record.confidence_intervals.get(name))


def _number(record: Any, name: str) -> str:
    return _plain(getattr(record, name), record.confidence_intervals.get(name))


def _percent(share: float | None, ends: Ends | None = None) -> str:
    if share is None:
        return ""
    shown = f"{100 * share:.2f}"
    return shown if ends is None else f"{shown} ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"


def _plain(value: float | None, ends: Ends | None = None) -> str:
    if value is None:
        return "infinite"
    return f"{value:.4g}" if ends is None else f"{value:.4g} ({ends[0]:.3g} to {ends[1]:.3g})"


def _escape_markdown(cell: str) -> str:
    return re.sub(r"([\\`|<>\[\]*])", r"\\\1", " ".join(cell.split()))


def _inline(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
