"""Abstention of a Bayesian CNN on images unlike its training data.

It extends Blundell et al. 2015, "Weight uncertainty in neural networks".
"""

from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from experiments.cells import Column, Measured, Target
from experiments.measures import IdxOutliers, load_recipe, make_measured, published
from experiments.pages import set_bars
from experiments.tables.accuracy import HELD_OUT
from model_store.conformal.calibration import DEFAULT_FPR
from model_store.conformal.rank_tables import RankTables
from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from training.data.rows import Rows
from training.evaluation.outliers import generated_sets
from training.evaluation.quality import ServedPredictor
from training.fit import fit

DRAWS, ROWS = 30, 1000
RISK = 0.01
KL_WEIGHT = 2e-6
KL = {"kl_weight": KL_WEIGHT}  # a temperature of 0.1 keeps the uncertainty
# The reason is part of the fits' digests, so its text must not change.
NETWORK = {"hidden": None, "kind": "gal-cnn-without-dropout"}
TEST = "test"
OTHERS = ("notmnist", "omniglot")
SETS = (TEST, "rotated", *OTHERS, "uniform")
REASONS = {"doubt": "uncertainty", "undecided": "or flag"}


def measure(method: str, seed: int, runs: Path) -> Measured:
    recipe = load_recipe(
        f"mnist-{method}",
        seed,
        data=HELD_OUT,
        network=NETWORK,
        training={"epochs": 10, **(KL if method != "mle" else {})},
        serving={"draws": DRAWS},
    )
    result = fit(recipe, runs=runs, quiet=True)
    with published(result) as version:
        model, manifest = version.model, version.manifest
    test = result.data.test
    test = test.take(np.arange(min(ROWS, len(test))))
    predictor = ServedPredictor(model, manifest.noise.default_draws, seed)
    values = {"accuracy": 100 * manifest.quality["test_accuracy"]}
    for name, x in make_sets(model, test, seed).items():
        prediction = predictor(name, x.astype(np.float32)).prediction
        doubtful, undecided = doubtful_rows(prediction), prediction.abstains(DEFAULT_FPR, RISK)
        values[f"doubt_{name}"] = 100 * float(doubtful.mean())
        values[f"undecided_{name}"] = 100 * float(undecided.mean())
        if name == TEST and not undecided.all():
            wrong = prediction.scores.labels != test.y
            values["answered_wrong"] = 100 * float(wrong[~undecided].mean())
    return make_measured(result, values)


def make_sets(model: Model, test: Rows, seed: int) -> dict[str, np.ndarray]:
    spec = model.manifest.input
    sources = [IdxOutliers.named(name) for name in OTHERS]
    sets = generated_sets(spec, test.x, test.y, True, seed)
    sets |= {source.name: source.rows(spec, ROWS, seed) for source in sources}
    return {TEST: test.x, **{name: sets[name] for name in SETS[1:]}}


def doubtful_rows(prediction: Prediction) -> Bool[np.ndarray, "N"]:
    """Mark the rows whose uncertainty alone makes the model abstain."""
    tables = prediction.rank_tables
    assert isinstance(tables, RankTables)
    largest = tables.thresholds(DEFAULT_FPR, RISK, prediction.categories)
    return prediction.calibrated_scores.by_name()["variation_ratio"] > largest


UNDECIDED = Target(
    name="undecided",
    title="Abstention on images unlike the training data (Weight Uncertainty, a CNN)",
    protocol=(
        "The network of `alpha-cnn` has stochastic layers (`bbb-gaussian`) or none (`mle`). The "
        f"table shows abstentions in % of {ROWS:,} rows of each set, with `risk` {RISK:g}: by "
        "uncertainty alone, and by uncertainty or the flag. Wrong answers are in % of the answered "
        "test rows."
    ),
    rows={method: partial(measure, method) for method in ("bbb-gaussian", "mle")},
    columns={
        "accuracy": Column("accuracy, %"),
        "answered_wrong": Column("answered wrongly, %"),
        **{
            f"{key}_{name}": Column(f"{name}, {reason}", 1)
            for key, reason in REASONS.items()
            for name in SETS
        },
    },
    kl_weights={"bbb-gaussian": "0.1"},
    draw=partial(set_bars, REASONS, SETS, "undecided rows, %"),
    caption="Bars should be low for `test` and high for the other sets.",
    remarks=(
        "With the flag, the network without a posterior abstains equally often. By uncertainty "
        "alone, the result depends on the seed."
    ),
    publishes=True,
)

TARGETS = (UNDECIDED,)
