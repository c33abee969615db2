"""Answers as bytes: JSON, or npz arrays."""

import io
from typing import Any

import numpy as np
import orjson
from jaxtyping import Bool

from model_store.scores.classification import SCORE_NAMES, Scores
from model_store.scores.regression import MIXTURE_ERROR_NAMES, MixtureScores
from service.engine.batching import Predicted
from service.http.options import DecisionOptions
from service.registry.models import Served


def predict_json(
    served: Served, predicted: Predicted, options: DecisionOptions, flags: Bool[np.ndarray, "N"]
) -> bytes:
    """Return the JSON answer of /predict, given which rows are flagged on its options."""
    prediction = predicted.prediction
    scores, p_values = prediction.scores, prediction.p_values
    rows = len(p_values.p_value)
    if isinstance(scores, Scores):
        before, after = _of_classes(served, predicted, scores, options.coverage)
        abstains = (
            None if options.risk is None else served.model.abstains(prediction, options.fpr, options.risk).tolist()
        )
        after["abstain"] = abstains or [None] * rows
        names = SCORE_NAMES
    else:
        before, after = _of_target(served, predicted, scores, options.coverage)
        names = MIXTURE_ERROR_NAMES
    if scores.standard_error is None:
        errors = [dict.fromkeys(names)] * rows
    else:
        error_columns = zip(*(scores.standard_error[name].tolist() for name in names), strict=True)
        errors = [dict(zip(names, values, strict=True)) for values in error_columns]
    detectors = {
        name: list(zip(detected.tolist(), p_values.detector_p_values[name].tolist(), strict=True))
        for name, detected in prediction.detected.items()
    }
    columns: dict[str, list[Any]] = {
        **before,
        "standard_error": errors,
        "flag": flags.tolist(),
        "p_value": p_values.p_value.tolist(),
        **after,
        "detectors": [
            {
                name: {"score": c[n][0], "p_value": c[n][1], "fired": c[n][1] <= options.fpr}
                for name, c in detectors.items()
            }
            for n in range(rows)
        ],
    }
    if predicted.samples is not None:
        samples = predicted.samples.transpose(1, 0, 2).tolist()
        if isinstance(scores, MixtureScores):
            samples = [[{"mean": mean, "std": std} for mean, std in row] for row in samples]
        columns["samples"] = samples
    return orjson.dumps(
        {
            "model": served.name,
            "version": served.version,
            "num_samples": predicted.num_samples,
            "seed": predicted.seed,
            "predictions": [
                dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
            ],
        }
    )


def _of_classes(
    served: Served, predicted: Predicted, scores: Scores, coverage: float
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the columns that only a classification has: those before the flag, and those after."""
    classes = served.model.manifest.classes or ()
    sets = served.model.prediction_sets(predicted.prediction, coverage).tolist()
    names = ("entropy", "expected_entropy", "bald", "mean_std", "variation_ratio")
    before = {
        "label": [classes[i] for i in scores.label.tolist()],
        "probabilities": scores.probabilities.tolist(),
        "num_samples": scores.num_draws.tolist(),
        **{name: getattr(scores, name).tolist() for name in names},
    }
    inside = [[name for name, is_inside in zip(classes, row, strict=True) if is_inside] for row in sets]
    return before, {"prediction_set": inside}


def _of_target(
    served: Served, predicted: Predicted, scores: MixtureScores, coverage: float
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the same of a regression. Infinite bounds become null in JSON."""
    before = {name: getattr(scores, name).tolist() for name in MIXTURE_ERROR_NAMES}
    before["num_samples"] = scores.num_draws.tolist()
    if predicted.num_samples == 1:
        before["epistemic_std"] = [None] * len(scores.mean)
    return before, {"interval": served.model.intervals(predicted.prediction, coverage).tolist()}


def predict_npz(
    served: Served, predicted: Predicted, options: DecisionOptions, flags: Bool[np.ndarray, "N"]
) -> bytes:
    """Return the same as arrays, a row each: `probabilities`, `entropy`, `standard_error.bald`, ...

    What is null in JSON for all rows is left out; infinite bounds are infinite.
    """
    prediction = predicted.prediction
    scores, p_values = prediction.scores, prediction.p_values
    samples = None if predicted.samples is None else predicted.samples.transpose(1, 0, 2)
    arrays: dict[str, Any] = {
        "model": np.array(served.name),
        "version": np.array(served.version),
        "seed": np.array(predicted.seed),
        "num_samples": scores.num_draws,
        **scores.by_name(),
        **{f"standard_error.{name}": error for name, error in (scores.standard_error or {}).items()},
        "flag": flags,
        "p_value": p_values.p_value,
        **{f"detectors.{name}.score": score for name, score in prediction.detected.items()},
        **{f"detectors.{name}.fired": value <= options.fpr for name, value in p_values.detector_p_values.items()},
        **{f"detectors.{name}.p_value": value for name, value in p_values.detector_p_values.items()},
    }
    if isinstance(scores, Scores):
        arrays["label"] = np.array(served.model.manifest.classes)[scores.label]
        arrays["probabilities"] = scores.probabilities
        arrays["expected_entropy"] = scores.expected_entropy
        arrays["prediction_set"] = served.model.prediction_sets(prediction, options.coverage)
        if options.risk is not None:
            arrays["abstain"] = served.model.abstains(prediction, options.fpr, options.risk)
        if samples is not None:
            arrays["samples"] = samples
    else:
        arrays["mean"] = scores.mean
        arrays["interval"] = served.model.intervals(prediction, options.coverage)
        if predicted.num_samples == 1:
            del arrays["epistemic_std"]
        if samples is not None:
            arrays["samples.mean"], arrays["samples.std"] = samples[..., 0], samples[..., 1]
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **arrays)
    return packed.getvalue()
