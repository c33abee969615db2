"""What the flag finds where few rows calibrate it: shares of strange rows flagged, over random
calibration splits.

`python -m benchmarks.few_rows NAME... [--splits 100] [--other SRC] [--write]` scores each model's
rows that it was not fitted on and strange ones: uniform noise in the data's range, Gaussian noise
of the columns' means and deviations, columns shuffled among rows, and numbers shuffled within a
row; with `--other` the test rows of another source of images. It deals the ordinary rows at random
to reference and ranking splits as large as the version's own, and counts what is flagged at fpr
.05, of strange rows and of the ordinary ones that are left. Beside the flag as it is stand the flag
with the exponential tail of before and, of images, without roughness.
"""

from dataclasses import replace

import numpy as np

from benchmarks.options import RESULTS, add_splits, data_root, opened, parser_of, splits_of
from model_store.conformal.calibration import DEFAULT_FPR, Calibration, DetectorScores
from model_store.inference.model import Model
from model_store.types import DetectorNames
from training.calibration.calibrate import by_detector
from training.data import Rows, load
from training.recipe import IMAGE_DENSITIES
from training.scoring import rows_per_draw_set, served_scores
from training.versions import recipe_of

ROWS = 300  # of each kind of strange rows


def strange(
    model: Model, ordinary: np.ndarray, train: np.ndarray, other: str | None, seed: int
) -> dict[str, np.ndarray]:
    """Return strange rows by their kind."""
    rng = np.random.default_rng(seed)
    width, spec = ordinary.shape[1], model.manifest.input
    some = ordinary[rng.integers(len(ordinary), size=ROWS)]
    rows = {
        "uniform": rng.uniform(spec.minimum, spec.maximum, (ROWS, width)),
        "Gaussian": rng.normal(train.mean(axis=0), train.std(axis=0), (ROWS, width)),
        "columns shuffled": np.stack([rng.choice(column, ROWS) for column in ordinary.T], axis=1),
        "row shuffled": rng.permuted(some, axis=1),
    }
    if other is not None:
        recipe = recipe_of(model.manifest, "name")
        section = recipe.data.model_copy(
            update={"source": other, "image_size": list(spec.shape[-2:])}
        )
        rows["other"] = load(recipe.model_copy(update={"data": section}), data_root()).test.x[:ROWS]
    return rows


def flagged(
    ordinary: DetectorScores,
    kinds: dict[str, DetectorScores],
    names: DetectorNames,
    model: Model,
    splits: int,
    seed: int,
) -> dict[str, float]:
    """Return the mean share flagged of each kind of rows."""
    detectors, rng = model.manifest.detectors, np.random.default_rng(seed)
    used = detectors.reference_rows + detectors.ranking_rows
    shares: dict[str, list[float]] = {kind: [] for kind in ("ordinary", *kinds)}
    for _ in range(splits):
        order = rng.permutation(ordinary.labels.shape[1])
        reference, ranking, rest = np.split(order, [detectors.reference_rows, used])
        calibration = Calibration.fit(
            [1],
            ordinary.take(reference),
            ordinary.take(ranking),
            np.ones((1, len(ranking))),  # prediction sets are not looked at here
            names,
            model.manifest.num_labels,
        )
        for kind, scores in {"ordinary": ordinary.take(rest), **kinds}.items():
            by_name = {name: s[0] for name, s in scores.by_name.items()}
            shares[kind].append(
                float(
                    np.mean(
                        calibration.p_values(by_name, scores.labels[0], 1).p_value <= DEFAULT_FPR
                    )
                )
            )
    return {kind: float(np.mean(of_kind)) for kind, of_kind in shares.items()}


def main() -> None:
    """Measure, print a table, and with `--write` keep it in docs/results."""
    parser = parser_of(__doc__, "few-rows.md", name=None)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--other", metavar="SRC", help="of images: test rows of another source")
    add_splits(parser, 100)
    options = parser.parse_args()
    kinds = ["ordinary", "uniform", "Gaussian", "columns shuffled", "row shuffled", "other"]
    lines = [
        f"| model | training, reference, ranking rows | flag | {' | '.join(kinds)} |",
        "|---" * 9 + "|",
    ]
    for name in options.names:
        options.name = name
        model = opened(options)
        splits, manifest = splits_of(model), model.manifest
        parts = (splits.validation, splits.reference, splits.ranking, splits.test)
        ordinary = np.concatenate([rows.x for rows in parts]).astype(np.float32)
        other = options.other if manifest.input.image is not None else None
        rows = {
            "ordinary": ordinary,
            **strange(model, ordinary, splits.train.x, other, options.seed),
        }
        draws, scored = manifest.noise.default_draws, {}
        for kind, x in rows.items():
            share = rows_per_draw_set(model.runtime, len(x), draws)
            batch = Rows(x.astype(np.float32), np.zeros(len(x), dtype=np.int64))
            scored[kind] = by_detector(
                *served_scores(model.runtime, batch, [draws], options.seed, share),
                manifest.detectors.density,
            )
        names = manifest.detectors.names
        flags = {
            "as it is": replace(names, tail="predictive"),
            "exponential tail": replace(names, tail="exponential"),
        }
        plain = tuple(name for name in names.combined if name not in IMAGE_DENSITIES)
        if plain != names.combined:
            flags["without roughness"] = replace(flags["as it is"], combined=plain)
            flags["exponential tail, without roughness"] = replace(
                flags["exponential tail"], combined=plain
            )
        sizes = f"{len(splits.train)}, {manifest.detectors.reference_rows}, {manifest.detectors.ranking_rows}"
        usual = scored.pop("ordinary")
        for flag, used in flags.items():
            found = flagged(usual, scored, used, model, options.splits, options.seed)
            shares = [f"{100 * found[kind]:.1f}" if kind in found else "" for kind in kinds]
            lines.append(f"| {name} | {sizes} | {flag} | {' | '.join(shares)} |")
    print("\n".join(lines))
    if options.write:
        beside = "" if options.other is None else f" --other {options.other}"
        head = [
            "# The flag where few rows calibrate it",
            "",
            f"`python -m benchmarks.few_rows {' '.join(options.names)}{beside} --splits "
            f"{options.splits} "
            f"--seed {options.seed} --write`: % of rows flagged at fpr {DEFAULT_FPR:g}, mean over "
            "random calibration "
            "splits.",
            "",
        ]
        (RESULTS / "few-rows.md").write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
