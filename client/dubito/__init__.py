"""A client of Dubito, the prediction service that knows when it doubts."""

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
