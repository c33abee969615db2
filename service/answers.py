"""Answers as bytes: JSON, or npz arrays."""

import io
from typing import Any

import numpy as np
import orjson

from model_store.scores import SCORE_NAMES
from service.models import Served
from service.predictor import Predicted


def predict_json(served: Served, predicted: Predicted, fpr: float, coverage: float) -> bytes:
    """Return the JSON answer of /predict."""
    scores, judgement = predicted.prediction.scores, predicted.prediction.judgement
    classes = served.model.manifest.output.classes
    rows = len(scores.entropy)
    names = ("entropy", "expected_entropy", "bald", "mean_std", "variation_ratio")
    columns = [getattr(scores, name).tolist() for name in names]
    labels = scores.probabilities.argmax(axis=1).tolist()
    probabilities = scores.probabilities.tolist()
    sets = served.model.prediction_sets(predicted.prediction, coverage).tolist()
    p_values = judgement.p_value.tolist()
    flags = (judgement.p_value <= fpr).tolist()
    if scores.standard_error is None:
        errors = [dict.fromkeys(SCORE_NAMES)] * rows
    else:
        error_columns = zip(*(scores.standard_error[name].tolist() for name in SCORE_NAMES), strict=True)
        errors = [dict(zip(SCORE_NAMES, values, strict=True)) for values in error_columns]
    detectors = {
        name: list(zip(detected.tolist(), judgement.detector_p_values[name].tolist(), strict=True))
        for name, detected in predicted.prediction.detected.items()
    }
    predictions: list[dict[str, Any]] = []
    for n in range(rows):
        answer = {
            "label": classes[labels[n]],
            "probabilities": probabilities[n],
            "num_samples": predicted.num_samples,
            **{name: column[n] for name, column in zip(names, columns, strict=True)},
            "standard_error": errors[n],
            "flag": flags[n],
            "p_value": p_values[n],
            "prediction_set": [name for name, inside in zip(classes, sets[n], strict=True) if inside],
            "detectors": {name: {"score": c[n][0], "p_value": c[n][1]} for name, c in detectors.items()},
        }
        if predicted.samples is not None:
            answer["samples"] = predicted.samples[:, n].tolist()
        predictions.append(answer)
    return orjson.dumps(
        {
            "model": served.name,
            "version": served.version,
            "num_samples": predicted.num_samples,
            "seed": predicted.seed,
            "predictions": predictions,
        }
    )


def predict_npz(served: Served, predicted: Predicted, fpr: float, coverage: float) -> bytes:
    """Return the same as arrays, a row each: `probabilities`, `entropy`, `standard_error.bald`, ..."""
    scores, judgement = predicted.prediction.scores, predicted.prediction.judgement
    classes = np.array(served.model.manifest.output.classes)
    arrays = {
        "model": np.array(served.name),
        "version": np.array(served.version),
        "seed": np.array(predicted.seed),
        "num_samples": np.full(len(scores.entropy), predicted.num_samples),
        "label": classes[scores.probabilities.argmax(axis=1)],
        "probabilities": scores.probabilities,
        "expected_entropy": scores.expected_entropy,
        **scores.by_name(),
        **{f"standard_error.{name}": error for name, error in (scores.standard_error or {}).items()},
        "flag": judgement.p_value <= fpr,
        "p_value": judgement.p_value,
        "prediction_set": served.model.prediction_sets(predicted.prediction, coverage),
        **{f"detectors.{name}.score": score for name, score in predicted.prediction.detected.items()},
        **{f"detectors.{name}.p_value": value for name, value in judgement.detector_p_values.items()},
    }
    if predicted.samples is not None:
        arrays["samples"] = predicted.samples.transpose(1, 0, 2)
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **arrays)
    return packed.getvalue()
