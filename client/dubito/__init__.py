"""A client of Dubito, the prediction service that knows when it doubts.

Where the project is installed with its extra `training`, also its estimators for scikit-learn:
`from dubito import Classifier, Regressor`.
"""

from importlib import import_module
from typing import Any

from dubito.client import AsyncClient, Client
from dubito.errors import (
    Absent,
    AnswerError,
    Conflict,
    DeadlineExceeded,
    DubitoError,
    Forbidden,
    InvalidInput,
    JobFailed,
    NoAnswer,
    NoSpace,
    NotFound,
    NotReady,
    Overloaded,
    ServerError,
    TooLarge,
    Unauthorized,
)
from dubito.predictions import Detector, Predictions
from dubito.results import Job, LabelFigures, LabelsKept, Model, Ranking

__all__ = [
    "Absent",
    "AnswerError",
    "AsyncClient",
    "Client",
    "Conflict",
    "DeadlineExceeded",
    "Detector",
    "DubitoError",
    "Forbidden",
    "InvalidInput",
    "Job",
    "JobFailed",
    "LabelFigures",
    "LabelsKept",
    "Model",
    "NoAnswer",
    "NoSpace",
    "NotFound",
    "NotReady",
    "Overloaded",
    "Predictions",
    "Ranking",
    "ServerError",
    "TooLarge",
    "Unauthorized",
]

ESTIMATORS = ("Classifier", "Regressor")  # of the project, which the client knows nothing of


def __getattr__(name: str) -> Any:
    if name not in ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("training.estimators"), name)
    except ModuleNotFoundError as error:
        wanted = "the project with its extras `training` and `cpu` or `gpu`, from its repository"
        raise ImportError(f"dubito.{name} needs {wanted}: {error}") from error
