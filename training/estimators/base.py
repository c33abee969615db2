"""What the estimators share: a recipe's sections as parameters, a fit by `training.fit`, and
answers from the graphs and by the code that serve.

What is fitted is exported and calibrated as a version is, so answers are, bit for bit, those of
`POST /predict` for the same seed once it is published.
"""

import base64
import json
import operator
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Shaped
from sklearn.base import BaseEstimator
from sklearn.utils import assert_all_finite, check_consistent_length, column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from model_store.artifacts.manifest import Description, Manifest
from model_store.artifacts.place import store_from_environment
from model_store.artifacts.store import LATEST, ModelStore
from model_store.conformal.calibration import DEFAULT_COVERAGE, DEFAULT_FPR
from model_store.errors import InvalidInput
from model_store.inference.answers import result_columns
from model_store.inference.frames import decide_as_served, is_frame, predict, to_table
from model_store.inference.model import NEEDED, Model
from model_store.inference.prediction import Prediction
from model_store.types import Task
from training.data import load
from training.estimators.recipes import make_recipe, write_arrays, write_table
from training.evaluation.page import render
from training.fit import fit, publish
from training.fitting.plots import draw_run, render_png
from training.fitting.run import Callback
from training.publishing.baselines import add_baselines, lines
from training.publishing.draft import Draft
from training.publishing.publish import assemble_without_baselines
from training.recipe import DataSection

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

AnyEstimator = TypeVar("AnyEstimator", bound="Estimator")
Keys: TypeAlias = dict[str, Any] | None  # of a recipe's section

OF_ROWS = ("source", "target")  # keys of [data] that X and y say


class Estimator(BaseEstimator):  # type: ignore[misc]
    _task: ClassVar[Task]

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
        start: nn.Module | None = None,
        random_state: int = 0,
        callback: Callback | None = None,
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

    def fit(self: AnyEstimator, X: Any, y: Any) -> AnyEstimator:
        """Fit rows, and calibrate on some of them that are held out.

        A fifth of the rows tests; of the others some validate and calibrate (docs/your-data.md).
        The logger `dubito.training` says what else follows from the rows.

        Args:
            X: (N, I) numbers, NaN where one is missing; a DataFrame of pandas or polars, of
                numbers, categories and times; or (N, ...) numbers, such as images.
            y: (N,) classes or numbers.

        Raises:
            ValueError: naming what of the rows or parameters cannot be used.
            Diverged: if training leaves the range of finite numbers.
        """
        if not isinstance(self.start, nn.Module | None):
            raise ValueError(f"start: expected a torch.nn.Module, got {self.start!r:.80}")
        name = getattr(y, "name", None)
        X, y = self._checked(X, y, reset=True)
        y = self._targets(y)
        with _value_errors(), _folder(self.runs) as folder:
            section = self._keep(X, y, name, folder)
            recipe = make_recipe(self._task, self.get_params(deep=False), section, folder)
            if recipe.network.encoder is not None and self.runs is None:
                raise InvalidInput("runs", "a folder, where the encoder is kept", "none")
            fitted = fit(
                recipe,
                load(recipe, folder),
                device=self.device,
                runs=folder,
                quiet=not self.verbose,
                callback=self.callback,
            )
            self._draft = assemble_without_baselines(fitted)
            fitted.discard_checkpoint()
            assert fitted.folder is not None
            metrics = fitted.folder / "metrics.jsonl"
            told = metrics.read_text().splitlines() if metrics.exists() else []
            self._fitted = replace(fitted, folder=None)
            self.recipe_, self.history_ = fitted.recipe, [json.loads(line) for line in told]
            self._load()
        return self

    def uncertainty(
        self,
        X: Any,
        *,
        num_samples: int | None = None,
        seed: int | None = None,
        fpr: float = DEFAULT_FPR,
        coverage: float = DEFAULT_COVERAGE,
    ) -> "pandas.DataFrame":
        """Return what the service says of rows, by its names (docs/api.md), a row for each.

        Args:
            X: rows, as of `fit`.
            num_samples: posterior draws, by default the recipe's `serving.draws`.
            seed: of the draws, by default `random_state`.
            fpr: false-positive rate of `flag`, in (0, 1).
            coverage: of prediction sets and intervals, in (0, 1).

        Returns:
            Of a classification `label`, `probabilities.CLASS`, `entropy`, `bald` and others, in
            nats, and `prediction_set.CLASS`; of a regression `mean`, `std` and others, and
            `interval.low` and `interval.high`, in the target's units. Of both `flag`, `p_value`,
            and those of each detector. More of a score is more uncertain, less of a p-value is more
            unlike the training rows.

        Raises:
            ValueError: if rows or options cannot be used.
            ImportError: if pandas is not installed.
        """
        import pandas

        prediction = self._predict(X, num_samples, seed)
        with _value_errors():
            prediction, decision = decide_as_served(self._model, prediction, fpr, coverage)
        manifest = self._model.manifest
        columns = result_columns(manifest, prediction, decision, self._labels(prediction))
        return pandas.DataFrame(columns, index=X.index if hasattr(X, "iloc") else None)

    def publish(
        self,
        name: str,
        store: ModelStore | Path | str | None = None,
        *,
        alias: str = LATEST,
        anyway: bool = False,
    ) -> Manifest:
        """Publish the model as the next version of `name`, by default in DUBITO_STORE.

        Raises:
            ValueError: if the name is not fit for a model.
            GateError: of a table's model that is worse than a constant, unless told `anyway`.
            PreflightError: if the service could not load it.
        """
        check_is_fitted(self)
        if not isinstance(store, ModelStore):
            store = store_from_environment() if store is None else ModelStore(Path(store))
        store.storage.check_writable()
        draft = self._with_baselines()
        with _value_errors():
            return publish(self._fitted, store, name=name, alias=alias, anyway=anyway, draft=draft)

    def plot(self) -> "Figure":
        """Return pyplot's figure of the fit, epoch by epoch."""
        import matplotlib.pyplot as plt

        check_is_fitted(self)
        if not self.history_:
            raise ValueError(f"plot: expected a fit of some epochs, got one of {self._method}")
        figure = plt.figure()
        draw_run(figure, self.history_, self._method)
        return figure

    def report(self) -> str:
        """Return HTML of the model's figures on its test rows, those of plain models, and the
        warnings."""
        check_is_fitted(self)
        return summary(self._with_baselines().description)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.three_d_array = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "recipe_")

    def __getstate__(self) -> dict[str, Any]:
        return {key: of for key, of in super().__getstate__().items() if key != "_model"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__sklearn_is_fitted__():
            self._load()

    def _html_repr(self) -> str:
        html: str = super()._html_repr()
        if not self.__sklearn_is_fitted__():
            return html
        parts = [summary(self._draft.description)]
        if self.history_:
            from matplotlib.figure import Figure

            figure = Figure()
            draw_run(figure, self.history_, self._method)
            data = base64.b64encode(render_png(figure, dpi=60)).decode()
            parts.append(f'<img alt="the fit, by epochs" src="data:image/png;base64,{data}">')
        return html + "".join(parts)

    @property
    def _method(self) -> str:
        method: str = self.recipe_.method
        return method

    # From rows to a recipe

    def _checked(self, X: Any, y: Any = "no_validation", *, reset: bool) -> Any:
        """Return rows as an array or DataFrame, and with targets these as an array."""
        is_text = "text" in (self.data or {})
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

    def _keep(self, X: Any, y: np.ndarray, name: object, folder: Path) -> DataSection:
        """Write rows to a file in a folder, and return the `[data]` that names it."""
        told = {**(self.data or {})}
        if "tokenizer" in told:
            told["tokenizer"] = str(Path(told["tokenizer"]).absolute())
        for key in OF_ROWS:
            if key in told:
                raise InvalidInput(f"data.{key}", "none, since X and y say it", repr(told[key]))
        if not is_frame(X) and (X.ndim > 2 or self.start is not None):
            return write_arrays(X, y, told, folder)
        table = to_table(X, self._names)
        kinds = {} if is_frame(X) else dict.fromkeys(table.column_names, "numeric")
        return write_table(table, y, name, kinds, told, folder)

    @property
    def _names(self) -> list[str] | None:
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else names.tolist()

    def _targets(self, y: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    # From rows to what is said of them

    def _load(self) -> None:
        folder = Path(mkdtemp(prefix="dubito-"))
        store = ModelStore(folder)
        manifest = store.publish(self.recipe_.name, self._draft.description, self._draft.files)
        self._model = Model.load(store.open(manifest.name, manifest.version, NEEDED))
        weakref.finalize(self._model, shutil.rmtree, folder, ignore_errors=True)

    def _predict(
        self, X: Any, num_samples: int | None = None, seed: int | None = None
    ) -> Prediction:
        check_is_fitted(self)
        X = self._checked(X, reset=False)
        seed = self.recipe_.seed if seed is None else operator.index(seed)
        with _value_errors():
            return predict(self._model, X, self._names, num_samples, seed)

    def _labels(self, prediction: Prediction) -> Shaped[np.ndarray, "N"] | None:  # noqa: ARG002
        return None

    def _with_baselines(self) -> Draft:
        if not self._draft.description.baselines:
            self._draft = add_baselines(self._draft, self._fitted)
        return self._draft


def summary(description: Description) -> str:
    baselines = lines(description) if description.baselines else []
    return render("summary.html", description=description, baselines=baselines)


@contextmanager
def _folder(runs: str | Path | None) -> Iterator[Path]:
    if runs is not None:
        yield Path(runs)
        return
    with TemporaryDirectory(prefix="dubito-") as folder:
        yield Path(folder)


@contextmanager
def _value_errors() -> Iterator[None]:
    """Raise what scikit-learn expects of values that cannot be used."""
    try:
        yield
    except InvalidInput as error:
        raise ValueError(str(error)) from error
