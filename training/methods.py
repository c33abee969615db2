"""All methods by name; each family of posteriors registers its own."""

from training.bayes import dropout, gaussian, hypernetwork, laplace, members
from training.bayes.posterior import METHODS, Method

__all__ = ["METHODS", "Method", "dropout", "gaussian", "hypernetwork", "laplace", "members"]
