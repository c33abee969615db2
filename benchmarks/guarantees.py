"""Compare flag rates and coverage with the beta-binomial law.

    python -m benchmarks.guarantees NAME [--store DIR] [--splits 200] [--draws 20 100] [--write]

The benchmark scores all rows that were not used for the fit. Each split assigns them at random to
calibration and test rows, calibrates like a publication, and counts flagged and covered test rows.
With n calibration rows, the count among m test rows is BetaBinomial(m, k, n + 1 - k), where k is
floor(fpr (n + 1)) or ceil(coverage (n + 1)). Correct labels share the nonconformity 0, so sets
cover more than promised if the coverage is below the accuracy; p is then omitted.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Bool
from scipy import stats

from benchmarks.common import model_parser, open_model, report, unseen_rows
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.conformal.detectors import flag_statistic
from model_store.conformal.rank_tables import coverage_rank, mass_above, quantile
from model_store.inference.model import Model
from model_store.scores.classification import Scores
from model_store.scores.tasks import AnyScores
from training.calibration.calibrate import by_detector, nonconformity
from training.data.rows import Rows
from training.scoring import served_scores

RATES = (0.01, 0.05, 0.2)
COVERAGES = (0.9, 0.95, 0.99)
BINS = 10  # in the chi-square test
TIES_MARGIN = 0.005  # of the share of tied rows


def splits_into(rows: int, parts: int, splits: int, seed: int) -> Iterator[list[np.ndarray]]:
    generator = np.random.default_rng(seed)
    for _ in range(splits):
        yield np.array_split(generator.permutation(rows), parts)


def _select(detected: DetectorScores, rows: np.ndarray) -> DetectorScores:
    by_name = {name: scores[:, rows] for name, scores in detected.by_name.items()}
    return DetectorScores(by_name, detected.labels[:, rows])


def flagged_rows(
    model: Model, detected: DetectorScores, split: list[np.ndarray], rate: float
) -> Bool[np.ndarray, "N"]:
    """Calibrate on the first two parts, and return which rows of the last part are flagged."""
    reference, ranking, test = split
    names = model.manifest.detectors
    sets = np.ones((1, len(ranking)))  # Flags do not depend on nonconformities.
    calibration = Calibration.fit(
        [1],
        _select(detected, reference),
        _select(detected, ranking),
        sets,
        names,
        model.manifest.num_labels,
    )
    tested = _select(detected, test)
    scores = {name: values[0] for name, values in tested.by_name.items()}
    surprisals = calibration.compute_surprisals(scores, tested.labels[0], 1)
    statistic = flag_statistic(surprisals, model.manifest.detectors.combined)
    return np.asarray(calibration.rank_tables[1].p_values(statistic, surprisals).p_value <= rate)


def covered_rows(
    scores: AnyScores, rows: Rows, split: list[np.ndarray], coverage: float
) -> Bool[np.ndarray, "N"]:
    """Return which rows of the last part are covered by their set or interval."""
    calibration, test = split
    limit = quantile(np.sort(nonconformity(scores, rows.y)[calibration]), coverage)
    if isinstance(scores, Scores):
        inside = mass_above(scores.probabilities[test]) <= limit
        return inside[np.arange(len(test)), rows.y[test]]
    return np.asarray(np.abs(rows.y[test] - scores.mean[test]) <= limit * scores.std[test])


def fit_p_value(counts: np.ndarray, law: stats.rv_discrete) -> float:
    """Compute the p-value of a chi-square test of counts."""
    edges = np.unique(law.ppf(np.linspace(0, 1, BINS + 1)[1:-1]))
    edges = edges[edges < law.support()[1]]
    expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]])) * len(counts)
    observed = np.bincount(np.searchsorted(edges, counts, side="left"), minlength=len(expected))
    return float(stats.chisquare(observed, expected).pvalue)


def table_line(
    name: str, draws: int, n: int, m: int, k: int, counts: Iterable[int], has_law: bool = True
) -> str:
    observed, law = np.array([*counts]), stats.betabinom(m, k, n + 1 - k)
    p = f"{fit_p_value(observed, law):.3f}" if has_law else ""
    return (
        f"| {name} | {draws} | {n}, {m} | {k / (n + 1):.4f} | {observed.mean() / m:.4f} "
        f"| {law.std():.2f} | {observed.std(ddof=1):.2f} | {p} |"
    )


def lines_for(model: Model, draws: int, splits: int, seed: int) -> Iterator[str]:
    rows = unseen_rows(model)
    scores, density = served_scores(model.runtime, rows, [draws], seed=1)
    detected = by_detector(scores, density, model.manifest.detectors.density)
    dealt = [*splits_into(len(rows), 3, splits, seed)]
    n, m = (len(dealt[0][i]) for i in (1, 2))
    for rate in RATES:
        k = int(rate * (n + 1))
        if k:  # With fewer rows, no row is flagged.
            counts = (int(flagged_rows(model, detected, split, rate).sum()) for split in dealt)
            yield table_line(f"fpr {rate}", draws, n, m, k, counts)
    dealt = [*splits_into(len(rows), 2, splits, seed)]
    n, m = (len(part) for part in dealt[0])
    ties = float(np.mean(nonconformity(scores[0], rows.y) == 0.0))
    for coverage in COVERAGES:
        k = coverage_rank(n, coverage)
        if k <= n:  # With fewer rows, sets contain every class.
            counts = (int(covered_rows(scores[0], rows, split, coverage).sum()) for split in dealt)
            has_law = ties < coverage - TIES_MARGIN
            yield table_line(f"coverage {coverage}", draws, n, m, k, counts, has_law)


def main() -> None:
    parser = model_parser(__doc__, "guarantees-NAME.md")
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, nargs="*", help="by default 20 and the model's number")
    options = parser.parse_args()
    model = open_model(options)
    lines = [
        f"# Rates of flags and sets on held-out rows: {options.name} "
        f"version {model.manifest.version}",
        "",
        f"`python -m benchmarks.guarantees {options.name} --splits {options.splits} "
        f"--seed {options.seed}`; detectors {', '.join(model.manifest.detectors.combined)}.",
        "",
        "| promise | draws | calibration, test rows | expected rate | found | expected std of "
        "counts | found | chi-square p |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for draws in options.draws or [20, model.manifest.noise.default_draws]:
        lines += lines_for(model, draws, options.splits, options.seed)
    report(options, f"guarantees-{options.name}", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
