"""How many draws rows take that stop when settled, and what that changes.

`python -m benchmarks.settling NAME [--write]` looks at a published version's test rows, in requests
of 16 rows that share their draws: draws taken, and labels and flags (at fpr .05) against those of
all the calibrated draws, by tolerance. Rows whose p-value under 1,000 draws lies within `NEAR` of
the rate are counted apart. Only rows whose p-value is within twice that take 1,000 draws: no other
row's comes near. They are predicted by the detectors of the default number of draws, the largest
calibrated. Over random splits of the test rows into reference, ranking and new rows the number of
flagged rows under the rule is compared with its law, as in `benchmarks.flag_rate`.
"""

import time
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float32, Float64, Int64
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.common import add_splits, open_model, parser_of, report, splits_of
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.conformal.detectors import flag_statistic
from model_store.conformal.stopping import StoppingRule
from model_store.inference.model import Model, detector_scores
from model_store.inference.prediction import Prediction
from model_store.inference.runtime import DrawSet
from training.calibration.calibrate import by_detector
from training.data import Rows
from training.scoring import scores_and_spreads, served_scores

TOLERANCES = (0.005, 0.01, 0.02, 0.05, 0.1)
SHOWN = 0.02  # whose draws are plotted, whose rate is tested and whose time is taken
FPR, NEAR = 0.05, 0.02
MANY_DRAWS = 1000
SHARE = 16
ROUNDS = 30


@dataclass(frozen=True)
class Settled:
    draws: Int64[np.ndarray, "N"]
    p_value: Float64[np.ndarray, "N"]
    label: Int64[np.ndarray, "N"]


def prediction_with_stopping(
    model: Model, rows: DetectorScores, rule: StoppingRule | None
) -> Settled:
    """Return what is said of rows whose scores are known at all calibrated numbers of draws."""
    calibration = model.calibration
    counts = calibration.draw_counts.tolist()
    assert rows.spreads is not None
    draws = np.full(rows.labels.shape[1], counts[-1])
    if rule is not None:
        for stage, spread in reversed(
            list(zip(calibration.stages(counts[-1]), rows.spreads, strict=True))
        ):
            j = counts.index(stage)
            scores = {name: by_count[j] for name, by_count in rows.by_name.items()}
            draws[calibration.stops(scores, rows.labels[j], spread, stage, rule)] = stage
    p_value = np.empty(len(draws))
    rank_tables = calibration.rank_tables(counts[-1], rule)
    for count in np.unique(draws).tolist():
        here, j = draws == count, counts.index(count)
        scores = {name: by_count[j][here] for name, by_count in rows.by_name.items()}
        surprisals = calibration.surprisals_of(scores, rows.labels[j][here], count)
        p_value[here] = rank_tables.p_values(
            flag_statistic(surprisals, calibration.combined), {}
        ).p_value
    return Settled(
        draws, p_value, rows.labels[np.searchsorted(counts, draws), np.arange(len(draws))]
    )


def under_many_draws(model: Model, test: Rows, seed: int) -> Float64[np.ndarray, "N"]:
    """Return p-values of rows under `MANY_DRAWS` draws."""
    (scores,), density = served_scores(model.runtime, test, [MANY_DRAWS], seed, SHARE)
    calibration = model.calibration
    count = int(calibration.draw_counts[-1])
    detected = detector_scores(scores, density, model.manifest.detectors.density)
    return calibration.p_values(detected, scores.labels, count).p_value


def count_flagged(
    model: Model, rows: DetectorScores, rule: StoppingRule, splits: int, seed: int
) -> tuple[np.ndarray, stats.rv_discrete, int]:
    """Return how many new rows are flagged in each split, the law of that number, and how many new
    rows there are."""
    manifest, counts = model.manifest, model.calibration.draw_counts.tolist()
    third = rows.labels.shape[1] // 3
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(splits):
        order = generator.permutation(3 * third)
        reference, ranking, new = (rows.take(part) for part in np.split(order, 3))
        nothing = np.ones((len(counts), third))
        statistics = []
        for tested in (
            ranking,
            new,
        ):  # each row stops where the rule, which is the reference split's, lets it
            names = manifest.detectors.names
            fitted = Calibration.fit(counts, reference, tested, nothing, names, manifest.num_labels)
            statistics.append(fitted.rank_tables(counts[-1], rule))
        p_value = statistics[0].p_values(statistics[1].statistic, {}).p_value
        found.append(int(np.sum(p_value <= rule.fpr)))
    k = int(np.floor(rule.fpr * (third + 1)))
    return np.array(found), stats.betabinom(third, k, third + 1 - k), third


def settle(
    model: Model, x: Float32[np.ndarray, "N I"], draws: DrawSet, rule: StoppingRule
) -> Prediction:
    """Predict rows, each of as many draws as a rule lets it take."""
    known, density = model.runtime.before_draws(x)
    rows = model.runtime.shared_draws(known, draws)
    return model.prediction_with_stopping(rows, density, draws.num_draws, rule)


def time_ratios(model: Model, x: np.ndarray, rule: StoppingRule) -> np.ndarray:
    """Return how long requests of these rows take with all draws, over how long they take settled,
    round by round."""
    count = int(model.calibration.draw_counts[-1])
    ratios = []
    for i in range(ROUNDS):
        draws = model.runtime.draw_set(i, count)

        start = time.perf_counter()
        settle(model, x, draws, rule)
        middle = time.perf_counter()
        model.prediction(*model.runtime.run_set(x, draws))
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return np.array(ratios[1:])  # the first warms up


def main() -> None:
    """Measure, print, and with `--write` keep it in docs/results."""
    parser = parser_of(__doc__, "settling-NAME.{md,png}")
    parser.add_argument("--rows", type=int, default=10_000, help="how many of the first test rows")
    add_splits(parser, 100)
    parser.add_argument(
        "--split-rows",
        type=int,
        default=3000,
        help="that are split into the three parts of a split",
    )
    options = parser.parse_args()
    model = open_model(options)
    test = splits_of(model).test
    test = test.take(np.arange(min(options.rows, len(test))))
    counts = model.calibration.draw_counts.tolist()
    scores, density, spreads = scores_and_spreads(model.runtime, test, counts, options.seed, SHARE)
    rows = by_detector(scores, density, model.manifest.detectors.density, spreads)

    fixed = prediction_with_stopping(model, rows, None)
    looked_at = np.flatnonzero(np.abs(fixed.p_value - FPR) <= 2 * NEAR)
    many_p = under_many_draws(model, test.take(looked_at), options.seed + 1)
    near = np.zeros(len(test), dtype=bool)
    near[looked_at] = np.abs(many_p - FPR) <= NEAR
    many_flag = fixed.p_value <= FPR
    many_flag[looked_at] = many_p <= FPR
    lines = [
        f"# Draws that rows need: {options.name} version {model.manifest.version}",
        "",
        f"`python -m benchmarks.settling {options.name} --rows {options.rows} --splits "
        f"{options.splits} --split-rows {options.split_rows} --seed {options.seed}`: {len(test)} "
        f"test rows, fpr {FPR}, at most {counts[-1]} draws.",
        f"{near.sum()} rows are near: their p-value under {MANY_DRAWS} draws is within {NEAR} of "
        "the rate. They are counted in the columns that say so, and in no other of flags.",
        "",
        "| `settle` | mean draws | median | 90 % | rows that take all | labels as under "
        f"{counts[-1]} draws | flags as under {counts[-1]} | the same of near rows | flags as "
        f"under {MANY_DRAWS} | flag's rate |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def same(ours: np.ndarray, theirs: np.ndarray, where: np.ndarray) -> str:
        return f"{np.mean(ours[where] == theirs[where]):.4f} ({np.sum(ours[where] != theirs[where])} differ)"

    everywhere = np.ones(len(test), dtype=bool)
    for tolerance in (None, *TOLERANCES):
        settled = (
            fixed
            if tolerance is None
            else prediction_with_stopping(model, rows, StoppingRule(FPR, tolerance))
        )
        flag, draws = settled.p_value <= FPR, settled.draws
        lines.append(
            f"| {tolerance or 'off'} | {draws.mean():.1f} | {np.median(draws):.0f} | "
            f"{np.quantile(draws, 0.9):.0f} | {np.mean(draws == counts[-1]):.3f} | "
            f"{same(settled.label, fixed.label, everywhere)} | "
            f"{same(flag, fixed.p_value <= FPR, ~near)} | {same(flag, fixed.p_value <= FPR, near)} "
            f"| {same(flag, many_flag, ~near)} | {flag.mean():.4f} |"
        )
    rule = StoppingRule(FPR, SHOWN)
    few = rows.take(
        np.random.default_rng(options.seed).permutation(len(test))[: options.split_rows]
    )
    found, law, new = count_flagged(model, few, rule, options.splits, options.seed)
    lines += [
        "",
        f"Over {options.splits} random splits of {len(few.labels[0])} test rows into thirds, "
        f"`settle` {SHOWN}: of {new} new rows {found.mean():.2f} are flagged, {law.mean():.2f} "
        f"expected; standard deviation {found.std(ddof=1):.2f}, {law.std():.2f} expected of "
        "independent splits.",
        "",
        f"Time with all draws over time with `settle` {SHOWN}, in process, draws made before, "
        f"{ROUNDS - 1} "
        "alternating rounds of each of five requests (median, and the first and ninth tenth):",
        "",
        "| rows a request | ratio |",
        "|---|---|",
    ]
    for size in (1, SHARE, 128):
        parts = [
            test.x[n : n + size].astype(np.float32)
            for n in range(0, min(5 * size, len(test) - size + 1), size)
        ]
        ratios = np.concatenate([time_ratios(model, part, rule) for part in parts])
        low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
        lines.append(f"| {size} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    text = "\n".join(lines) + "\n"

    def plot() -> Figure:
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
        for tolerance in TOLERANCES:
            draws = np.sort(
                prediction_with_stopping(model, rows, StoppingRule(FPR, tolerance)).draws
            )
            left.step(
                draws,
                np.arange(1, len(draws) + 1) / len(draws),
                where="post",
                label=f"settle {tolerance}",
            )
        left.set(xlabel="draws", ylabel="share of rows that take at most these", ylim=(0, 1.02))
        left.legend(loc="lower right")
        right.hist(
            found,
            bins=np.arange(found.min(), found.max() + 2) - 0.5,
            density=True,
            alpha=0.5,
            label="splits",
        )
        grid = np.arange(found.min(), found.max() + 1)
        right.plot(grid, law.pmf(grid), "k-", label="beta-binomial")
        right.set(xlabel=f"rows flagged of {new}, settle {SHOWN}")
        right.legend()
        return figure

    report(options, f"settling-{options.name}", text, plot)


if __name__ == "__main__":
    main()
