"""Methods: a module for each family of approximate posteriors, found by being here."""

import importlib
import pkgutil

from training.posteriors.base import METHODS as METHODS
from training.posteriors.base import FactorialGaussian as FactorialGaussian
from training.posteriors.base import LocationScale as LocationScale
from training.posteriors.base import Method as Method
from training.posteriors.base import Posterior as Posterior
from training.posteriors.base import noise as noise
from training.posteriors.base import step_noise as step_noise

for found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{found.name}")
