"""scikit-learn estimators for classification and regression.

Parameters are the sections of a recipe. A fitted estimator exports and calibrates its model like a
published version, and predicts with the service's code. With the same seed, predictions are
bitwise identical to those of `POST /predict`.
"""

import json
import operator
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias
from unicodedata import normalize

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import assert_all_finite, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from model_store.errors import InvalidInput
from model_store.types import Task

# Methods import slow modules, so that `from dubito import Classifier` is fast.
if TYPE_CHECKING:
    import pandas
    from torch import nn

    from model_store.artifacts.manifest import Manifest
    from model_store.artifacts.store import ModelStore
    from model_store.inference.prediction import Prediction
    from training.fitting.run import Callback
    from training.publishing.draft import Draft

Keys: TypeAlias = dict[str, Any] | None  # of a recipe's section

SECTIONS = ("data", "network", "posterior", "training", "likelihood", "serving")


class Estimator(BaseEstimator):  # type: ignore[misc]
    _task: ClassVar[Task]
    _targets: Callable[[np.ndarray], np.ndarray]

    def __init__(
        self,
        method: str | None = None,
        *,
        data: Keys = None,
        network: Keys = None,
        posterior: Keys = None,
        training: Keys = None,
        likelihood: Keys = None,
        serving: Keys = None,
        start: "nn.Module | None" = None,
        random_state: "int | np.random.RandomState | None" = 0,
        callback: "Callback | None" = None,
        device: str = "auto",
        runs: str | Path | None = None,
        verbose: bool = False,
    ) -> None:
        self.method = method
        self.data = data
        self.network = network
        self.posterior = posterior
        self.training = training
        self.likelihood = likelihood
        self.serving = serving
        self.start = start
        self.random_state = random_state
        self.callback = callback
        self.device = device
        self.runs = runs
        self.verbose = verbose

    def set_params(self, **params: Any) -> Self:
        """Set parameters, or a section's keys, such as `training__epochs=50`."""
        keys = {name: value for name, value in params.items() if "__" in name}
        super().set_params(**{name: params[name] for name in params.keys() - keys})
        for name, value in keys.items():
            section, _, key = name.partition("__")
            if section not in SECTIONS:
                raise ValueError(f"{name}: expected a key of {', '.join(SECTIONS)}")
            setattr(self, section, {**(getattr(self, section) or {}), key: value})
        return self

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit and calibrate the model.

        Not all rows are used for training. One row in 20 is a test row for `report`, or 50 rows in
        smaller tables, but never more than a fifth. Others are used for validation and calibration
        (docs/your-data.md). The logger `dubito.training` logs the settings chosen for the data.

        Args:
            X: (N, I) numbers, NaN if missing; a pandas or polars DataFrame of numbers, categories
                and times; or (N, ...) numbers, such as images.
            y: (N,) classes or numbers.
            sample_weight: (N,) weights of the rows in training, for tables. Rows for validation,
                calibration and tests count equally.

        Raises:
            ValueError: if the rows or parameters are invalid.
            Diverged: if the loss is no longer finite.
        """
        from torch import nn

        from training.data import load
        from training.estimators.recipes import make_recipe, write_rows
        from training.fit import fit
        from training.publishing.publish import assemble

        if not isinstance(self.start, nn.Module | None):
            raise ValueError(f"start: expected a torch.nn.Module, got {self.start!r:.80}")
        name = getattr(y, "name", None) or None  # polars names a Series ""
        X, y = self._validate(X, y, reset=True)
        y = self._targets(y)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
        runs = TemporaryDirectory(prefix="dubito-") if self.runs is None else nullcontext(self.runs)
        with _value_errors(), runs as folder_name:
            folder = Path(folder_name)
            parameters = self.get_params(deep=False)
            section = write_rows(X, y, name, self._names, parameters, folder, sample_weight)
            recipe = make_recipe(self._task, parameters, section, folder)
            if recipe.network.encoder is not None and self.runs is None:
                raise InvalidInput("runs", "a folder in which to store the encoder", "none")
            rows = load(recipe, folder)
            if (rows.train.x == rows.train.x[0]).all():
                raise InvalidInput("X", "a column with different values", "constant columns")
            result = fit(
                recipe,
                rows,
                device=self.device,
                runs=folder,
                quiet=not self.verbose,
                callback=self.callback,
            )
            self._draft = assemble(result, only_constant=True)
            result.discard_checkpoint()
            assert result.folder is not None
            metrics = result.folder / "metrics.jsonl"
            epochs = metrics.read_text().splitlines() if metrics.exists() else []
            self._result = replace(result, folder=None)
            self.recipe_, self.history_ = result.recipe, [json.loads(line) for line in epochs]
            self._load()
        return self

    def uncertainty(
        self,
        X: Any,
        *,
        num_samples: int | None = None,
        seed: int | None = None,
        fpr: float | None = None,
        coverage: float = 0.95,
    ) -> "pandas.DataFrame":
        """Predict with uncertainty scores, flags, and prediction sets or intervals.

        Args:
            X: rows in the format of `fit`.
            num_samples: number of posterior draws, by default the recipe's `serving.draws`.
            seed: seed of the draws, by default `random_state`.
            fpr: false-positive rate of `flag`, in (0, 1); by default 0.05, or the smallest that the
                model supports.
            coverage: coverage of prediction sets and intervals, in (0, 1).

        Returns:
            One row per input, with the service's field names (docs/api.md) as columns. Classifiers
            return `label`, `probabilities.CLASS`, `prediction_set.CLASS`, and scores such as
            `entropy` and `bald` in nats. Regressors return `mean`, `std`, `interval.low` and
            `interval.high` in the target's units. Both return `flag`, `p_value`, and the p-value
            and score of each detector. Scores are higher for more uncertain rows. P-values are
            lower for rows more unlike the training rows.

        Raises:
            ValueError: if the rows or options are invalid.
            ImportError: if pandas is not installed.
        """
        import pandas

        from model_store.inference.answers import result_columns
        from model_store.inference.frames import decide_as_served

        prediction = self._predict(X, num_samples, seed)
        with _value_errors():
            decision = decide_as_served(self._model, prediction, fpr, coverage)
        labels = self._labels(prediction) if isinstance(self, Classifier) else None
        columns = result_columns(self._model.manifest, prediction, decision, labels)
        return pandas.DataFrame(columns, index=X.index if hasattr(X, "iloc") else None)

    def publish(
        self,
        name: str,
        store: "ModelStore | Path | str | None" = None,
        *,
        alias: str = "latest",
        anyway: bool = False,
    ) -> "Manifest":
        """Publish the model as the next version of `name`.

        Args:
            store: the model store, by default DUBITO_STORE.
            alias: the alias that moves to the new version.
            anyway: publish the model of a table even if it is worse than a constant.

        Raises:
            ValueError: if the name is invalid.
            GateError: if the model is worse than a constant.
            PreflightError: if the service could not load the version.
        """
        from model_store.artifacts.store import ModelStore, store_from_environment
        from training.fit import publish

        check_is_fitted(self)
        if not isinstance(store, ModelStore):
            store = store_from_environment() if store is None else ModelStore(Path(store))
        store.storage.check_writable()
        draft = self._with_baselines()
        with _value_errors():
            return publish(self._result, store, name=name, alias=alias, anyway=anyway, draft=draft)

    def report(self) -> str:
        """Render the model's test metrics, baselines and warnings as HTML."""
        check_is_fitted(self)
        return self._summary(self._with_baselines())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        tags.input_tags.three_d_array = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "recipe_")

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key != "_model"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__sklearn_is_fitted__():
            self._load()

    def _html_repr(self) -> str:
        html: str = super()._html_repr()
        return html + self._summary(self._draft) if self.__sklearn_is_fitted__() else html

    def _validate(self, X: Any, y: Any = "no_validation", *, reset: bool) -> Any:
        from model_store.inference.frames import is_frame

        is_text = "text" in (self.data or {})
        X = X.toarray() if issparse(X) else X
        if str(getattr(y, "dtype", "")) == "boolean" and not y.hasnans:
            y = y.to_numpy(dtype=bool)
        if not is_frame(X) or (self.start is not None and not is_text):
            return validate_data(
                self,
                X,
                y,
                reset=reset,
                ensure_all_finite="allow-nan",
                allow_nd=True,
                ensure_min_samples=2 if reset else 1,
            )
        validate_data(self, X, y, reset=reset, skip_check_array=True)
        if not reset:
            return X
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        assert_all_finite(y)
        return X, y

    @property
    def _names(self) -> list[str] | None:
        return [*self.feature_names_in_] if hasattr(self, "feature_names_in_") else None

    def _load(self) -> None:
        from model_store.artifacts.store import ModelStore
        from model_store.inference.model import NEEDED, Model

        folder = Path(mkdtemp(prefix="dubito-"))
        store = ModelStore(folder)
        manifest = store.publish(self.recipe_.name, self._draft.description, self._draft.files)
        self._model = Model.load(store.open(manifest.name, manifest.version, NEEDED))
        weakref.finalize(self._model, shutil.rmtree, folder, ignore_errors=True)

    def _predict(
        self, X: Any, num_samples: int | None = None, seed: int | None = None
    ) -> "Prediction":
        from model_store.inference.frames import predict

        check_is_fitted(self)
        X = self._validate(X, reset=False)
        seed = self.recipe_.seed if seed is None else operator.index(seed)
        with _value_errors():
            return predict(self._model, X, self._names, num_samples, seed)

    def _summary(self, draft: "Draft") -> str:
        from training.evaluation.evaluate import render
        from training.publishing.baselines import table

        description = draft.description
        baselines = table(description) if len(description.baselines) > 1 else []
        return render("summary.html", description=description, baselines=baselines)

    def _with_baselines(self) -> "Draft":
        from training.publishing.baselines import add_baselines

        if len(self._draft.description.baselines) < 2:
            self._draft = add_baselines(self._draft, self._result)
        return self._draft


@contextmanager
def _value_errors() -> Iterator[None]:
    try:
        yield
    except InvalidInput as error:
        raise ValueError(str(error)) from error


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
    from model_store.sources.cells import category_text

    return [normalize("NFC", category_text(label)) for label in labels.tolist()]
