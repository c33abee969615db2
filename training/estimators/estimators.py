"""`Classifier` and `Regressor`."""

from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets

from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from model_store.sources.columns import category_text
from training.estimators.base import Estimator


class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A Bayesian neural network of classes, which says how far each answer can be trusted.

        model = Classifier(method="bhn-realnvp", training={"epochs": 50}).fit(X, y)
        model.predict_proba(X)
        model.uncertainty(X)
        model.publish("churn")

    Args:
        method: of docs/methods.md. What is not said here follows from the rows.
        data: keys of a recipe's `[data]` (docs/recipes.md), such as `columns` or `validation_rows`.
        network: those of `[network]`; with a network they are all, else they join the default's.
        posterior: those of `[posterior]`.
        training: those of `[training]`.
        likelihood: those of `[likelihood]`, of a regression.
        serving: those of `[serving]`.
        start: a trained network, which takes rows (an array) as they are. Unless method and network
            say otherwise, its last layer gets a posterior and nothing is trained.
        random_state: the recipe's seed, a whole number. Fits and answers replay.
        callback: called after each epoch with its metrics, a dictionary (docs/training.md).
        device: `auto`, `cpu` or `cuda`.
        runs: the folder of rows, checkpoints and metrics, by default a temporary one.
        verbose: whether there are progress bars.

    Attributes:
        classes_: the classes, sorted; those of one or two rows are left out.
        recipe_: what was fitted.
        history_: the metrics of each epoch.
        n_features_in_: columns of X.
        feature_names_in_: their names, of a DataFrame.
    """

    _task = "classification"

    def predict(self, X: Any) -> Shaped[np.ndarray, "N"]:
        """Return the most probable class of each row, (N,)."""
        return self._labels(self._predict(X))

    def predict_proba(
        self, X: Any, *, num_samples: int | None = None, seed: int | None = None
    ) -> Float64[np.ndarray, "N C"]:
        """Return the mean of the draws' class probabilities, (N, C), classes as in `classes_`.

        `num_samples` and `seed` are as of `uncertainty`.
        """
        scores = self._predict(X, num_samples, seed).scores
        assert isinstance(scores, Scores)
        return scores.probabilities[:, np.argsort(self._places())]

    def _targets(self, y: np.ndarray) -> np.ndarray:
        """Return classes as the texts that the service knows them by."""
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y: expected two classes or more, got 1 class, {self.classes_[0]}")
        return np.array([category_text(label) for label in self.classes_.tolist()])[index]

    def _load(self) -> None:
        super()._load()
        known = self._model.manifest.classes or ()
        self.classes_ = self.classes_[
            [category_text(label) in known for label in self.classes_.tolist()]
        ]

    def _places(self) -> Int64[np.ndarray, "C"]:
        """Return where in `classes_` each class of the model is."""
        texts = [category_text(label) for label in self.classes_.tolist()]
        return np.array([texts.index(name) for name in self._model.manifest.classes or ()])

    def _labels(self, prediction: Prediction) -> Shaped[np.ndarray, "N"]:
        return self.classes_[self._places()[prediction.scores.labels]]


class Regressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """A Bayesian neural network of a number, with its uncertainty.

    Parameters and attributes are those of `Classifier`, but for `classes_`.
    """

    _task = "regression"

    def predict(
        self, X: Any, *, num_samples: int | None = None, seed: int | None = None
    ) -> Float64[np.ndarray, "N"]:
        """Return the mean of each row's predictive distribution, (N,), in the target's units.

        `num_samples` and `seed` are as of `uncertainty`.
        """
        scores = self._predict(X, num_samples, seed).scores
        assert not isinstance(scores, Scores)
        return scores.in_units.mean

    def _targets(self, y: np.ndarray) -> np.ndarray:
        return y.astype(np.float64)
