"""Convert predictions to table columns named after the API fields (docs/api.md)."""

from itertools import compress
from typing import Any

import numpy as np
from jaxtyping import Bool, Shaped

from model_store.artifacts.manifest import Manifest
from model_store.inference.prediction import Decision, Prediction
from model_store.scores.classification import Scores
from model_store.types import Task

SCORES: dict[Task, tuple[str, ...]] = {
    "classification": (
        *("entropy", "expected_entropy", "bald", "bald_corrected"),
        *("mean_std", "variation_ratio"),
    ),
    "regression": ("std", "aleatoric_std", "epistemic_std", "median"),
}


def result_columns(
    manifest: Manifest,
    prediction: Prediction,
    decision: Decision,
    labels: Shaped[np.ndarray, "N"] | None,
) -> dict[str, np.ndarray]:
    columns: dict[str, Any] = {}
    scores = prediction.scores
    if isinstance(scores, Scores):
        columns["label"] = labels
        columns |= _by_class("probabilities", scores.probabilities, manifest)
    else:
        scores = scores.in_units
        columns["mean"] = scores.mean
    if decision.interval is not None:
        columns["interval.low"], columns["interval.high"] = decision.interval.T
    columns |= {"p_value": decision.p_values.p_value, "flag": decision.flag}
    columns |= {name: getattr(scores, name) for name in SCORES[manifest.task]}
    if (scores.num_draws == 1).all():  # Disagreement needs two draws.
        columns.pop("epistemic_std", None)
    columns["num_samples"] = scores.num_draws
    if manifest.noise.max_draws is None:  # otherwise the draws do not depend on the seed
        for name, errors in (scores.standard_error or {}).items():
            columns[f"standard_error.{name}"] = errors
    if manifest.categories is not None and prediction.categories is not None:
        columns["category"] = np.array([*manifest.categories.names, ""])[prediction.categories]
    if decision.prediction_set is not None:
        columns |= _by_class("prediction_set", decision.prediction_set, manifest)
    columns["abstain"] = decision.abstain
    if manifest.input.columns:
        missing = prediction.missing
        columns["missing"] = np.full(len(decision.flag), "")
        if missing is not None:
            columns["missing"] = np.array(join_names(manifest, missing))
    for name, detected in prediction.detected.items():
        columns[f"detectors.{name}.score"] = detected
        columns[f"detectors.{name}.p_value"] = decision.p_values.detector_p_values[name]
        columns[f"detectors.{name}.fired"] = decision.fired[name]
    return {name: column for name, column in columns.items() if column is not None}


def join_names(manifest: Manifest, missing: Bool[np.ndarray, "N C"]) -> list[str]:
    names = [column.name for column in manifest.input.columns]
    return [", ".join(compress(names, row)) for row in missing.tolist()]


def _by_class(
    name: str, values: Shaped[np.ndarray, "N C"], manifest: Manifest
) -> dict[str, np.ndarray]:
    pairs = zip(manifest.classes or (), values.T, strict=True)
    return {f"{name}.{label}": column for label, column in pairs}
