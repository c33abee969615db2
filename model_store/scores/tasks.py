"""The predictive distributions for classification and regression."""

from model_store.scores.classification import Classes, Scores
from model_store.scores.predictive import Predictive
from model_store.scores.regression import MixtureScores, Target
from model_store.scores.transforms import Transform
from model_store.types import Task

AnyScores = Scores | MixtureScores

PREDICTIVES: dict[Task, Predictive] = {"classification": Classes(), "regression": Target()}
DETECTED = {task: predictive.score_names for task, predictive in PREDICTIVES.items()}


def get_predictive(task: Task, transform: Transform | None = None) -> Predictive:
    return PREDICTIVES[task] if task == "classification" else Target(transform)
