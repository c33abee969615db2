"""Comparison of all methods with equal CPU time for training."""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from experiments.cells import Column, Measured, Target
from experiments.measures import load_recipe, published
from experiments.tables.detection import ROWS
from experiments.uci import load_uci
from model_store.artifacts.manifest import GRAPHS
from training.fit import Fitted, fit
from training.recipe import Recipe
from training.versions import WEIGHTS

SECONDS = {
    "digits": 10.0,
    "yacht": 10.0,
    "concrete": 10.0,
    "wine-quality-red": 10.0,
    "mnist": 120.0,
}
FIRST_EPOCHS, MIN_TIME_SHARE = 3, 0.8
METHODS: dict[str, dict[str, Any]] = {  # with posteriors of tables; images have recipes
    "mle": {},
    "dropout": {"rate": 0.05, "prior_std": 1.0},
    "bbb-gaussian": {},
    "mvn": {},
    "bhn-realnvp": {"couplings": 2, "hidden": 50, "initial_log_std": -2.0},
    "bhn-iaf": {"couplings": 2, "hidden": 50, "initial_log_std": -2.0},
    "variational-hypernet": {},
    "laplace": {},
    "ensemble": {},
}


def make_recipe(data: str, method: str, seed: int, epochs: int) -> Recipe:
    training = {"epochs": epochs, "kl_ramp_epochs": epochs / 10}
    if data in ("digits", "mnist"):
        return load_recipe(f"{data}-{method}", seed, training=training)
    return load_recipe(
        "uci-concrete",
        0,
        name=f"{data}-{method}",
        method=method,
        posterior=METHODS[method],
        data={"source": f"uci:uci/{data}/{seed}"}
        | {"validation": 30, "reference": 20, "ranking": 39},
        training=training,
    )


def fit_for(seconds: float, data: str, method: str, seed: int, runs: Path) -> tuple[Fitted, float]:
    """Fit for about `seconds` of CPU time, and return the fit and the time it took.

    The first epochs are slower, so a fit that ends too early is repeated with more epochs.
    """
    epochs = FIRST_EPOCHS
    while True:
        start_s = time.process_time()
        recipe = make_recipe(data, method, seed, epochs)
        rows = load_uci(recipe) if recipe.data.source.startswith("uci:") else None
        result = fit(recipe, rows, runs=runs, quiet=True)
        fit_s = time.process_time() - start_s
        if fit_s >= MIN_TIME_SHARE * seconds:
            return result, fit_s
        epochs = max(epochs + 1, round(epochs * seconds / fit_s))


def measure(data: str, method: str, seed: int, _: Path) -> Measured:
    with tempfile.TemporaryDirectory() as folder:  # a timed fit must not resume another
        result, seconds = fit_for(SECONDS[data], data, method, seed, Path(folder))
        with published(result) as version:
            report, manifest = version.evaluate(ROWS), version.manifest
    values = {
        **read_report(report),
        "kilobytes": sum(manifest.files[file].size for file in (*GRAPHS, WEIGHTS)) / 1e3,
        "seconds": seconds,
        "epochs": float(result.recipe.training.epochs or 0),
    }
    # The curves need not be level, because the time is fixed.
    return Measured(values, result.data.digest()[:16])


def read_report(report: dict[str, Any]) -> dict[str, float]:
    test, is_classified = report["test"], report["task"] == "classification"
    score = "entropy" if is_classified else "epistemic_std"
    sets = [outliers["scores"] for outliers in report["outliers"].values()]
    values = {
        "log_likelihood": test["log_likelihood"],
        "flag": 100 * statistics.mean(scores["flag"]["auroc"] for scores in sets),
    }
    if is_classified:
        values["error"] = 100 * (1 - test["accuracy"])
        values["calibration"] = test["expected_calibration_error"]
    else:
        values |= {"error": test["rmse"], "calibration": test["pit"]["distance"]}
    if all(score in scores for scores in sets):  # one draw has no epistemic deviation
        values["posterior"] = 100 * statistics.mean(scores[score]["auroc"] for scores in sets)
    return values


CHOICE = Target(
    name="which-method",
    title="Comparison of methods",
    protocol=(
        "All methods are fitted for the same processor time on one core: "
        + ", ".join(f"{data} {seconds:g} s" for data, seconds in SECONDS.items())
        + ". Detection is the AUROC in %, "
        "averaged over all outlier sets of `evaluate`, of the posterior's score (entropy, or "
        "epistemic deviation for regression)."
    ),
    rows={
        f"{data}-{method}": partial(measure, data, method) for data in SECONDS for method in METHODS
    },
    columns={
        "log_likelihood": Column("log-likelihood", 3),
        "posterior": Column("detection", 1),
    },
    kl_weights={
        **{f"digits-{method}": "0.096" for method in ("bbb-gaussian", "mvn")},
        "digits-variational-hypernet": "0.0096",
        "mnist-bbb-gaussian": "0.001",
        "mnist-mvn": "0.016",
        "mnist-variational-hypernet": "0.52",
    },
    remarks=(
        "Splits differ about as much as methods, so three seeds give only a rough ranking.\n\n"
        "* **Detection**: on tables, `ensemble` and `laplace` detect most. The flag's AUROC is 86 "
        "to 98 with every method.\n"
        "* **Likelihood**: no method is best everywhere. On yacht, `mle`, `laplace` and `ensemble` "
        "are very overconfident in one or two of three splits.\n"
    ),
    publishes=True,
)

TARGETS = (CHOICE,)
