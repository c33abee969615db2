"""Comparison of two versions on the same rows, by paired tests and intervals.

Shares of rows use the exact, binomial test of McNemar ("Note on the sampling error of the
difference between correlated proportions or percentages", 1947) and the interval of Bonett and
Price ("Adjusted Wald confidence interval for a difference of binomial proportions based on paired
data", 2012), which has a positive width even if the versions agree on every row. All other figures
use the bootstrap, with the same samples of rows for both versions.

Calibration errors are not compared, because chance raises them more for uncertain predictions.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from model_store.errors import InvalidInput
from model_store.inference.model import Model
from training import log
from training.data.rows import Rows
from training.evaluation.evaluate import EvaluationOptions, check_options, load_data, test_rows
from training.evaluation.metrics import (
    LEVEL,
    RESAMPLES,
    BinnedGap,
    Ends,
    Figure,
    Record,
    Resamples,
    RiskCoverage,
    Share,
    percentiles,
)
from training.evaluation.quality import ServedPredictor, losses, main_figures
from training.folders import data_root
from training.recipe import BETTER
from training.versions import Parent, Provenance

ROUNDING = 1e-12
Z = float(stats.norm.ppf((1.0 + LEVEL) / 2.0))
TESTS = {"mcnemar": "McNemar, exact", "bootstrap": "bootstrap"}


@dataclass(frozen=True)
class Difference:
    first: float
    second: float
    interval: Ends
    p_value: float  # two-sided
    test: str  # mcnemar or bootstrap


def mcnemar(gained: int, lost: int) -> float:
    rows = gained + lost
    return float(stats.binomtest(lost, rows).pvalue) if rows else 1.0


def difference_interval(gained: int, lost: int, rows: int) -> Ends:
    """Compute the interval of Bonett and Price for the difference of two shares of rows."""
    gain, loss, total = gained + 1.0, lost + 1.0, rows + 2.0
    change = (gain - loss) / total
    half = Z * math.sqrt(((gain + loss) / total - change**2) / total)
    return max(-1.0, change - half), min(1.0, change + half)


def difference(first: Figure, second: Figure, resamples: Resamples) -> Difference:
    if isinstance(first, Share) and isinstance(second, Share):
        before, after = first.row_values, second.row_values
        gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
        ends = difference_interval(gained, lost, first.rows)
        return Difference(first.value, second.value, ends, mcnemar(gained, lost), "mcnemar")
    sampled = resamples.values(second) - resamples.values(first)
    p_value = min(1.0, 2.0 * min(_tail(sampled <= 0.0), _tail(sampled >= 0.0)))
    return Difference(first.value, second.value, percentiles(sampled), p_value, "bootstrap")


def measure_loss(
    metric: str, figure: Figure, baseline: Figure, resamples: Resamples
) -> tuple[float, Ends]:
    """Compute by how much a figure is worse than a baseline, with an interval."""
    better = BETTER[metric]
    if isinstance(better, float):
        new, old = resamples.values(figure), resamples.values(baseline)
        loss = abs(figure.value - better) - abs(baseline.value - better)
        return float(loss), percentiles(np.abs(new - better) - np.abs(old - better))
    if better == "less":
        change = difference(baseline, figure, resamples)
    else:
        change = difference(figure, baseline, resamples)
    return change.second - change.first, change.interval


def _tail(is_extreme: np.ndarray) -> float:
    """Compute a bootstrap p-value, counting the observed data as one sample."""
    return float((1 + np.count_nonzero(is_extreme)) / (len(is_extreme) + 1))


def list_worse_metrics(
    tolerances: dict[str, float],
    figures: dict[str, Figure],
    baselines: dict[str, Figure],
    label: str,
    seed: int,
    kind: str = "rows",
) -> list[str]:
    """List the metrics that are significantly worse, and log the others.

    A metric is significantly worse if the interval of its loss lies above the tolerated loss.
    """
    lines = []
    for metric, allowed in tolerances.items():
        figure, baseline = figures.get(metric), baselines.get(metric)
        if figure is None or baseline is None:
            lines.append(f"  {metric}: it was not measured for both versions")
            continue
        loss, interval = measure_loss(metric, figure, baseline, Resamples.draw(figure.rows, seed))
        line = (
            f"  {metric}: {figure.value:.6g} against {baseline.value:.6g} of {label} on the same "
            f"{figure.rows} {kind}, {describe_loss(loss, interval)}, allowed {allowed:g}"
        )
        if interval[0] > allowed + ROUNDING:
            lines.append(line)
        else:
            log.info("no clear loss in %s", line.strip())
    return lines


def describe_loss(loss: float, interval: Ends) -> str:
    """Describe a loss and its interval. A negative loss reads as an improvement."""
    low, high = sorted(-end for end in interval) if loss < 0 else interval
    ends = f"{100 * LEVEL:g} % interval {low:.4g} to {high:.4g}"
    return f"{'better' if loss < 0 else 'worse'} by {abs(loss):.6g} ({ends})"


def compare_figures(
    first: dict[str, Figure], second: dict[str, Figure], seed: int
) -> dict[str, dict[str, Any]]:
    """Compare the figures that both versions have for the same number of rows.

    Calibration errors are left out.
    """
    rows = first["log_likelihood"].rows
    resamples = Resamples.draw(rows, seed)
    return {
        name: asdict(difference(figure, second[name], resamples))
        for name, figure in first.items()
        if name in second
        and figure.rows == second[name].rows == rows
        and not isinstance(figure, BinnedGap)
    }


def compare_versions(
    versions: list[Parent], models: list[Model], options: EvaluationOptions
) -> Record:
    first, second = versions
    if first.manifest.task != second.manifest.task or first.classes != second.classes:
        expected = f"the task and classes of {first.label}"
        raise InvalidInput("the second version", expected, f"those of {second.label}")
    source = options.source or first.recipe.data.source
    data, fit_sources = zip(
        *(load_data(v, data_root(), options.source if v is first else source) for v in versions),
        strict=True,
    )
    is_fitted = any(fit_sources)
    tests = [test_rows(data[0], is_fitted, options, source), test_rows(data[1], is_fitted, options)]
    if not np.array_equal(tests[0].y, tests[1].y):
        expected = f"a version for the same rows as {first.label}"
        raise InvalidInput("the second version", expected, second.label)
    digests = [Provenance.of(version.manifest).data_digest for version in versions]
    if digests[0] != digests[1]:
        message = "%s was fitted on other data, which may include some of these test rows"
        log.info(message, second.label)
    predictors = []
    for version, model in zip(versions, models, strict=True):
        check_options(version, options)
        draws = options.draws or version.manifest.noise.default_draws
        predictors.append(ServedPredictor(model, draws, options.seed))
    first_figures, second_figures = (
        _figures(predictor, test, dataset.group_names)
        for predictor, test, dataset in zip(predictors, tests, data, strict=True)
    )
    return {
        "first": first.label,
        "second": second.label,
        "data": source,
        "rows": len(tests[0]),
        "seed": options.seed,
        "differences": compare_figures(first_figures, second_figures, options.seed),
        "confidence_level": LEVEL,
        "resamples": RESAMPLES,
    }


def comparison_lines(comparison: Record) -> list[str]:
    first, second = comparison["first"], comparison["second"]
    table = [("figure", first, second, "difference", "p", "test")]
    for name, result in comparison["differences"].items():
        low, high = result["interval"]
        value = f"{result['second'] - result['first']:+.4g} ({low:+.3g} to {high:+.3g})"
        figures = f"{result['first']:.4g}", f"{result['second']:.4g}"
        table.append((name, *figures, value, f"{result['p_value']:.2g}", TESTS[result["test"]]))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        f"{second} against {first}: {comparison['rows']} test rows of {comparison['data']}, "
        f"seed {comparison['seed']}, {100 * LEVEL:g} % intervals",
        *("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table),
    ]


def _figures(
    predictor: ServedPredictor, test: Rows, group_names: tuple[str, ...]
) -> dict[str, Figure]:
    predicted = predictor("test", test, group_names)
    prediction, scores = predicted.prediction, predicted.prediction.scores
    figures = main_figures(predicted, test.y)
    for fpr in predicted.flagged:
        figures[f"flagged.{fpr}"] = Share(prediction.judged_p_values.p_value <= float(fpr))
    score = predicted.scores[scores.overall]
    figures[f"aurc.{scores.overall}"] = RiskCoverage(score, losses(scores, test.y))
    return figures
