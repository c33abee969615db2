"""The predictive distributions for classification and regression."""

import numpy as np
from jaxtyping import Float64

from model_store.scores.classification import Classes, Scores
from model_store.scores.regression import MixtureScores, Target
from model_store.scores.transforms import Transform
from model_store.types import Task

AnyScores = Scores | MixtureScores
Predictive = Classes | Target

PREDICTIVES: dict[Task, Predictive] = {"classification": Classes(), "regression": Target()}
DETECTED = {task: predictive.score_names for task, predictive in PREDICTIVES.items()}


def get_predictive(task: Task, transform: Transform | None = None) -> Predictive:
    return PREDICTIVES[task] if task == "classification" else Target(transform)


def race_scores(
    scores: AnyScores, score: str
) -> tuple[Float64[np.ndarray, "N"], Float64[np.ndarray, "N"]]:
    """Return a score and its standard errors, which require at least `MIN_SPREAD_GROUPS` draws."""
    reported = scores.in_units
    assert reported.standard_error is not None
    return reported.by_name()[score], reported.standard_error[score]
