"""Predictions, stored as named arrays."""

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, overload

import numpy as np

from dubito.errors import Absent, ServerError
from dubito.results import Tabular

GLOBAL_FIELDS = (
    *("model", "version", "seed", "fpr", "fdr", "coverage", "confidence", "risk", "priors"),
    *("classes", "columns", "unknown_categories"),
)
# First columns of a table
COLUMN_ORDER = ("ids", "label", "mean", "std", "interval", "p_value", "flag")
CLASS_ARRAYS = ("probabilities", "prediction_set")
CLASSIFICATION_ARRAYS = (
    *("label", "probabilities", "entropy", "expected_entropy", "bald", "bald_corrected"),
    *("mean_std", "variation_ratio", "prediction_set", "abstain", "classes"),
)
REGRESSION_ARRAYS = ("mean", "median", "std", "aleatoric_std", "epistemic_std", "interval")
ABSENCE_REASONS = {
    "abstain": "no `risk` applies: set one",
    "bald_corrected": "requires at least two draws: increase num_samples",
    "epistemic_std": "requires at least two draws: increase num_samples",
    "median": "only available for models with a transformed target",
    "category": "only available for models that are calibrated by class or group",
    "samples": "set return_samples=True; regression has `samples.mean` and `samples.std`",
    "missing": "only available for tables",
    "ids": "only available for jobs with ids",
    "classes": "this version of the service does not return the classes",
}


@dataclass(frozen=True)
class Detector:
    """The results of one detector.

    Attributes:
        score: (N,), larger for more unusual rows.
        p_value: (N,), conformal.
        fired: (N,) boolean, whether the p-value is `fpr` or less.
    """

    score: np.ndarray
    p_value: np.ndarray
    fired: np.ndarray


class Quantity:
    """A descriptor that returns the array named after the attribute."""

    def __init__(self, description: str) -> None:
        self.__doc__ = description

    def __set_name__(self, _: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, predictions: None, _: Any) -> Self: ...

    @overload
    def __get__(self, predictions: "Predictions", _: Any) -> np.ndarray: ...

    def __get__(self, predictions: "Predictions | None", _: Any) -> Self | np.ndarray:
        return self if predictions is None else predictions[self.name]


@dataclass(frozen=True, eq=False, repr=False)
class Predictions(Tabular):
    """Predictions for N rows, in their original order.

    Quantities that an answer lacks, such as `abstain` without a risk, raise `Absent` with the
    reason.

    Attributes:
        arrays: read-only arrays by name.
    """

    arrays: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.arrays["flag"])

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array by its name, e.g. `detectors.residual.score`."""
        if not isinstance(name, str):
            raise TypeError(
                f"expected the name of an array, such as 'label', got {name!r}; use to_pandas() "
                "to select rows"
            )
        if name not in self.arrays:
            raise Absent(f"{name}: {self._absence_reason(name)}")
        return self.arrays[name]

    __iter__ = None  # Iteration over names or rows would be ambiguous.

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def __repr__(self) -> str:
        origin = f"{self.model} version {self.version}, seed {self.seed}"
        return f"<Predictions of {len(self)} rows by {origin}: {int(self.flag.sum())} flagged>"

    def __reduce__(self) -> tuple[Any, ...]:
        # A `MappingProxyType` cannot be pickled.
        return _freeze, (dict(self.arrays),)

    @property
    def model(self) -> str:
        return str(self.arrays["model"])

    @property
    def version(self) -> str:
        """The model version that made the predictions."""
        return str(self.arrays["version"])

    @property
    def seed(self) -> int:
        """The random seed for the draws. All rows share the same draws."""
        return int(self.arrays["seed"])

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the column order of `probabilities`."""
        return tuple(self["classes"].tolist())

    @property
    def is_classification(self) -> bool:
        """True if the model is a classifier."""
        return "probabilities" in self.arrays

    # All tasks
    ids = Quantity("(N,) strings: the ids from the job's request.")
    num_samples = Quantity("(N,) integers: the number of draws.")
    flag = Quantity("(N,) boolean: whether the row is unusual.")
    p_value = Quantity("(N,): conformal p-value; small for unusual rows.")
    category = Quantity('(N,) strings: the calibration category, or "" if unknown.')
    missing = Quantity("(N, C) boolean, for tables: missing cells. See `missing_columns`.")
    samples = Quantity("(N, K, C): each draw's probabilities, with `return_samples`.")

    # Classification
    label = Quantity("(N,) strings: the most probable class.")
    probabilities = Quantity("(N, C): the class probabilities, averaged over draws.")
    entropy = Quantity("(N,): the total uncertainty, from 0 to log C.")
    expected_entropy = Quantity("(N,): the mean entropy of the draws.")
    bald = Quantity("(N,): mutual information between label and draw, in nats.")
    bald_corrected = Quantity("(N,): `bald`, corrected for the bias of few draws.")
    mean_std = Quantity(
        "(N,): the standard deviation of probabilities over draws, averaged over classes."
    )
    variation_ratio = Quantity("(N,): 1 - the largest probability.")
    prediction_set = Quantity("(N, C) boolean: the classes in the prediction set. See `sets`.")
    abstain = Quantity("(N,) boolean: whether to reject the row.")

    # Regression
    mean = Quantity("(N,): the predictive mean.")
    median = Quantity("(N,): the predictive median, if the target is transformed.")
    std = Quantity("(N,): the predictive standard deviation.")
    aleatoric_std = Quantity("(N,): the standard deviation due to noise in the data.")
    epistemic_std = Quantity("(N,): the standard deviation between draws.")
    interval = Quantity(
        "(N, 2): the prediction interval; infinite if there are too few calibration rows."
    )

    @property
    def detectors(self) -> Mapping[str, Detector]:
        """Each detector's results, by detector name."""
        arrays = self._group("detectors")
        names = dict.fromkeys(name.partition(".")[0] for name in arrays)
        parts = ("score", "p_value", "fired")
        return {name: Detector(*(arrays[f"{name}.{part}"] for part in parts)) for name in names}

    @property
    def standard_error(self) -> Mapping[str, np.ndarray]:
        """The Monte Carlo standard errors of each score, by name. Each array has shape (N,)."""
        return self._group("standard_error")

    def _group(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays `name.*` by the rest of their names."""
        parts = [(full.partition("."), array) for full, array in self.arrays.items()]
        return {rest: array for (first, _, rest), array in parts if first == name}

    def sets(self) -> list[list[str]]:
        """Return each row's prediction set as a list of class names."""
        classes = np.array(self.classes)
        return [classes[inside].tolist() for inside in self.prediction_set]

    def missing_columns(self) -> list[list[str]]:
        """Return the names of each row's missing columns.

        The predictions use the usual values of these columns.
        """
        columns = self["columns"]
        return [columns[is_missing].tolist() for is_missing in self.missing]

    def table(self) -> dict[str, np.ndarray]:
        """Return a table with columns such as `label`, `probabilities.cat` and `interval.low`.

        Arrays with more than two dimensions, such as `samples`, are excluded.
        """
        columns: dict[str, np.ndarray] = {}
        names = [name for name in self.arrays if name not in GLOBAL_FIELDS]
        order = {name: index for index, name in enumerate(COLUMN_ORDER)}
        for name in sorted(names, key=lambda n: order.get(n, len(order))):
            array = self.arrays[name]
            if array.ndim == 1:
                columns["id" if name == "ids" else name] = array
            elif name == "missing":
                columns[name] = np.array([", ".join(names) for names in self.missing_columns()])
            elif array.ndim == 2:
                parts = self._column_suffixes(name, array.shape[1])
                columns |= {f"{name}.{part}": array[:, i] for i, part in enumerate(parts)}
        return columns

    def _column_suffixes(self, name: str, count: int) -> Sequence[object]:
        if name in CLASS_ARRAYS and "classes" in self.arrays:
            return self.classes
        return ("low", "high") if name == "interval" else range(count)

    def _absence_reason(self, name: str) -> str:
        if name in CLASSIFICATION_ARRAYS and not self.is_classification:
            return f"{self.model} is a regression model"
        if name in REGRESSION_ARRAYS and self.is_classification:
            return f"{self.model} is a classification model"
        if name in ABSENCE_REASONS:
            return ABSENCE_REASONS[name]
        if name.startswith("standard_error."):
            return "requires more draws"
        return f"expected one of {sorted(self.arrays)}"


def read_predictions(content: bytes) -> Predictions:
    """Read predictions from an npz file."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return _freeze({name: arrays[name] for name in arrays.files})
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        detail = f"the service returned an invalid npz file ({len(content)} bytes)"
        raise ServerError(200, detail) from error


def concatenate(parts: Sequence[Predictions]) -> Predictions:
    """Concatenate predictions made with the same version and draws."""
    if len(parts) == 1:
        return parts[0]
    arrays = {}
    for name, array in parts[0].arrays.items():
        if name == "unknown_categories":
            array = np.sum([part[name] for part in parts], axis=0)
        elif name not in GLOBAL_FIELDS:
            if not all(name in part for part in parts):
                continue
            array = np.concatenate([part[name] for part in parts])
        arrays[name] = array
    return _freeze(arrays)


def _freeze(arrays: dict[str, np.ndarray]) -> Predictions:
    for array in arrays.values():
        array.flags.writeable = False
    return Predictions(MappingProxyType(arrays))
