"""What few draws make of BALD, and what its correction mends.

`python -m benchmarks.bald NAME [--write]` scores a published version's test rows, and as many of
uniform noise, under `--seeds` seeds with few draws each, and once with `TRUE_DRAWS`, whose
corrected BALD is the truth.

* value: the sum over rows and seeds, over that of the truth;
* order: Spearman's correlation with the truth, and the share of the truth's first tenth of rows in the first tenth;
* rows that stop early, with `settle`: the sum over that of the truth, and by how much the correction moves a row.
"""

import numpy as np
from jaxtyping import Float32, Float64
from scipy import stats

from benchmarks.options import RESULTS, opened, parser_of, splits_of
from model_store.conformal.stopping import StoppingRule
from model_store.inference.draws import SharedDraws
from model_store.inference.model import Model
from model_store.scores.classification import Scores
from training.scoring import draw_seed

DRAWS = (2, 3, 5, 10, 20, 100)
TRUE_DRAWS = 4000
TRUE_CHUNK = 100
TOLERANCES = (0.02, 0.1)
FPR = 0.05


def scored(model: Model, x: Float32[np.ndarray, "N I"], seed: int, num_draws: int) -> Scores:
    """Return scores under the draws of a seed."""
    chunks = []
    for first in range(0, num_draws, TRUE_CHUNK):
        theta = model.runtime.draw(seed, first, min(TRUE_CHUNK, num_draws - first))
        outputs, _ = model.runtime.run(x, theta[:, None])
        chunks.append(model.predictive.sums(outputs, first))
    sums = chunks[0]
    for chunk in chunks[1:]:
        sums = sums.merge(chunk)
    scores = model.predictive.scores(sums)
    assert isinstance(scores, Scores)
    return scores


def stopped(
    model: Model, x: Float32[np.ndarray, "N I"], seed: int, tolerance: float
) -> tuple[Scores, Float64[np.ndarray, "N"]]:
    """Return the scores of rows that may stop early, and which of them stop."""
    most = model.manifest.noise.default_draws
    known, density = model.runtime.before_draws(x)
    rows = SharedDraws(model.runtime, known, model.runtime.draw_set(seed, most))
    scores = model.prediction_with_stopping(
        rows, density, most, StoppingRule(FPR, tolerance)
    ).scores
    assert isinstance(scores, Scores)
    return scores, scores.num_draws < most


def main() -> None:
    """Measure, print tables, and with `--write` keep them in docs/results."""
    parser = parser_of(__doc__, "bald-NAME.md")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = opened(options)
    test = splits_of(model).test.x.astype(np.float32)
    extent = model.manifest.input.minimum, model.manifest.input.maximum
    noise = np.random.default_rng(options.seed).uniform(*extent, test.shape).astype(np.float32)
    sets = {"test rows": test, "test rows and noise": np.concatenate([test, noise])}
    lines = [
        f"# BALD of few draws: {options.name} version {model.manifest.version}",
        "",
        f"`python -m benchmarks.bald {options.name} --seeds {options.seeds} --seed "
        f"{options.seed}`:",
        f"{len(test)} test rows, and as many of uniform noise. The truth is corrected BALD of "
        f"{TRUE_DRAWS:,} draws.",
        "",
        "| rows | draws | value: `bald` | `bald_corrected` | order (Spearman): `bald` | "
        "`bald_corrected` "
        "| first tenth found: `bald` | `bald_corrected` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    settled = [
        "| rows | tolerance | stop | value: `bald` | `bald_corrected` | moved, in tolerances: "
        "median | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, x in sets.items():
        truth = scored(model, x, draw_seed(options.seed, options.seeds), TRUE_DRAWS).bald_corrected
        assert truth is not None
        tenth = len(x) // 10
        first = set(np.argsort(-truth)[:tenth].tolist())
        for num_draws in DRAWS:
            found = np.zeros((options.seeds, 3, 2))
            for number in range(options.seeds):
                scores = scored(model, x, draw_seed(options.seed, number), num_draws)
                for k, bald in enumerate((scores.bald, scores.bald_corrected)):
                    share = len(first & set(np.argsort(-bald)[:tenth].tolist())) / tenth
                    found[number, :, k] = (
                        bald.sum() / truth.sum(),
                        stats.spearmanr(bald, truth).statistic,
                        share,
                    )
            cells = [f"{value:.3f}" for value in found.mean(axis=0).ravel()]
            lines.append(f"| {name} | {num_draws} | {' | '.join(cells)} |")
        for tolerance in TOLERANCES:
            sums, moved, stops = np.zeros(3), [], 0
            for number in range(options.seeds):
                scores, early = stopped(model, x, draw_seed(options.seed, number), tolerance)
                corrected = scores.bald_corrected
                sums += [bald[early].sum() for bald in (scores.bald, corrected, truth)]
                moved.append((corrected - scores.bald)[early] / tolerance)
                stops += int(early.sum())
            every = np.concatenate(moved)
            share = stops / (options.seeds * len(x))
            settled.append(
                f"| {name} | {tolerance:g} | {share:.2f} | {sums[0] / sums[2]:.3f} | "
                f"{sums[1] / sums[2]:.3f} "
                f"| {np.median(every):.3f} | {every.max():.2f} |"
            )
    text = "\n".join([*lines, "", "## Rows that stop early", "", *settled]) + "\n"
    print(text)
    if options.write:
        (RESULTS / f"bald-{options.name}.md").write_text(text)


if __name__ == "__main__":
    main()
