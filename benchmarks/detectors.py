"""What the flag's detectors and their combination are worth, on surrogates of strange rows that
need no other data.

`python -m benchmarks.detectors NAME [--write]` takes a published model, its validation, reference
and ranking rows, and rows made of half of the validation rows in ways that know nothing of images
or tables. It measures the AUROC against the other half of each detector alone, of the flag without
each, and of other ways to combine and to predictor.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.options import RESULTS, data_root, parser_of
from model_store.artifacts.store import ModelStore
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.inference.model import NEEDED, Model
from model_store.types import DetectorNames
from training.calibration.calibrate import by_detector
from training.data import Rows, split, split_sizes
from training.evaluation.metrics import auroc
from training.scoring import served_scores
from training.versions import fitted_data, open_parent

DRAWS = 50
ROWS = 1000
RULES: dict[str, Callable[[list[np.ndarray]], np.ndarray]] = {
    "harmonic mean (the flag)": lambda surprisals: np.logaddexp.reduce(surprisals, axis=0),
    "sum (Fisher)": lambda surprisals: np.sum(surprisals, axis=0),
    "largest (Bonferroni)": lambda surprisals: np.max(surprisals, axis=0),
}


def surrogates(
    x: np.ndarray, y: np.ndarray, low: float, high: float, seed: int
) -> dict[str, np.ndarray]:
    """Return strange rows made of rows, by what was done to them."""
    generator = np.random.default_rng(seed)
    rows, columns = x.shape
    other = x[[generator.choice(np.flatnonzero(y != label)) for label in y]]
    start = generator.integers(0, columns // 2 + 1, rows)[:, None]
    block = (np.arange(columns) >= start) & (np.arange(columns) < start + columns // 2)
    mean, std = x.mean(axis=0), x.std()
    squares = np.square(x).sum(axis=1)
    neighbours = np.argsort(squares - 2 * x @ x.T, axis=1)[:, :5]
    made = {
        "half spliced": np.where(block, other, x),
        "columns of two": np.where(generator.random(x.shape) < 0.5, other, x),
        "columns shuffled": np.stack([generator.permutation(column) for column in x.T], axis=1),
        "columns permuted": x[:, generator.permutation(columns)],
        "mean of two": (x + other) / 2,
        "mean of 5 neighbours": x[neighbours].mean(axis=1),
        "away from another": x + 0.4 * (x - other),
        "shrunk to 0.6": mean + 0.6 * (x - mean),
        "grown to 1.5": mean + 1.5 * (x - mean),
        "a fifth blanked": np.where(generator.random(x.shape) < 0.2, low, x),
        "noise of 0.03 std": x + generator.normal(0, 0.03 * std, x.shape),
        "noise of 0.1 std": x + generator.normal(0, 0.1 * std, x.shape),
        "noise of 0.3 std": x + generator.normal(0, 0.3 * std, x.shape),
    }
    return {name: np.clip(changed, low, high).astype(np.float32) for name, changed in made.items()}


def main() -> None:
    """Measure, print a table, and with `--write` keep it with a plot in docs/results."""
    parser = parser_of(__doc__, "detectors-NAME.{md,png}")
    parser.add_argument("--data", type=Path, default=data_root())
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    store = ModelStore(options.store)
    parent = open_parent(store, options.name, "name")
    model = Model.load(store.open(options.name, parent.manifest.version, wanted=NEEDED))
    data = fitted_data(parent, options.data)
    splits = split(data, split_sizes(parent.recipe))
    names = parent.manifest.detectors.names

    def scored(rows: Rows, seed: int) -> DetectorScores:
        return by_detector(*served_scores(model.runtime, rows, [DRAWS], seed), names.density)

    half = min(len(splits.validation) // 2, ROWS)
    usual = scored(splits.validation.take(np.arange(half)), 3)
    x, y = (
        splits.validation.x[half : 2 * half].astype(np.float32),
        splits.validation.y[half : 2 * half],
    )
    strange = {
        name: scored(Rows(rows, y), 4)
        for name, rows in surrogates(x, y, data.minimum, data.maximum, options.seed).items()
    }
    reference, ranking = scored(splits.reference, 1), scored(splits.ranking, 2)

    def measured(
        names: DetectorNames, rule: str = "harmonic mean (the flag)", by_label: bool = True
    ) -> list[float]:
        num_labels = parent.manifest.num_labels if by_label else 1

        def labelled(scores: DetectorScores) -> DetectorScores:
            return scores if by_label else replace(scores, labels=np.zeros_like(scores.labels))

        nothing = np.zeros(ranking.labels.shape)
        calibration = Calibration.fit(
            [DRAWS], labelled(reference), labelled(ranking), nothing, names, num_labels
        )

        def statistic(scores: DetectorScores) -> np.ndarray:
            by_name = {name: s[0] for name, s in scores.by_name.items()}
            surprisals = calibration.surprisals_of(by_name, labelled(scores).labels[0], DRAWS)
            return RULES[rule]([surprisals[name] for name in names.combined])

        return [100 * auroc(statistic(rows), statistic(usual)) for rows in strange.values()]

    table = {"the flag": measured(names)}
    table |= {f"{name} alone": measured(replace(names, combined=(name,))) for name in usual.by_name}
    for name in names.combined if len(names.combined) > 1 else ():
        table[f"without {name}"] = measured(
            replace(names, combined=tuple(n for n in names.combined if n != name))
        )
    table |= {rule: measured(names, rule) for rule in list(RULES)[1:]}
    table["densities not by label"] = measured(names, by_label=False)
    table["densities from above alone"] = measured(replace(names, two_sided=()))
    lines = [
        f"# Detectors of `{options.name}` on surrogates",
        "",
        f"`python -m benchmarks.detectors {options.name} --seed {options.seed} --write`: AUROC "
        f"(%) against {half} "
        f"validation rows of rows made of {half} others; {DRAWS} draws, recipe seed "
        f"{parent.recipe.seed}.",
        "",
        f"| | mean | {' | '.join(strange)} |",
        f"|---|---|{'---|' * len(strange)}",
        *(
            f"| {name} | {np.mean(row):.1f} | {' | '.join(f'{value:.1f}' for value in row)} |"
            for name, row in table.items()
        ),
        "",
    ]
    print("\n".join(lines))
    if options.write:
        path = RESULTS / f"detectors-{options.name}.md"
        path.write_text("\n".join([*lines, f"![AUROC](detectors-{options.name}.png)", ""]))
        figure, axis = plt.subplots(figsize=(11, 0.36 * len(table) + 2.6), layout="constrained")
        picture = axis.imshow(
            np.array(list(table.values())), vmin=50, vmax=100, cmap="viridis", aspect="auto"
        )
        axis.set_xticks(range(len(strange)), list(strange), rotation=45, ha="right")
        axis.set_yticks(
            range(len(table)), [f"{name} ({np.mean(row):.1f})" for name, row in table.items()]
        )
        figure.colorbar(picture, label="AUROC (%)")
        figure.savefig(path.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main()
