"""Compare default fits on public tables with scikit-learn models.

Run `python -m benchmarks.panel UCI RESULTS [--sets NAME ...] [--seeds N ...] [--write]`, where UCI
is a folder of UCI sets (see `panel_sets`). Each set is saved as a CSV file and fitted like
`dubito fit --data csv:FILE --target COLUMN`. The published model is evaluated on the test rows.
RESULTS has one file per set and seed; existing files are not computed again.

The other models are logistic or ridge regression, a random forest and histogram gradient boosting.
They are fitted on all rows except test rows. Probabilities are calibrated by five-fold isotonic
regression. Regressions are Gaussian, with the standard deviation of five-fold residuals. `networks`
is the published model without its linear model.

`--development` evaluates on a fifth of the training rows instead. The defaults were selected this
way on the sets that are not in `ASIDE` or `LATER`.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import bare_parser, report
from benchmarks.panel_sets import ASIDE, LATER, PANEL, write_csv
from model_store.artifacts.store import ModelStore
from model_store.conformal.rank_tables import mass_above
from model_store.inference.model import NEEDED, Model
from model_store.scores.classification import Scores
from training.bayes.members import MixturePosterior
from training.data import load
from training.data.findings import inspect_source
from training.data.plan import make_plan
from training.data.rows import Dataset
from training.evaluation.metrics import flag_range
from training.fit import Fitted, fit, publish
from training.recipe import Recipe
from training.scoring import served_scores
from training.sections import DataSection

COVERAGE, FPR = 0.95, 0.05
# Lower bound, because isotonic regression may predict 0.
LEAST_PROBABILITY = 1e-3
NEAR = 1.03  # relative to the error of boosting
MODELS = ("linear", "forest", "boosting")


@dataclass(frozen=True)
class Measured:
    """Results of a model on the test rows."""

    log_likelihood: float  # nats per row
    error: float  # share of wrong labels, or RMSE


@dataclass(frozen=True)
class Served(Measured):
    covered: int  # number of covered test rows
    flagged: float  # share of the test rows
    seconds: float  # processor time, from file to published version


def measure(name: str, seed: int, root: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Fit and publish a set with default settings, and evaluate all models."""
    started_at = time.process_time()
    section = DataSection(source=f"csv:{name}.csv", target=PANEL[name].target)
    recipe = make_plan(inspect_source(section, root), section, name, seed).recipe
    recipe = Recipe.model_validate({**recipe.model_dump(), **merge(recipe.model_dump(), changes)})
    data = load(recipe, root)
    store = ModelStore(root / "models")
    result = fit(recipe, data, device="cpu", runs=root, quiet=True)
    test, manifest = result.splits.test, publish(result, store, anyway=True)
    seconds = time.process_time() - started_at
    quality, constant = manifest.quality, manifest.baselines["constant"]
    error_of = "test_accuracy" if data.classes else "test_rmse"

    def figures(of: dict[str, float]) -> tuple[float, float]:
        error = of[error_of]
        return of["test_log_likelihood"], 1.0 - error if data.classes else error

    if data.classes:
        model = Model.load(store.open(name, manifest.version, NEEDED))
        draws = manifest.noise.default_draws
        (scores,), _ = served_scores(model.runtime, test, [draws], 0, 16)
        assert isinstance(scores, Scores)
        tables = model.calibration.rank_tables[draws]
        inside = tables.prediction_sets(mass_above(scores.probabilities), COVERAGE)
        covered = int(inside[np.arange(len(test)), test.y].sum())
    else:
        covered = round(quality["test_interval_coverage_at_95"] * len(test))
    ours = Served(*figures(quality), covered, quality["flag_rate_at_05"], round(seconds, 1))
    models = {
        "ours": ours,
        "networks": measure_networks(result),
        "constant": Measured(*figures(constant)),
        **others(data, seed),
    }
    return {
        "set": name,
        "seed": seed,
        "task": recipe.task,
        "method": recipe.method,
        "rows": len(data.train) + len(data.test),
        "columns": len(data.columns),
        "test": len(data.test),
        "ranking": len(result.splits.ranking),
        "stopped": result.provenance.stopped,
        **{model: vars(measured) for model, measured in models.items()},
    }


def measure_networks(result: Fitted) -> Measured:
    """Evaluate a model without its linear model."""
    posterior, y = result.model.posterior, result.splits.test.y
    assert isinstance(posterior, MixturePosterior)
    posterior.linear_draws = 0
    scores, log_likelihood = result.score(result.splits.test)
    if isinstance(scores, Scores):
        error = float((scores.label != y).mean())
    else:
        error = float(np.sqrt(np.square(scores.in_units.mean - y.astype(np.float64)).mean()))
    return Measured(float(log_likelihood.mean()), error)


def merge(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge changes into recipe sections. `posterior` and `network` are replaced."""
    replaced = ("posterior", "network")
    return {
        key: {**content[key], **value} if isinstance(value, dict) and key not in replaced else value
        for key, value in changes.items()
    }


def others(data: Dataset, seed: int) -> dict[str, Measured]:
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.ensemble import (
        HistGradientBoostingClassifier,
        HistGradientBoostingRegressor,
        RandomForestClassifier,
        RandomForestRegressor,
    )
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.model_selection import cross_val_predict

    x, y, x_test, y_test = data.train.x, data.train.y, data.test.x, data.test.y
    results = {}
    models: dict[str, Any]
    if data.classes:
        folds = max(2, min(5, int(np.bincount(y).min())))
        models = {
            "linear": LogisticRegression(max_iter=2000),
            "forest": RandomForestClassifier(100, random_state=seed),
            "boosting": HistGradientBoostingClassifier(random_state=seed),
        }
        for name, model in models.items():
            calibrated = CalibratedClassifierCV(model, method="isotonic", cv=folds).fit(x, y)
            probs = np.clip(calibrated.predict_proba(x_test), LEAST_PROBABILITY, 1)
            probs /= probs.sum(1, keepdims=True)
            log_likelihood = float(np.log(probs[np.arange(len(y_test)), y_test]).mean())
            results[name] = Measured(log_likelihood, float((probs.argmax(1) != y_test).mean()))
        return results
    models = {
        "linear": RidgeCV(np.logspace(-3, 3, 13)),
        "forest": RandomForestRegressor(100, random_state=seed),
        "boosting": HistGradientBoostingRegressor(random_state=seed),
    }
    for name, model in models.items():
        std = float((y - cross_val_predict(model, x, y, cv=5)).std())
        errors = model.fit(x, y).predict(x_test) - y_test
        log_density = -0.5 * np.log(2 * np.pi * std**2) - errors**2 / (2 * std**2)
        results[name] = Measured(float(log_density.mean()), float(np.sqrt((errors**2).mean())))
    return results


def main() -> None:
    parser = bare_parser(__doc__, "panel.{md,png}")
    parser.add_argument("uci", type=Path)
    parser.add_argument("results", type=Path, help="a folder, with a file for each set and seed")
    parser.add_argument("--sets", nargs="+", default=[*PANEL], choices=PANEL, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--development", action="store_true", help="without the test rows")
    parser.add_argument(
        "--changes", type=json.loads, default={}, help="of the recipes, as JSON: to try defaults"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.results.mkdir(parents=True, exist_ok=True)
    cells: dict[str, list[dict[str, Any]]] = {}
    for seed in options.seeds:
        for name in options.sets:
            file = options.results / f"{name}-{seed}.json"
            if not file.exists():
                with tempfile.TemporaryDirectory() as folder:
                    root = Path(folder)
                    write_csv(name, options.uci, root / f"{name}.csv", options.development)
                    matches = measure(name, seed, root, options.changes)
                file.write_text(json.dumps(matches, indent=1))
                displayed = [
                    (round(v, 3), round(e, 4)) for v, e, *_ in map(_figures(matches), MODELS)
                ]
                ours = _figures(matches)("ours")
                print(name, seed, *(round(figure, 4) for figure in ours), *displayed, flush=True)
            cells.setdefault(name, []).append(json.loads(file.read_text()))
    report(options, "panel", page(cells), lambda: plot(cells))


def _figures(cell: dict[str, Any]) -> Callable[[str], tuple[float, ...]]:
    return lambda model: tuple(cell[model].values())


@dataclass(frozen=True)
class Row:
    """Results of a set, averaged over seeds."""

    name: str
    cells: list[dict[str, Any]]

    def values(self, model: str, figure: str) -> np.ndarray:
        return np.array([cell[model][figure] for cell in self.cells])

    def mean(self, model: str, figure: str) -> float:
        return float(self.values(model, figure).mean())

    @property
    def outcomes(self) -> dict[str, bool]:
        """Return which goals a set meets."""
        ours = self.mean("ours", "log_likelihood")
        constant = self.values("ours", "log_likelihood") - self.values("constant", "log_likelihood")
        return {
            "likelihood at or above the best of three": ours
            >= max(self.mean(model, "log_likelihood") for model in MODELS),
            "likelihood above the linear model's": ours > self.mean("linear", "log_likelihood"),
            "error within 3 % of boosting's": self.mean("ours", "error")
            <= NEAR * self.mean("boosting", "error"),
            "likelihood above the constant's with every seed": bool((constant > 0).all()),
        }


def page(results: dict[str, list[dict[str, Any]]]) -> str:
    rows = [Row(name, cells) for name, cells in results.items()]
    lines = []
    for row in rows:
        bold = "**" if row.outcomes["likelihood at or above the best of three"] else ""
        near = "**" if row.outcomes["error within 3 % of boosting's"] else ""
        values = row.values("ours", "log_likelihood")
        lines.append(
            [
                row.name + _group(row.name),
                f"{bold}{values.mean():.3f}{bold}",
                *(f"{row.mean(model, 'log_likelihood'):.3f}" for model in ("networks", *MODELS)),
                f"{near}{row.mean('ours', 'error'):.4g}{near}",
                *(f"{row.mean(model, 'error'):.4g}" for model in ("networks", "boosting")),
            ]
        )
    groups = {
        "first sets": [row for row in rows if row.name not in LATER],
        "of these, set aside": [row for row in rows if row.name in ASIDE],
        "later sets": [row for row in rows if row.name in LATER],
    }
    goals = [f"| | {' | '.join(groups)} |", "|---|---|---|---|"]
    for goal in rows[0].outcomes:
        counts = [
            f"{sum(row.outcomes[goal] for row in group)} of {len(group)}"
            for group in groups.values()
        ]
        goals.append(f"| {goal} | {' | '.join(counts)} |")
    stored = [
        low <= (cell["test"] - cell["ours"]["covered"]) / cell["test"] <= high
        for row in rows
        for cell in row.cells
        for low, high in [flag_range(cell["test"], cell["ranking"], 1 - COVERAGE)]
    ]
    few_flagged = [
        cell["ours"]["flagged"] <= flag_range(cell["test"], cell["ranking"], FPR)[1]
        for row in rows
        for cell in row.cells
    ]
    text = [
        "# A panel of public tables, by defaults alone",
        "",
        "Each set is fitted by `dubito fit --data csv:FILE --target COLUMN`, and compared with "
        "logistic or ridge regression, a random forest and histogram gradient boosting. "
        "The defaults were selected without the sets that are set aside. The later sets were added "
        "after that.",
        "",
        *goals,
        "",
        f"With coverage {COVERAGE:g}, the share of covered test rows is in the expected 99 % range in "
        f"{sum(stored)} of {len(stored)} fits. With the flag at {FPR:g}, "
        f"{len(few_flagged) - sum(few_flagged)} of {len(few_flagged)} fits flag more rows than "
        "expected.",
        "",
        f"The table shows means over seeds ({len(rows[0].cells)}): log-likelihoods of test rows in "
        "nats, and the share of wrong labels or the RMSE. `networks` is our model without its linear "
        "members. Bold figures reach the goals above.",
        "",
        "| set | ours | networks | linear | forest | boosting | error | networks' | boosting's |",
        "|---|---|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells in lines),
        "",
        "![Plot](panel.png)",
    ]
    return "\n".join(text) + "\n"


def _group(name: str) -> str:
    if name in LATER:
        return " (later)"
    return " (aside)" if name in ASIDE else ""


def plot(results: dict[str, list[dict[str, Any]]]) -> Figure:
    """Plot log-likelihood and error against boosting."""
    rows = [Row(name, cells) for name, cells in results.items()]
    rows.sort(key=lambda row: row.mean("ours", "error") / max(row.mean("boosting", "error"), 1e-9))
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 0.24 * len(rows) + 1.6), layout="constrained", sharey=True
    )
    for i, row in enumerate(rows):
        marker = "s" if row.name in (*ASIDE, *LATER) else "o"
        gain = row.values("ours", "log_likelihood") - row.values("boosting", "log_likelihood")
        ratio = row.values("ours", "error") / np.maximum(row.values("boosting", "error"), 1e-9)
        for axis, values, ends in ((axes[0], gain, (-1, 1)), (axes[1], ratio, (0.5, 2))):
            values = np.clip(values, *ends)
            axis.plot([values.min(), values.max()], [i, i], color="0.6", zorder=1)
            axis.plot(values.mean(), i, marker, color="tab:blue", zorder=2)
    for axis, position in ((axes[0], 0), (axes[1], 1)):
        axis.axvline(position, color="0.4", linewidth=0.8)
        axis.grid(axis="y", linewidth=0.3)
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes[0].set_xlabel(
        "log-likelihood, ours minus boosting's\nnats per row, clipped; right is better"
    )
    axes[1].set_xlabel("error, ours divided by boosting's\nclipped; left is better")
    axes[1].set_xscale("log", base=2)
    figure.suptitle("Dubito and boosting on public tables (squares: not used in development)")
    return figure


if __name__ == "__main__":
    main()
