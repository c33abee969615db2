"""scikit-learn estimators: `Classifier` and `Regressor`."""

from training.estimators.estimators import Classifier, Regressor

__all__ = ["Classifier", "Regressor"]
