"""Methods: a module for each family of approximate posteriors, found by being here."""

import importlib
import pkgutil

from training.posteriors.base import (
    METHODS,
    FactorialGaussian,
    LocationScale,
    Method,
    Posterior,
    noise,
    step_noise,
)

__all__ = [
    "METHODS",
    "FactorialGaussian",
    "LocationScale",
    "Method",
    "Posterior",
    "noise",
    "step_noise",
]

for found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{found.name}")
