"""Python client for the Dubito prediction service.

With the extras `cpu` (or `gpu`) and `training`, the package also provides scikit-learn estimators:
`from dubito import Classifier, Regressor`.
"""

# ruff: noqa: F403, F405

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dubito.client import *
    from dubito.errors import *
    from dubito.predictions import *
    from dubito.results import *

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
    "KeptLabel",
    "LabelFigures",
    "LabelsDeleted",
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

_MODULES = ("client", "errors", "predictions", "results")
_ESTIMATORS = ("Classifier", "Regressor")  # defined in `training.estimators`


def __getattr__(name: str) -> Any:
    """Import public names on first use, to keep `dubito --help` fast."""
    if name in _MODULES:
        return import_module(f"dubito.{name}")
    if name in __all__:
        modules = (import_module(f"dubito.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    if name not in _ESTIMATORS:
        raise AttributeError(f"module 'dubito' has no attribute {name!r}")
    try:
        return getattr(import_module("training.estimators"), name)
    except ModuleNotFoundError as error:
        hint = f"dubito.{name} needs extras: pip install 'dubito[cpu,training]'"
        raise ImportError(f"{hint} ({error})") from error


def __dir__() -> list[str]:
    return [*__all__, *_ESTIMATORS]
