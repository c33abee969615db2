"""Does sharing draws between the rows of a request change its false discovery rate?

`python -m benchmarks.false_discovery NAME [--write]` scores every row that the model was not fitted on under each of
many draw sets. Batches of rows like the calibration data are then tested together: with one draw set for all, as a
request is served, and with one for each row, as calibration rows are scored. Where all rows are ordinary, the false
discovery rate is the probability that any is flagged.
"""

import argparse
import os
from pathlib import Path

import numpy as np

from benchmarks.model import ROOT
from model_store.calibration import Calibration
from model_store.false_discovery import benjamini_hochberg
from model_store.model import NEEDED, Model
from model_store.store import ModelStore
from training import data as sources
from training import recipe as recipes

DRAW_SETS = 100
FDR = 0.1
REFERENCE, RANKING = 160, 399


def scores_by_draw_set(model: Model, x: np.ndarray, num_draws: int) -> dict[str, np.ndarray]:
    """Return each detector's score of each row under each draw set, (draw sets, rows)."""
    sets = [model.predict(x, model.runtime.draw(seed, 0, num_draws)).detected for seed in range(DRAW_SETS)]
    return {name: np.stack([detected[name] for detected in sets]) for name in sets[0]}


def any_flagged(
    scores: dict[str, np.ndarray], combined: tuple[str, ...], batch: int, shared: bool, generator: np.random.Generator
) -> bool:
    """Deal rows to a calibration and a batch, and return whether any of the batch is flagged."""
    rows = generator.permutation(next(iter(scores.values())).shape[1])
    reference, ranking, tested = np.split(rows, [REFERENCE, REFERENCE + RANKING])
    tested = tested[:batch]

    def taken(rows: np.ndarray, draw_sets: np.ndarray | int) -> dict[str, np.ndarray]:
        return {name: values[draw_sets, rows] for name, values in scores.items()}

    def own(rows: np.ndarray) -> np.ndarray:
        return generator.integers(DRAW_SETS, size=len(rows))

    calibration = Calibration.fit(
        [1],
        {name: values[None] for name, values in taken(reference, own(reference)).items()},
        {name: values[None] for name, values in taken(ranking, own(ranking)).items()},
        np.ones((1, RANKING)),  # prediction sets are not looked at here
        combined,
    )
    draw_sets = int(generator.integers(DRAW_SETS)) if shared else own(tested)
    return bool(benjamini_hochberg(calibration.judge(taken(tested, draw_sets), 1).p_value, FDR).any())


def main() -> None:
    """Measure, print a table, and with `--write` keep it in docs/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--store", type=Path, default=Path(os.environ.get("DUBITO_STORE", "models")))
    parser.add_argument("--batches", type=int, default=8000)
    parser.add_argument("--write", action="store_true", help="write docs/results/false-discovery-NAME.md")
    options = parser.parse_args()
    store = ModelStore(options.store)
    model = Model.load(store.open(options.name, store.resolve(options.name), wanted=NEEDED))
    recipe = recipes.Recipe.model_validate(model.manifest.training["recipe"])
    root = Path(os.environ.get("DUBITO_DATA", "data"))
    splits = sources.split(sources.load(recipe, root), sources.split_sizes(recipe))
    x = np.concatenate([splits.reference.x, splits.ranking.x, splits.test.x]).astype(np.float32)
    generator = np.random.default_rng(0)
    lines = [
        f"# False discovery rate of requests of ordinary rows: {options.name} version {model.manifest.version}",
        "",
        f"`python -m benchmarks.false_discovery {options.name} --batches {options.batches}`: {len(x)} rows that the "
        f"model was not fitted on, dealt anew for each batch to {REFERENCE} reference, {RANKING} ranking and the "
        f"batch's rows; `fdr` {FDR}. The standard error is {np.sqrt(FDR * (1 - FDR) / options.batches):.4f}.",
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
                        any_flagged(scores, model.manifest.detectors.combined, batch, shared, generator)
                        for _ in range(options.batches)
                    ]
                )
                for shared in (True, False)
            ]
            lines.append(f"| {draws} | {batch} | {rates[0]:.4f} | {rates[1]:.4f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        (ROOT / "docs" / "results" / f"false-discovery-{options.name}.md").write_text(text)


if __name__ == "__main__":
    main()
