"""scikit-learn's estimators, which `dubito` hands on: `Classifier` and `Regressor`."""

from training.estimators.estimators import Classifier, Regressor

__all__ = ["Classifier", "Regressor"]
