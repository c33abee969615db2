"""Packages whose own `__init__` wants far more than what is compared needs."""

import importlib
import importlib.util
import sys
from types import ModuleType

SHALLOW = (
    "torch_uncertainty",
    "torch_uncertainty.metrics",
)  # else they bring a trainer, data sets and torchvision


def torch_uncertainty() -> ModuleType:
    """Return torch_uncertainty's metrics of classification."""
    for name in SHALLOW:
        if name not in sys.modules:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.submodule_search_locations is None:
                raise ModuleNotFoundError(name)
            package = ModuleType(name)
            package.__path__ = list(spec.submodule_search_locations)
            sys.modules[name] = package
    return importlib.import_module("torch_uncertainty.metrics.classification")
