"""How often an explanation names the column that was broken, and what it costs.

`python -m benchmarks.explanations [--write]`. A synthetic table: `b` is nearly a weighted sum of
`a` and `c`; `d`, `e` and `city` are independent of all others. One column of a row is changed, and
of the rows that are flagged those are counted whose first column is the changed one:

    as usual   the largest fall of the flag's statistic with one column at its usual value: what is
    served squares    the largest sum of squares of the whitened row (Garthwaite and Koch 2016)
    Shapley    the largest sum of x_i (A x)_i, x from the mean: the Shapley value of a quadratic
    form

The last two are of the detector, residual or Mahalanobis, with the larger share of the flag. The
network is not fitted, which only the detectors of the posterior and of features notice.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.model import ROOT
from model_store.artifacts.store import ModelStore
from model_store.inference.explanation import DividedFlag, explain, falls, rows_as_usual
from model_store.inference.model import NEEDED, Model
from model_store.types import at_once
from training.data import load, split, split_sizes
from training.data.tables import column_width
from training.export.served import ServedNetwork, fitted_detectors
from training.fit import Fitted, publish, temper
from training.networks.model import build, initialise
from training.provenance import Provenance
from training.recipe import Recipe

ROWS, BROKEN = 3000, 200
DRAWS = 100
CHANGES = {
    "3 standard deviations away": lambda x, _, sign: x + 3 * sign,
    "5 standard deviations away": lambda x, _, sign: x + 5 * sign,
    "50 standard deviations away": lambda x, _, sign: x + 50 * sign,
    "another row's value": lambda _, other, __: other,
}


def table(folder: Path) -> Recipe:
    """Write the table, and return a recipe for it."""
    random = np.random.default_rng(0)
    a, c, d, u = random.normal(size=(4, ROWS))
    b, e = 0.95 * a + 0.3 * c + 0.05 * random.normal(size=ROWS), random.gamma(2, 1, ROWS)
    cities = random.choice(["Rome", "Paris", "Oslo"], ROWS, p=[0.6, 0.35, 0.05])
    lines = ["a,b,c,d,e,city,y"]
    for i in range(ROWS):
        label = "yes" if a[i] + u[i] > 0 else "no"
        lines.append(f"{a[i]:.5f},{b[i]:.5f},{c[i]:.5f},{d[i]:.5f},{e[i]:.5f},{cities[i]},{label}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return Recipe.model_validate(
        {
            "name": "table",
            "method": "bhn-realnvp",
            "data": {"source": "csv:table.csv", "target": "y"},
            "network": {"hidden": [100, 100]},
            "posterior": {"couplings": 2, "hidden": 50},
            "training": {"epochs": 1},
            "serving": {"draws": DRAWS, "temperature": False},
        }
    )


def shapley(served: ServedNetwork, x: np.ndarray, name: str) -> np.ndarray:
    """Return x_i (A x)_i of each number, x from the mean."""
    spectrum = served.spectrum
    coordinates = spectrum(torch.from_numpy(x))
    weights = torch.ones(coordinates.shape[1])
    detector = served.density[name]
    if name == "mahalanobis":
        weights = detector.weights[:, 0]
    else:
        weights[: detector.kept] = 0.0
    centred = torch.from_numpy(x) - spectrum.mean
    return (centred * spectrum.back(coordinates * weights)).numpy()


def named(
    model: Model, served: ServedNetwork, x: np.ndarray, column: int
) -> tuple[float, dict[str, float]]:
    """Return the share of rows that are flagged, and by each method of how many of these it names
    the column."""
    columns = model.manifest.input.columns
    starts = np.cumsum([0, *(column_width(c) for c in columns)])[:-1]
    theta = model.runtime.draw(0, 0, DRAWS)
    prediction = model.predict(x, theta)
    flagged = prediction.p_values.p_value <= 0.05
    usual = falls(model, model.predict(at_once(rows_as_usual(columns, x)), theta))
    flag = DividedFlag.of(model, prediction)
    is_mahalanobis = (flag.share["mahalanobis"] >= flag.share["residual"])[:, None]
    with torch.no_grad():
        terms = served.terms(torch.from_numpy(x)).numpy()
        squares = np.where(
            is_mahalanobis,
            *(terms[:, served.attributed.index(n)] for n in ("mahalanobis", "residual")),
        )
        values = np.where(
            is_mahalanobis, *(shapley(served, x, name) for name in ("mahalanobis", "residual"))
        )
    by_column = {"as usual": usual, "squares": squares, "Shapley": values}
    found = {}
    for name, of in by_column.items():
        summed = of if name == "as usual" else np.add.reduceat(of, starts, axis=1)
        found[name] = (
            float(np.mean(summed.argmax(axis=1)[flagged] == column))
            if flagged.any()
            else float("nan")
        )
    return float(flagged.mean()), found


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/results/explanations.md")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = table(folder)
        data = load(recipe, folder)
        splits = split(data, split_sizes(recipe))
        network = build(recipe, data.shape, len(data.classes))
        initialise(network, torch.from_numpy(splits.train.x))
        served = fitted_detectors(network, splits.train, recipe, data.shape)
        store = ModelStore(folder / "models")
        temper(network, recipe, splits.validation)
        provenance = Provenance(recipe=recipe.model_dump(mode="json"))
        publish(Fitted(network, recipe, data, splits, provenance), store, name="table")
        model = Model.load(store.open("table", "1", wanted=NEEDED))
    random = np.random.default_rng(1)
    lines = [
        "# Explanations",
        "",
        "`python -m benchmarks.explanations --write`: a synthetic table whose column b is nearly "
        "a weighted sum of a",
        f"and c (and so of any two the third). One column of {BROKEN} test rows is changed. Of "
        "those flagged",
        "at .05, the share (%) whose first column is the changed one. [Why "
        "so](../decisions/0017-explanations.md).",
        "",
        "| change | column | flagged | as usual (served) | squares | Shapley |",
        "|---|---|---|---|---|---|",
    ]
    test = splits.test.x
    for how, change in CHANGES.items():
        for i, column in enumerate("abcde"):
            x = test[random.permutation(len(test))[:BROKEN]].copy()
            others = test[random.permutation(len(test))[:BROKEN], i]
            x[:, i] = change(x[:, i], others, random.choice([-1.0, 1.0], BROKEN)).astype(np.float32)
            flagged, found = named(model, served, x, i)
            shares = " | ".join(f"{100 * share:.0f}" for share in found.values())
            lines.append(f"| {how} | {column} | {100 * flagged:.0f} | {shares} |")
    lines += ["", *costs(model, test)]
    page = "\n".join(lines) + "\n"
    print(page)
    if options.write:
        (ROOT / "docs" / "results" / "explanations.md").write_text(page)


def costs(model: Model, x: np.ndarray) -> list[str]:
    """Return what explaining a row takes beside predicting it, each the least of 101 turns."""
    theta, columns, row = model.runtime.draw(0, 0, DRAWS), model.manifest.input.columns, x[:1]
    times: dict[str, list[float]] = {"predicting": [], "as usual": [], "the rest": []}
    for _ in range(101):
        begun = time.perf_counter()
        prediction = model.predict(row, theta)
        predicted = time.perf_counter()
        as_usual = model.predict(at_once(rows_as_usual(columns, row)), theta)
        usual = time.perf_counter()
        at_once(explain(model, prediction, row, as_usual))
        ended = time.perf_counter()
        for name, taken in zip(
            times, (predicted - begun, usual - predicted, ended - usual), strict=True
        ):
            times[name].append(1000 * taken)
    taken = {name: min(values) for name, values in times.items()}
    usual, rows = 1 + len(columns), len(model.training_rows or ())
    return [
        f"A row of {len(columns)} columns under {DRAWS} draws takes {taken['predicting']:.2f} ms "
        "to predict, its",
        f"{usual} rows as usual {taken['as usual']:.2f} ms; shares, falls and the nearest of "
        f"{rows} training rows",
        f"{taken['the rest']:.2f} ms (each the least of 101 turns).",
    ]


if __name__ == "__main__":
    main()
