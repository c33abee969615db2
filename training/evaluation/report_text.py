"""An evaluation report as Markdown."""

from collections.abc import Mapping

from training.evaluation.records import AttackMeasures, ClassMeasures, RegressionMeasures, Report, SetMeasures

MEASURES = {
    "auroc": "AUROC",
    "pr_plus": "PR+ (average precision, the set's rows positive)",
    "pr_minus": "PR- (average precision, test rows positive, the score turned round)",
    "fpr_at_95": "False-positive rate at 95 % detection",
}


def markdown(report: Report, plots: list[str]) -> str:
    """Return a report's tables, and its plots by name. Shares are given times 100."""
    test = report.test
    parts = [
        f"# Evidence: {report.model} version {report.version}",
        f"Made {report.created} by `python -m training evaluate`, seed {report.seed}: `{report.method}`, "
        f"{test.rows} test rows of `{report.data}`, {report.draws} draws, requests of "
        f"{report.rows_per_request} rows. The flag combines {', '.join(report.detectors.combined)}.",
        "## Test rows",
        _table(
            ["", ""], [[key, f"{value:.4g}"] for key, value in test.content().items() if isinstance(value, float)]
        ),
        _flag_rates(report),
    ]
    if report.convergence is not None:
        fit = report.convergence
        bound = f"{fit['negative_elbo']:.4g} ± {fit['negative_elbo_error']:.2g}"
        covers = f"; k-hat {fit['pareto_k']:.2g} (below .7 it covers the exact one)" if "pareto_k" in fit else ""
        parts.insert(2, f"Its fit: {fit['says']}; negative ELBO {bound} nats a training row{covers}.")
    if isinstance(test, RegressionMeasures):
        rows = [[_percent(e.nominal), _percent(e.covered), _plain(e.width)] for e in test.intervals]
        parts += ["## Intervals", _table(["nominal coverage", "covered", "mean width (target's units)"], rows)]
    parts += ["## Detection", "Of each set's rows against the test rows."]
    parts += [f"Base rate: the set's rows are {_base_rates(report.outliers)} % of all."]
    for key, title in MEASURES.items():
        parts += [f"### {title}", _detection(report.outliers, key)]
    parts += ["## Errors", _errors(test)]
    if report.attacks:
        attacked = {name: attack.measures for name, attack in report.attacks.items()}
        parts += ["## Attacks", _attacks(attacked)]
        parts += ["### AUROC of attacked against test rows", _detection(attacked, "auroc")]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in plots]
    return "\n\n".join(parts) + "\n"


def _detection(sets: Mapping[str, SetMeasures], measure: str) -> str:
    names = list(next(iter(sets.values())).scores)
    rows = [
        [name, *(_percent(getattr(entry.scores[score], measure)) for score in names)] for name, entry in sets.items()
    ]
    return _table(["set", *names], rows)


def _flag_rates(report: Report) -> str:
    attacked = {name: attack.measures for name, attack in report.attacks.items()}
    flagged = {name: entry.flagged for name, entry in {**report.outliers, **attacked}.items()}
    fprs = list(report.test.flagged)
    rows = [
        [name, *(_percent(rates[fpr]) for fpr in fprs)]
        for name, rates in {"test rows": report.test.flagged, **flagged}.items()
    ]
    return _table(["rows flagged (%) at `fpr`", *fprs], rows)


def _errors(test: ClassMeasures | RegressionMeasures) -> str:
    detected = test.error_detection if isinstance(test, ClassMeasures) else None
    header = ["score", "AURC"] + (["AUROC", "PR+", "PR-", "FPR at 95 %"] if detected else [])
    rows = [
        [name, f"{area:.4g}"]
        + ([_percent(getattr(detected.scores[name], key)) for key in MEASURES] if detected else [])
        for name, area in test.aurc.items()
    ]
    found = ""
    if detected:
        share = _percent(detected.base_rate)
        found = f"{detected.rows} of {test.rows} test rows are misclassified, {share} %.\n\n"
    return f"{found}AURC is the area under risk against coverage, lower is better.\n\n{_table(header, rows)}"


def _attacks(attacks: dict[str, AttackMeasures]) -> str:
    rows = [
        [name, _percent(entry.accuracy), _percent(entry.flagged.get("0.05")), _percent(entry.hits)]
        for name, entry in attacks.items()
    ]
    return _table(["attack", "accuracy", "flagged at .05", "wrong and not flagged"], rows)


def _base_rates(sets: dict[str, SetMeasures]) -> str:
    rates = sorted({_percent(entry.base_rate) for entry in sets.values()})
    return ", ".join(rates)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def _plain(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4g}"
