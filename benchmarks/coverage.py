"""Do sets, intervals and abstention keep what they state? Counts over random splits of held-out
rows.

`python -m benchmarks.coverage NAME [--splits 200] [--write]` scores every row that the model was
not fitted on as a lone request is served, deals the rows at random to calibration and test,
calibrates with the code that publication uses, and counts how many test rows are covered. With n
calibration rows and k = ceil(coverage (n + 1)) that count is BetaBinomial(m, k, n + 1 - k) of m
test rows, if no two nonconformities are equal. Rows whose label is right all have nonconformity 0:
of a coverage below the accuracy a set is the label alone, and covers more.

Of a classification two other sets stand next to those that are served: least ambiguous ones (all
    classes of
probability 1 - q and more, and the label) and randomised adaptive ones (with the label). Its rows
are also split into three equal parts, reference, ranking and test, to count how many are answered
at each risk and how often the test rows' error is above it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from benchmarks.common import add_splits, open_model, parser_of, report, unseen_rows
from benchmarks.flag_rate import fit_p_value
from model_store.artifacts.manifest import Manifest
from model_store.conformal.abstention import Answers
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.conformal.sets import (
    class_nonconformity,
    coverage_rank,
    mass_above,
    quantile,
)
from model_store.inference.model import Model
from model_store.scores.classification import Scores
from model_store.scores.tasks import AnyScores
from training.calibration.calibrate import by_detector, nonconformity
from training.scoring import served_scores

COVERAGES = (0.9, 0.95, 0.99)
RISKS = (0.005, 0.01, 0.02, 0.05)
FPR = 0.05
HARD = 0.1  # share of the rows, those of the largest entropy


@dataclass(frozen=True)
class HeldOut:
    """Rows that the model was not fitted on, scored with one number of draws."""

    scores: AnyScores
    detected: DetectorScores
    y: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.y)


def held_out(model: Model, draws: int) -> HeldOut:
    rows = unseen_rows(model)
    scores, density = served_scores(model.runtime, rows, [draws], seed=1)
    return HeldOut(
        scores[0], by_detector(scores, density, model.manifest.detectors.density), rows.y
    )


def halves(rows: int, splits: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(rows) for _ in range(splits)]
    return [(order[: rows // 2], order[rows // 2 :]) for order in orders]


def served_sets(
    probs: np.ndarray, y: np.ndarray, calibration: np.ndarray, coverage: float
) -> np.ndarray:
    nonconformity = np.sort(class_nonconformity(probs[calibration], y[calibration]))
    return mass_above(probs) <= quantile(nonconformity, coverage)


def least_ambiguous_sets(
    probs: np.ndarray, y: np.ndarray, calibration: np.ndarray, coverage: float
) -> np.ndarray:
    """Return sets of all classes of probability 1 - q and more, and the label (Sadinle, Lei and
    Wasserman 2019)."""
    return _with_labels(1.0 - probs, probs, y, calibration, coverage)


def randomised_sets(
    probs: np.ndarray, y: np.ndarray, calibration: np.ndarray, coverage: float
) -> np.ndarray:
    """Return randomised adaptive sets, and the label (Romano, Sesia and Candes 2020)."""
    u = np.random.default_rng(0).uniform(size=(len(probs), 1))
    return _with_labels(mass_above(probs) + u * probs, probs, y, calibration, coverage)


def _with_labels(
    scores: np.ndarray, probs: np.ndarray, y: np.ndarray, calibration: np.ndarray, coverage: float
) -> np.ndarray:
    inside = scores <= quantile(np.sort(scores[calibration, y[calibration]]), coverage)
    inside[np.arange(len(probs)), probs.argmax(axis=1)] = True
    return inside


SETS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]] = {
    "served": served_sets,
    "least ambiguous": least_ambiguous_sets,
    "randomised": randomised_sets,
}


def compare_sets(held: HeldOut, coverage: float, splits: int, seed: int) -> list[str]:
    assert isinstance(held.scores, Scores)
    probs, y = held.scores.probabilities, held.y
    is_hard = held.scores.entropy >= np.quantile(held.scores.entropy, 1.0 - HARD)
    lines = []
    for name, sets in SETS.items():
        covered, sizes, rows = [], [], []
        for calibration, test in halves(held.rows, splits, seed):
            inside = sets(probs, y, calibration, coverage)[test]
            covered.append(inside[np.arange(len(test)), y[test]])
            sizes.append(inside.sum(axis=1))
            rows.append(test)
        is_covered, size, row = (np.concatenate(values) for values in (covered, sizes, rows))
        by_class = [is_covered[y[row] == c].mean() for c in range(probs.shape[1])]
        by_size = [
            is_covered[mask].mean() if mask.any() else math.nan
            for mask in (size == 1, size == 2, size > 2)
        ]
        cells = [
            size.mean(),
            is_covered.mean(),
            min(by_class),
            is_covered[is_hard[row]].mean(),
            *by_size,
        ]
        lines.append(
            f"| {coverage} | {name} | "
            f"{' | '.join('' if math.isnan(c) else f'{c:.3f}' for c in cells)} |"
        )
    return lines


def count_covered(held: HeldOut, coverage: float, splits: int, seed: int) -> np.ndarray:
    counts = []
    for calibration, test in halves(held.rows, splits, seed):
        if isinstance(held.scores, Scores):
            inside = served_sets(held.scores.probabilities, held.y, calibration, coverage)[test]
            counts.append(inside[np.arange(len(test)), held.y[test]].sum())
        else:
            far = np.sort(nonconformity(held.scores, held.y)[calibration])
            half = quantile(far, coverage) * held.scores.std[test]
            counts.append(np.sum(np.abs(held.y[test] - held.scores.mean[test]) <= half))
    return np.array(counts)


def answer_line(held: HeldOut, risk: float, splits: int, seed: int, manifest: Manifest) -> str:
    assert isinstance(held.scores, Scores)
    generator = np.random.default_rng(seed)
    third = held.rows // 3
    wrong = held.scores.label != held.y
    shares, errors, above = [], [], 0
    for _ in range(splits):
        reference, ranking, test = np.split(generator.permutation(held.rows), [third, 2 * third])
        uncertainty = held.scores.variation_ratio
        calibration = Calibration.fit(
            [1],
            held.detected.take(reference),
            held.detected.take(ranking),
            np.zeros((1, third)),  # sets are not looked at here
            manifest.detectors.names,
            manifest.num_labels,
            Answers.of(
                uncertainty[None, reference], uncertainty[None, ranking], wrong[None, ranking]
            ),
        )
        tested = held.detected.take(test)
        p_values = calibration.p_values(
            {name: s[0] for name, s in tested.by_name.items()}, tested.labels[0], 1
        )
        is_answered = (
            uncertainty[test] <= calibration.rank_tables(1).largest_uncertainty(FPR, risk)
        ) & (p_values.p_value > FPR)
        shares.append(is_answered.mean())
        if is_answered.any():
            errors.append(wrong[test][is_answered].mean())
            above += errors[-1] > risk
    error = f"{np.mean(errors):.4f}" if errors else ""
    return f"| {risk} | {np.mean(shares):.3f} | {np.mean(np.array(shares) == 0):.2f} | {error} | {above / splits:.3f} |"


def coverage_table(
    held: HeldOut, draws: int, axes: np.ndarray, splits: int, seed: int
) -> list[str]:
    n, m = held.rows // 2, held.rows - held.rows // 2
    right = (
        np.mean(nonconformity(held.scores, held.y) == 0) if isinstance(held.scores, Scores) else 0.0
    )
    lines = []
    for axis, coverage in zip(axes, COVERAGES, strict=True):
        k = coverage_rank(n, coverage)
        if k > n:  # too few rows for any bounds
            continue
        found = count_covered(held, coverage, splits, seed)
        law = stats.betabinom(m, k, n + 1 - k)
        # Near the accuracy it differs from split to split whether the set is the label alone.
        p = f"{fit_p_value(found, law):.3f}" if right < coverage - 0.005 else "label alone"
        lines.append(
            f"| {draws} | {coverage} | {n}, {m} | {k / (n + 1):.4f} | {found.mean() / m:.4f} "
            f"| {law.std():.2f} | {found.std(ddof=1):.2f} | {p} |"
        )
        bins = np.arange(found.min(), found.max() + 2) - 0.5
        axis.hist(found, bins=bins, density=True, alpha=0.5, label="splits")
        grid = np.arange(int(law.ppf(1e-4)), m + 1)
        axis.plot(grid, law.pmf(grid), "k-", label="beta-binomial")
        axis.set(title=f"{draws} draws, coverage {coverage}", xlabel=f"rows covered of {m}")
    return lines


def class_tables(
    held: HeldOut, draws: int, splits: int, seed: int, manifest: Manifest
) -> list[str]:
    """Return what is measured of a classification alone: kinds of sets, and abstention."""
    assert isinstance(held.scores, Scores)
    accuracy = np.mean(held.scores.label == held.y)
    lines = [
        "",
        f"Where a coverage is below the accuracy, here {accuracy:.4f}, the set is the label alone "
        "and covers more than is stated.",
        "",
        f"## Kinds of sets, {draws} draws",
        "",
        "| coverage | sets | mean size | covered | worst class | hardest tenth | of size 1 | of "
        "size 2 | larger |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for coverage in (*COVERAGES, 0.995):
        lines += compare_sets(held, coverage, splits, seed)
    lines += [
        "",
        "Served: adaptive, not randomised. The hardest tenth are the rows of the largest entropy.",
        "",
        f"## Abstention, {draws} draws, fpr {FPR}",
        "",
        f"A third of the rows each, {held.rows // 3}, is reference, ranking and test.",
        "",
        "| risk | rows answered | splits that answer none | error of answers | splits whose test "
        "error is above |",
        "|---|---|---|---|---|",
    ]
    lines += [answer_line(held, risk, splits, seed, manifest) for risk in RISKS]
    return [
        *lines,
        "",
        "A test error above the risk may be chance of the test rows: the guarantee is of the true "
        "risk.",
    ]


def main() -> None:
    parser = parser_of(__doc__, "coverage-NAME.{md,png}")
    add_splits(parser)
    parser.add_argument(
        "--draws", type=int, nargs="*", help="by default 20 and the model's own number"
    )
    options = parser.parse_args()
    model = open_model(options)
    lines = [
        f"# Coverage on held-out rows: {options.name} version {model.manifest.version}",
        "",
        f"`python -m benchmarks.coverage {options.name} --splits {options.splits} --seed "
        f"{options.seed}`; every row",
        "is scored with draws of its own. Chi-square p is of covered counts against the "
        "beta-binomial, in ten bins.",
        "",
        "| draws | coverage | calibration, test rows | expected | found | std of count expected | "
        "found | p |",
        "|---|---|---|---|---|---|---|---|",
    ]
    all_draws = options.draws or [20, model.manifest.noise.default_draws]
    shape = (len(all_draws), len(COVERAGES))
    figure, axes = plt.subplots(
        *shape, figsize=(12, 2.8 * shape[0]), layout="constrained", squeeze=False
    )
    for row, draws in enumerate(all_draws):
        held = held_out(model, draws)
        lines += coverage_table(held, draws, axes[row], options.splits, options.seed)
    axes[0][0].legend()
    if model.manifest.task == "classification":
        lines += class_tables(held, all_draws[-1], options.splits, options.seed, model.manifest)
    text = "\n".join(lines) + "\n"
    report(options, f"coverage-{options.name}", text, lambda: figure)


if __name__ == "__main__":
    main()
