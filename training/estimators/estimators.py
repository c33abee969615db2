"""scikit-learn estimators for classification and regression."""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets

from training.estimators.base import Estimator

if TYPE_CHECKING:
    from model_store.inference.prediction import Prediction


class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A Bayesian neural network classifier.

        model = Classifier(method="bhn-realnvp", training={"epochs": 50}).fit(X, y)
        model.predict_proba(X)
        model.uncertainty(X)
        model.publish("churn")

    Args:
        method: a method of docs/methods.md. The default, like other missing settings, depends on
            the data.
        data: keys of a recipe's `[data]` (docs/recipes.md), such as `columns` or `validation`.
        network: keys of `[network]`. If they name a network, they replace the default section;
            otherwise they are merged into it.
        posterior: keys of `[posterior]`.
        training: keys of `[training]`.
        likelihood: keys of `[likelihood]`, for regression.
        serving: keys of `[serving]`.
        start: a trained network that takes unscaled rows (an array). By default, its last layer
            gets a Laplace posterior, and its weights are not trained further.
        random_state: the recipe's seed. An integer makes fits and predictions reproducible; with
            None or a RandomState the seed is random.
        callback: a function called after each epoch with a dictionary of metrics
            (docs/training.md).
        device: `auto`, `cpu` or `cuda`.
        runs: folder for rows, checkpoints and metrics, by default a temporary folder.
        verbose: show progress bars.

    Attributes:
        classes_: sorted classes, without classes that have only one or two rows.
        recipe_: the recipe of the fit.
        history_: metrics of each epoch.
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns, if X is a DataFrame.
    """

    _task = "classification"

    def predict(self, X: Any) -> Shaped[np.ndarray, "N"]:
        """Predict the most probable class for each row."""
        return self._labels(self._predict(X))

    def predict_proba(
        self, X: Any, *, num_samples: int | None = None, seed: int | None = None
    ) -> Float64[np.ndarray, "N C"]:
        """Predict class probabilities, averaged over draws.

        The shape is (N, C), with classes in the order of `classes_`. For `num_samples` and `seed`,
        see `uncertainty`.
        """
        from model_store.scores.classification import Scores

        scores = self._predict(X, num_samples, seed).scores
        assert isinstance(scores, Scores)
        return scores.probabilities[:, np.argsort(self._class_index())]

    def predict_log_proba(
        self, X: Any, *, num_samples: int | None = None, seed: int | None = None
    ) -> Float64[np.ndarray, "N C"]:
        """Return the logarithm of `predict_proba`."""
        return np.log(self.predict_proba(X, num_samples=num_samples, seed=seed))

    def _targets(self, y: np.ndarray) -> np.ndarray:
        check_classification_targets(y)
        labels, index = np.unique(y, return_inverse=True)
        names = np.array(_class_names(labels))
        self.classes_ = labels[np.sort(np.unique(names, return_index=True)[1])]
        if len(self.classes_) < 2:
            raise ValueError(f"y: expected two classes or more, got 1 class, {self.classes_[0]}")
        return names[index]

    def _load(self) -> None:
        super()._load()
        names = self._model.manifest.classes or ()
        self.classes_ = self.classes_[[name in names for name in _class_names(self.classes_)]]

    def _class_index(self) -> Int64[np.ndarray, "C"]:
        """Map each of the model's classes to its index in `classes_`."""
        names = _class_names(self.classes_)
        return np.array([names.index(name) for name in self._model.manifest.classes or ()])

    def _labels(self, prediction: "Prediction") -> Shaped[np.ndarray, "N"]:
        return self.classes_[self._class_index()[prediction.scores.labels]]


class Regressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """A Bayesian neural network regressor.

    It has the parameters and attributes of `Classifier`, except `classes_`.
    """

    _task = "regression"

    def predict(
        self, X: Any, *, num_samples: int | None = None, seed: int | None = None
    ) -> Float64[np.ndarray, "N"]:
        """Predict the mean for each row, in the target's units.

        For `num_samples` and `seed`, see `uncertainty`.
        """
        from model_store.scores.classification import Scores

        scores = self._predict(X, num_samples, seed).scores
        assert not isinstance(scores, Scores)
        return scores.in_units.mean

    def _targets(self, y: np.ndarray) -> np.ndarray:
        return y.astype(np.float64)


def _class_names(labels: np.ndarray) -> list[str]:
    """Convert class labels to the service's class names."""
    from model_store.sources.cells import category_text

    return [category_text(label) for label in labels.tolist()]
