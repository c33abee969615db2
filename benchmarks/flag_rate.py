"""Does the flag fire at the stated rate? Counts over random splits of held-out rows against the
beta-binomial.

`python -m benchmarks.flag_rate NAME [--splits 200] [--write]` scores every row that the model was
not fitted on as a lone request is served, deals the rows at random to reference, ranking and test,
calibrates on the first two with the code that publication uses, and counts how many test rows the
flag fires on. For exchangeable rows that count is beta-binomial: with n ranking rows and k =
floor(fpr (n + 1)), it is BetaBinomial(m, k, n + 1 - k) of m test rows.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from benchmarks.common import add_splits, open_model, parser_of, report, unseen_rows
from model_store.artifacts.manifest import Manifest
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.inference.model import Model
from training.calibration.calibrate import by_detector
from training.scoring import served_scores

RATES = (0.01, 0.05, 0.2)


REQUEST_ROWS = (1, 16)


def held_out_scores(model: Model, draws: int) -> list[DetectorScores]:
    """Return each detector's score of all rows that the model was not fitted on, in requests of
    `REQUEST_ROWS`."""
    rows = unseen_rows(model)
    rows = rows.take(np.random.default_rng(0).permutation(len(rows)))  # who shares draws is chance
    names = model.manifest.detectors.density
    return [
        by_detector(*served_scores(model.runtime, rows, [draws], share, share), names)
        for share in REQUEST_ROWS
    ]


def counts_over_splits(
    scores: DetectorScores, served: DetectorScores, manifest: Manifest, splits: int, seed: int
) -> tuple[dict[float, np.ndarray], int, int]:
    """Return how many test rows are flagged in each split at each rate, and the ranking and test
    rows of a split.

    Calibration rows have the scores of lone requests, test rows those of `served`.
    """
    rows = scores.labels.shape[1]
    n, m = rows // 3, rows - 2 * (rows // 3)
    generator = np.random.default_rng(seed)
    counts: dict[float, list[int]] = {rate: [] for rate in RATES}
    for _ in range(splits):
        order = generator.permutation(rows)
        reference, ranking, test = np.split(order, [n, 2 * n])
        calibration = Calibration.fit(
            [1],
            scores.take(reference),
            scores.take(ranking),
            np.ones((1, n)),  # prediction sets are not looked at here
            manifest.detectors.names,
            manifest.num_labels,
        )
        tested = served.take(test)
        p_value = calibration.p_values(
            {name: s[0] for name, s in tested.by_name.items()}, tested.labels[0], 1
        ).p_value
        for rate in RATES:
            counts[rate].append(int(np.sum(p_value <= rate)))
    return {rate: np.array(c) for rate, c in counts.items()}, n, m


def fit_p_value(counts: np.ndarray, law: stats.rv_discrete) -> float:
    """Return the p-value of a chi-square test of counts against a discrete law, in ten bins of like
    probability."""
    edges = np.unique(law.ppf(np.linspace(0, 1, 11)[1:-1]))
    edges = edges[edges < law.support()[1]]  # beyond the largest count there is nothing
    expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]])) * len(counts)
    observed = np.bincount(np.searchsorted(edges, counts, side="left"), minlength=len(expected))
    return float(stats.chisquare(observed, expected).pvalue)


def main() -> None:
    parser = parser_of(__doc__, "flag-rate-NAME.{md,png}")
    add_splits(parser)
    parser.add_argument(
        "--draws", type=int, nargs="*", help="by default the model's own number and 20"
    )
    options = parser.parse_args()
    model = open_model(options)
    lines = [
        f"# The flag's rate on held-out rows: {options.name} version {model.manifest.version}",
        "",
        f"`python -m benchmarks.flag_rate {options.name} --splits {options.splits} --seed "
        f"{options.seed}`; detectors {', '.join(model.manifest.detectors.combined)}.",
        "Calibration rows have draws of their own, as in publication; test rows share theirs with "
        "a request's.",
        "",
        "| draws | rows a request | fpr | ranking, test rows | rate expected | found | std of "
        "count expected | found | chi-square p |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    all_draws = options.draws or [20, model.manifest.noise.default_draws]
    cases = [(draws, share) for draws in all_draws for share in REQUEST_ROWS]
    figure, axes = plt.subplots(
        len(cases), len(RATES), figsize=(12, 2.8 * len(cases)), layout="constrained", squeeze=False
    )
    scored = {draws: held_out_scores(model, draws) for draws in all_draws}
    for row, (draws, share) in enumerate(cases):
        served = scored[draws][REQUEST_ROWS.index(share)]
        counts, n, m = counts_over_splits(
            scored[draws][0], served, model.manifest, options.splits, options.seed
        )
        for axis, (rate, found) in zip(axes[row], counts.items(), strict=True):
            k = int(np.floor(rate * (n + 1)))
            law = stats.betabinom(m, k, n + 1 - k)
            lines.append(
                f"| {draws} | {share} | {rate} | {n}, {m} | {k / (n + 1):.4f} | "
                f"{found.mean() / m:.4f} "
                f"| {law.std():.2f} | {found.std(ddof=1):.2f} | {fit_p_value(found, law):.3f} |"
            )
            axis.hist(
                found,
                bins=np.arange(found.max() + 2) - 0.5,
                density=True,
                alpha=0.5,
                label="splits",
            )
            grid = np.arange(found.max() + 1)
            axis.plot(grid, law.pmf(grid), "k-", label="beta-binomial")
            axis.set(
                title=f"{draws} draws, {share} rows a request, fpr {rate}",
                xlabel=f"rows flagged of {m}",
            )
    axes[0][0].legend()
    text = "\n".join(lines) + "\n"
    report(options, f"flag-rate-{options.name}", text, lambda: figure)


if __name__ == "__main__":
    main()
