"""From a network's outputs to sums over draws, scores and samples, by task."""

import numpy as np
from jaxtyping import Float, Float32, Int64

from model_store.scores.classification import SCORE_NAMES, Scores, predictive_scores, predictive_sums
from model_store.scores.regression import MIXTURE_SCORE_NAMES, MixtureScores, mixture_scores, mixture_sums
from model_store.scores.sums import DrawSums
from model_store.types import Task

AnyScores = Scores | MixtureScores

DETECTED: dict[Task, tuple[str, ...]] = {"classification": SCORE_NAMES, "regression": MIXTURE_SCORE_NAMES}


def sums_of(task: Task, outputs: Float[np.ndarray, "K N C"], first_draw: int = 0) -> DrawSums:
    """Return the sums over draws `first_draw` and on."""
    return (predictive_sums if task == "classification" else mixture_sums)(outputs, first_draw)


def scores_of(task: Task, sums: DrawSums, standard_errors: bool = True) -> AnyScores:
    """Return the scores of the draws summed; raises ValueError where there is none."""
    if task == "classification":
        return predictive_scores(sums, standard_errors)
    return mixture_scores(sums, standard_errors)


def labels_of(scores: AnyScores) -> Int64[np.ndarray, "N"]:
    """Return the number of each row's most probable class; 0 in a regression."""
    return scores.label if isinstance(scores, Scores) else np.zeros(len(scores.mean), dtype=int)


def samples_of(task: Task, outputs: Float32[np.ndarray, "K N C"]) -> Float32[np.ndarray, "K N C"]:
    """Return what each draw says of each row: class probabilities, or mean and standard deviation."""
    if task == "classification":
        return np.exp(outputs)
    return np.stack([outputs[..., 0], np.exp(0.5 * outputs[..., 1])], axis=-1)
