"""From a network's outputs to sums over draws, scores and samples, by task."""

import numpy as np
from jaxtyping import Float, Float32, Int64

from model_store.manifest import Task
from model_store.mixture import MIXTURE_SCORE_NAMES, MixtureScores, MixtureSums, mixture_scores
from model_store.scores import SCORE_NAMES, PredictiveSums, Scores, predictive_scores

AnySums = PredictiveSums | MixtureSums
AnyScores = Scores | MixtureScores

DETECTED: dict[Task, tuple[str, ...]] = {"classification": SCORE_NAMES, "regression": MIXTURE_SCORE_NAMES}


def sums_of(task: Task, outputs: Float[np.ndarray, "K N C"], first_draw: int = 0) -> AnySums:
    """Return the sums over draws `first_draw` and on."""
    if task == "classification":
        return PredictiveSums.from_log_probs(outputs, first_draw)
    return MixtureSums.from_outputs(outputs, first_draw)


def merged(sums: AnySums, more: AnySums) -> AnySums:
    """Return the sums over the draws of both, which are of the same task."""
    if isinstance(sums, PredictiveSums):
        assert isinstance(more, PredictiveSums)
        return sums.merge(more)
    assert isinstance(more, MixtureSums)
    return sums.merge(more)


def scores_of(sums: AnySums, standard_errors: bool = True) -> AnyScores:
    """Return the scores of the draws summed; raises ValueError where there is none."""
    if isinstance(sums, PredictiveSums):
        return predictive_scores(sums, standard_errors)
    return mixture_scores(sums, standard_errors)


def labels_of(scores: AnyScores) -> Int64[np.ndarray, "N"]:
    """Return the number of each row's most probable class; 0 in a regression."""
    return (
        scores.probabilities.argmax(axis=1) if isinstance(scores, Scores) else np.zeros(len(scores.mean), dtype=int)
    )


def samples_of(task: Task, outputs: Float32[np.ndarray, "K N C"]) -> Float32[np.ndarray, "K N C"]:
    """Return what each draw says of each row: class probabilities, or mean and standard deviation."""
    if task == "classification":
        return np.exp(outputs)
    return np.stack([outputs[..., 0], np.exp(0.5 * outputs[..., 1])], axis=-1)
