"""The text of an evaluation report, block by block, and as Markdown."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from training.evaluation.even import SAYS as EVEN_SAYS
from training.evaluation.ids import SAYS as IDS_SAY
from training.evaluation.intervals import Ends
from training.evaluation.records import (
    AttackMeasures,
    ClassMeasures,
    PartMeasures,
    RegressionMeasures,
    Report,
    SetMeasures,
    Slices,
)

MEASURES = {
    "auroc": "AUROC",
    "pr_plus": "PR+ (average precision, the set's rows positive)",
    "pr_minus": "PR- (average precision, test rows positive, the score turned round)",
    "fpr_at_95": "False-positive rate at 95 % detection",
}
FEW_CLASSES = 20  # whose confusion matrix is shown


@dataclass(frozen=True)
class Table:
    """A table, whose cells are plain text."""

    header: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        """Return it as Markdown."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(map(_escaped, cells))} |" for cells in lines)


@dataclass(frozen=True)
class Plot:
    """A plot, by its file."""

    file: str

    @property
    def name(self) -> str:
        """What it is called."""
        return self.file.removesuffix(".png")

    def __str__(self) -> str:
        """Return it as Markdown."""
        return f"![{self.name}]({self.file})"


Block = str | Table | Plot  # a heading (# and more) or a paragraph, a table, a plot


def markdown(parts: list[Block]) -> str:
    """Return a report as Markdown."""
    return "\n\n".join(str(part) for part in parts) + "\n"


def blocks(report: Report, plots: list[str]) -> list[Block]:
    """Return a report's text, tables, and plots by name. Shares are given times 100, intervals in
    brackets."""
    test = report.test
    own = test.confidence_intervals
    parts: list[Block] = [
        f"# Evidence: {report.model} version {report.version}",
        f"Made {report.created} by `python -m training evaluate`, seed {report.seed}: "
        f"`{report.method}`, "
        f"{test.rows} test rows of `{report.data}`, {report.draws} draws, requests of "
        f"{report.rows_per_request} rows. The flag combines "
        f"{', '.join(report.detectors.combined)}.",
        f"In brackets: {100 * report.confidence_level:g} % confidence intervals, over other rows "
        "of the same kind; "
        f"where they are bootstrapped, of {report.resamples} samples of the rows.",
        "## Test rows",
        _table(
            ["", ""],
            [
                [key, _plain(value, own.get(key))]
                for key, value in test.content().items()
                if isinstance(value, float)
            ],
        ),
        _flag_rates(report),
    ]
    if report.convergence is not None:
        fit = report.convergence
        bound = f"{fit['negative_elbo']:.4g} ± {fit['negative_elbo_error']:.2g}"
        covers = (
            f"; k-hat {fit['pareto_k']:.2g} (below .7 it covers the exact one)"
            if "pareto_k" in fit
            else ""
        )
        parts.insert(
            3, f"Its fit: {fit['says']}; negative ELBO {bound} nats a training row{covers}."
        )
    if isinstance(test, RegressionMeasures):
        parts += ["## Intervals", *_intervals(test)]
    else:
        parts += ["## Classes", *_classes(test)]
        if test.class_probabilities:
            parts += ["### Probabilities by class", *_class_probabilities(test)]
    if report.parts:
        parts += ["## Parts", *_parts(report.parts)]
    if report.worst_slices is not None:
        is_squared = isinstance(test, RegressionMeasures)
        parts += ["## Where it is worst", *_worst_slices(report.worst_slices, is_squared)]
    parts += ["## Detection", "Of each set's rows against the test rows."]
    if "even" in report.outliers:
        parts += [EVEN_SAYS]
    if "uniform" in report.outliers and "gaussian" not in report.outliers:
        parts += [IDS_SAY]
    parts += [f"Base rate: the set's rows are {_base_rates(report.outliers)} % of all."]
    for key, title in MEASURES.items():
        parts += [f"### {title}", _detection(report.outliers, key)]
    parts += ["## Errors", *_errors(test)]
    if report.attacks:
        attacked = {name: attack.measures for name, attack in report.attacks.items()}
        parts += ["## Attacks", _attacks(attacked)]
        parts += ["### AUROC of attacked against test rows", _detection(attacked, "auroc")]
    return parts + [Plot(name) for name in plots]


def _detection(sets: Mapping[str, SetMeasures], measure: str) -> Table:
    names = list(next(iter(sets.values())).scores)
    rows = [
        [name, *(_share_of(entry.scores[score], measure) for score in names)]
        for name, entry in sets.items()
    ]
    return _table(["set", *names], rows)


def _intervals(test: RegressionMeasures) -> list[Block]:
    """Return tables of intervals, quantiles and spread."""
    held = [
        [
            _percent(e.nominal),
            _share_of(e, "covered"),
            _plain(e.width, e.confidence_intervals.get("width")),
        ]
        for e in test.intervals
    ]
    own = test.confidence_intervals
    pinball = [[q, _plain(loss, own[f"pinball.{q}"])] for q, loss in test.pinball.items()]
    spread = []
    for b in test.by_spread:
        plain = (_plain(getattr(b, key), b.confidence_intervals[key]) for key in ("std", "rmse"))
        spread.append([str(b.rows), *plain, _share_of(b, "covered")])
    return [
        _table(["nominal coverage", "covered", "mean width (target's units)"], held),
        "Rows by predicted standard deviation:",
        _table(
            ["rows", "predicted standard deviation", "RMSE", "covered by 95 % intervals"], spread
        ),
        "The share of its predictive distribution below each target (PIT) is at most "
        f"{test.pit.distance:.3f} from "
        f"uniform; by chance it would be as far with probability {test.pit.p_value:.2g}.",
        _table(["quantile", "pinball loss (target's units)"], pinball),
    ]


def _classes(test: ClassMeasures) -> list[Block]:
    """Return recall and precision of each class, and of few classes the confusion matrix."""
    few = len(test.by_class) <= FEW_CLASSES
    header = [
        "class",
        "rows",
        "recall",
        "precision",
        *((one.name for one in test.by_class) if few else ()),
    ]
    rows = [
        [one.name, str(one.rows), _share_of(one, "recall"), _share_of(one, "precision")]
        + ([str(count) for count in one.labelled] if few else [])
        for one in test.by_class
    ]
    said: list[Block] = (
        ["Last columns: rows of the class that were given each label."] if few else []
    )
    return [*said, _table(header, rows)]


def _parts(measured: list[PartMeasures]) -> list[Block]:
    said = "Rows of each class, given each label, and of each group: one that is served worse than the others."
    rows = []
    for part in measured:
        rmse = part.confidence_intervals.get("rmse")
        error = _share_of(part, "accuracy") if part.rmse is None else _plain(part.rmse, rmse)
        shares = [_share_of(part, "covered"), _share_of(part, "flagged")]
        rows.append([f"{part.by} {part.name}", str(part.rows), error, *shares])
    error = "accuracy (%)" if measured[0].rmse is None else "RMSE"
    return [said, _table(["part", "rows", error, "covered at .95 (%)", "flagged at .05 (%)"], rows)]


def _class_probabilities(test: ClassMeasures) -> list[Block]:
    rows = [
        [
            one.name,
            str(one.rows),
            _share_of(one, "calibration_error"),
            _share_of(one, "average_precision"),
        ]
        for one in test.class_probabilities
    ]
    return [
        "Each class against all others, by its probability.",
        _table(["class", "rows", "calibration error", "average precision"], rows),
    ]


def _worst_slices(found: Slices, is_squared: bool) -> list[Block]:
    """Return the slices' table, and how they were found."""
    loss = "RMSE" if is_squared else "wrong labels"
    shown = _plain if is_squared else _percent
    rows = [
        [
            one.column,
            one.rows_are,
            str(one.rows),
            shown(one.loss, one.confidence_intervals["loss"]),
            shown(one.where_chosen),
        ]
        for one in found.slices
    ]
    return [
        f"Of {found.candidates} slices by one column (categories, quarters, missing values), the "
        "worst on a random "
        f"half of the test rows ({found.chosen_rows}), at most one of a column, measured on the "
        "other half "
        f"({found.rows}), which had no part in the choice. The intervals hold together: each is of "
        f"{100 * found.interval_level:.4g} %. All rows of that half: {shown(found.all_rows)}.",
        _table(["column", "rows", "how many", loss, "where chosen (too high as a rule)"], rows),
    ]


def _flag_rates(report: Report) -> Table:
    attacked = {name: attack.measures for name, attack in report.attacks.items()}
    measured = {"test rows": report.test, **report.outliers, **attacked}
    fprs = list(report.test.flagged)
    rows = [
        [
            name,
            *(
                _percent(entry.flagged[fpr], entry.confidence_intervals[f"flagged.{fpr}"])
                for fpr in fprs
            ),
        ]
        for name, entry in measured.items()
    ]
    return _table(["rows flagged (%) at fpr", *fprs], rows)


def _errors(test: ClassMeasures | RegressionMeasures) -> list[Block]:
    detected = test.error_detection if isinstance(test, ClassMeasures) else None
    header = ["score", "AURC"] + (["AUROC", "PR+", "PR-", "FPR at 95 %"] if detected else [])
    own = test.confidence_intervals
    rows = [
        [name, _plain(area, own[f"aurc.{name}"])]
        + ([_share_of(detected.scores[name], key) for key in MEASURES] if detected else [])
        for name, area in test.aurc.items()
    ]
    found: list[Block] = []
    if detected:
        share = _share_of(detected, "base_rate")
        found = [f"{detected.rows} of {test.rows} test rows are misclassified, {share} %."]
    return [
        *found,
        "AURC is the area under risk against coverage, lower is better.",
        _table(header, rows),
    ]


def _attacks(attacks: dict[str, AttackMeasures]) -> Table:
    rows = [
        [
            name,
            _share_of(entry, "accuracy"),
            _percent(entry.flagged.get("0.05"), entry.confidence_intervals.get("flagged.0.05")),
            _share_of(entry, "hits"),
        ]
        for name, entry in attacks.items()
    ]
    return _table(["attack", "accuracy", "flagged at .05", "wrong and not flagged"], rows)


def _base_rates(sets: dict[str, SetMeasures]) -> str:
    rates = sorted({_percent(entry.base_rate) for entry in sets.values()})
    return ", ".join(rates)


def _table(header: list[str], rows: list[list[str]]) -> Table:
    return Table(header, rows)


def _escaped(cell: str) -> str:
    """Return a cell that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`|<>\[\]*])", r"\\\1", " ".join(cell.split()))


def _share_of(record: Any, name: str) -> str:
    """Return a record's share, and its interval."""
    return _percent(getattr(record, name), record.confidence_intervals.get(name))


def _percent(share: float | None, ends: Ends | None = None) -> str:
    if share is None:
        return ""
    return f"{100 * share:.2f}" + (
        "" if ends is None else f" ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"
    )


def _plain(value: float | None, ends: Ends | None = None) -> str:
    if value is None:
        return "infinite"
    return f"{value:.4g}" + ("" if ends is None else f" ({ends[0]:.3g} to {ends[1]:.3g})")
