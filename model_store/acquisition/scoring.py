"""Scores of a pool's rows, computed with shared draws."""

import numpy as np
from jaxtyping import Float, Float32, Float64

from model_store.inference.model import Model
from model_store.inference.runtime import DrawSet
from model_store.scores.joint import Candidates

# Class shares among the rows, if they differ from the training data
Priors = tuple[float, ...]


def pool_scores(
    model: Model,
    x: Float32[np.ndarray, "N I"],
    draws: DrawSet,
    acquisition: str,
    priors: Priors | None = None,
) -> Float64[np.ndarray, "N"]:
    """Compute each row's acquisition score; for a joint score, the gain without other rows."""
    predictive = model.predictive
    if acquisition in predictive.joint_scores:
        return pool_candidates(model, x, draws, acquisition, priors).gain
    errors = [score for name, score in predictive.jackknife_scores.items() if name == acquisition]
    sums = predictive.sums(_outputs(model, x, draws, priors))
    return predictive.acquisition(predictive.scores(sums, errors), acquisition)


def race_scores(
    model: Model,
    x: Float32[np.ndarray, "N I"],
    draws: DrawSet,
    acquisition: str,
    priors: Priors | None = None,
) -> tuple[Float64[np.ndarray, "N"], Float64[np.ndarray, "N"]]:
    predictive = model.predictive
    sums = predictive.sums(_outputs(model, x, draws, priors))
    errors = [predictive.acquisition_scores[acquisition]]
    return predictive.race(predictive.scores(sums, errors), acquisition)


def pool_candidates(
    model: Model,
    x: Float32[np.ndarray, "N I"],
    draws: DrawSet,
    acquisition: str,
    priors: Priors | None = None,
) -> Candidates:
    predictive = model.predictive
    return predictive.joint_scores[acquisition].from_samples(
        predictive.samples(_outputs(model, x, draws, priors))
    )


def _outputs(
    model: Model, x: Float32[np.ndarray, "N I"], draws: DrawSet, priors: Priors | None
) -> Float[np.ndarray, "K N C"]:
    outputs = model.runtime.run_outputs(x, draws)
    return outputs if priors is None else model.shifted(outputs, priors)
