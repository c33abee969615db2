"""Does sharing draws between the rows of a request change its false discovery rate?

`python -m benchmarks.false_discovery NAME [--write]` scores every row that the model was not fitted
on under each of many draw sets. Batches of rows like the calibration data are then tested together:
with one draw set for all, as a request is served, and with one for each row, as calibration rows
are scored. Where all rows are ordinary, the false discovery rate is the probability that any is
flagged.
"""

import numpy as np

from benchmarks.options import RESULTS, opened, parser_of, unseen_rows
from model_store.artifacts.manifest import Manifest
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.conformal.false_discovery import benjamini_hochberg
from model_store.inference.model import Model

DRAW_SETS = 100
FDR = 0.1
REFERENCE, RANKING = 160, 399


def scores_by_draw_set(model: Model, x: np.ndarray, num_draws: int) -> DetectorScores:
    """Return each detector's scores, and the labels, of each row under each draw set."""
    predictions = [
        model.predict(x, model.runtime.draw(seed, 0, num_draws)) for seed in range(DRAW_SETS)
    ]
    by_name = {
        name: np.stack([p.detected[name] for p in predictions]) for name in predictions[0].detected
    }
    return DetectorScores(by_name, np.stack([p.calibrated_scores.labels for p in predictions]))


def any_flagged(
    scores: DetectorScores,
    manifest: Manifest,
    batch: int,
    shared: bool,
    generator: np.random.Generator,
) -> bool:
    """Split rows into a calibration and a batch, and return whether any of the batch is flagged."""
    rows = generator.permutation(scores.labels.shape[1])

    def taken(rows: np.ndarray, shared: bool = False) -> DetectorScores:
        sets = generator.integers(DRAW_SETS, size=1 if shared else len(rows))
        return DetectorScores(
            {n: s[sets, rows][None] for n, s in scores.by_name.items()},
            scores.labels[sets, rows][None],
        )

    reference, ranking, tested = np.split(rows, [REFERENCE, REFERENCE + RANKING])
    calibration = Calibration.fit(
        [1],
        taken(reference),
        taken(ranking),
        np.ones((1, RANKING)),  # prediction sets are not looked at here
        manifest.detectors.names,
        manifest.num_labels,
    )
    test = taken(tested[:batch], shared)
    p_values = calibration.p_values(
        {name: s[0] for name, s in test.by_name.items()}, test.labels[0], 1
    )
    return bool(benjamini_hochberg(p_values.p_value, FDR).any())


def main() -> None:
    """Measure, print a table, and with `--write` keep it in docs/results."""
    parser = parser_of(__doc__, "false-discovery-NAME.md")
    parser.add_argument("--batches", type=int, default=8000)
    options = parser.parse_args()
    model = opened(options)
    x = unseen_rows(model).x.astype(np.float32)
    generator = np.random.default_rng(0)
    lines = [
        f"# False discovery rate of requests of ordinary rows: {options.name} version "
        f"{model.manifest.version}",
        "",
        f"`python -m benchmarks.false_discovery {options.name} --batches {options.batches}`: "
        f"{len(x)} rows that the "
        f"model was not fitted on, split anew for each batch into {REFERENCE} reference, "
        f"{RANKING} ranking and the "
        f"batch's rows; `fdr` {FDR}. The standard error is "
        f"{np.sqrt(FDR * (1 - FDR) / options.batches):.4f}.",
        "",
        "| draws | rows of a request | draws shared, as served | draws of their own |",
        "|---|---|---|---|",
    ]
    for draws in (1, 5, model.manifest.noise.default_draws):
        scores = scores_by_draw_set(model, x, draws)
        for batch in (10, 40):
            rates = [
                np.mean(
                    [
                        any_flagged(scores, model.manifest, batch, shared, generator)
                        for _ in range(options.batches)
                    ]
                )
                for shared in (True, False)
            ]
            lines.append(f"| {draws} | {batch} | {rates[0]:.4f} | {rates[1]:.4f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        (RESULTS / f"false-discovery-{options.name}.md").write_text(text)


if __name__ == "__main__":
    main()
