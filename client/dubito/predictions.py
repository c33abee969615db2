"""Predictions: a frozen record of arrays by name."""

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
    *("classes", "unknown_categories"),
)
COLUMN_ORDER = (
    "ids",
    "label",
    "mean",
    "std",
    "interval",
    "p_value",
    "flag",
)  # first columns of a table
CLASS_ARRAYS = ("probabilities", "prediction_set")
CLASSIFICATION_ARRAYS = (
    *("label", "probabilities", "entropy", "expected_entropy", "bald", "bald_corrected"),
    *("mean_std", "variation_ratio", "prediction_set", "abstain", "classes"),
)
REGRESSION_ARRAYS = ("mean", "median", "std", "aleatoric_std", "epistemic_std", "interval")
ABSENCE_REASONS = {
    "abstain": "no `risk` applies: set one",
    "bald_corrected": "it needs at least two draws: increase num_samples",
    "epistemic_std": "it needs at least two draws: increase num_samples",
    "median": "only models with a transformed target have it",
    "category": "only models that are calibrated by class or group have it",
    "samples": "set return_samples=True; regression has `samples.mean` and `samples.std`",
    "ids": "only jobs with ids have it, not `predict`",
    "classes": "this version of the service does not send them",
}


@dataclass(frozen=True)
class Detector:
    """Results of a detector.

    Attributes:
        score: (N,), larger for rows that are more unlike the data.
        p_value: (N,), conformal.
        fired: (N,) boolean, whether the p-value is `fpr` or less.
    """

    score: np.ndarray
    p_value: np.ndarray
    fired: np.ndarray


class Quantity:
    """A descriptor that returns an array of the predictions by name."""

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
    """Predictions of N rows in order, in nats or the target's units.

    Quantities that an answer lacks, such as `abstain` without a risk, raise `Absent` with the
    reason.

    Attributes:
        arrays: all read-only arrays of the answer by name.
    """

    arrays: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.arrays["flag"])

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array by its name, such as `detectors.residual.score`."""
        if not isinstance(name, str):
            raise TypeError(
                f"expected the name of an array, such as 'label', got {name!r}; rows are in "
                "to_pandas()"
            )
        if name not in self.arrays:
            raise Absent(f"{name}: {self._absence_reason(name)}")
        return self.arrays[name]

    __iter__ = None  # It is ambiguous: some users expect names, others rows.

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def __repr__(self) -> str:
        origin = f"{self.model} version {self.version}, seed {self.seed}"
        return f"<Predictions of {len(self)} rows by {origin}: {int(self.flag.sum())} flagged>"

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only view of the arrays cannot be sent to another process.
        return _freeze, (dict(self.arrays),)

    @property
    def model(self) -> str:
        return str(self.arrays["model"])

    @property
    def version(self) -> str:
        """The version that predicted all rows."""
        return str(self.arrays["version"])

    @property
    def seed(self) -> int:
        """The seed of the draws that all rows share. It replays the answer for the same rows."""
        return int(self.arrays["seed"])

    @property
    def classes(self) -> tuple[str, ...]:
        """The C classes, in the order of `probabilities` and `prediction_set`."""
        return tuple(self["classes"].tolist())

    @property
    def is_classification(self) -> bool:
        """Whether the answer has probabilities of classes instead of means."""
        return "probabilities" in self.arrays

    # All tasks
    ids = Quantity("(N,) strings: the ids from the request of a job.")
    num_samples = Quantity("(N,) integers: the draws that each row used.")
    flag = Quantity("(N,) boolean: whether the row is unlike the data.")
    p_value = Quantity("(N,): conformal p-value; small if the row is unlike the data.")
    category = Quantity('(N,) strings: the category within which the row is ranked, "" if unknown.')
    samples = Quantity("(N, K, C): each draw's probabilities, with `return_samples`.")

    # Classification
    label = Quantity("(N,) strings: the most probable class.")
    probabilities = Quantity("(N, C): the mean of the draws' probabilities.")
    entropy = Quantity("(N,): the total uncertainty, from 0 to log C.")
    expected_entropy = Quantity("(N,): the mean entropy of single draws.")
    bald = Quantity("(N,): the disagreement of the draws, which more labels could reduce.")
    bald_corrected = Quantity("(N,): `bald` without the bias of few draws.")
    mean_std = Quantity(
        "(N,): standard deviation of a class's probability over draws, averaged over classes."
    )
    variation_ratio = Quantity("(N,): 1 - the largest of the probabilities.")
    prediction_set = Quantity(
        "(N, C) boolean: the classes that the row may have. `sets` has their names."
    )
    abstain = Quantity("(N,) boolean: whether to leave the row unanswered.")

    # Regression
    mean = Quantity("(N,): the predictive mean.")
    median = Quantity("(N,): the predictive median, if the target is transformed.")
    std = Quantity("(N,): the predictive standard deviation, the total uncertainty.")
    aleatoric_std = Quantity("(N,): the standard deviation from noise in the data.")
    epistemic_std = Quantity("(N,): the standard deviation between draws.")
    interval = Quantity(
        "(N, 2): the lower and upper end; infinite if there are too few calibration rows."
    )

    @property
    def detectors(self) -> Mapping[str, Detector]:
        """Results of each detector by name."""
        names = [name.removesuffix(".score") for name in self.arrays if name.endswith(".score")]
        return {
            name.removeprefix("detectors."): Detector(
                *(self.arrays[f"{name}.{part}"] for part in ("score", "p_value", "fired"))
            )
            for name in names
            if name.startswith("detectors.")
        }

    @property
    def standard_error(self) -> Mapping[str, np.ndarray]:
        """The Monte Carlo error of each score that has one, (N,) each, by the score's name."""
        head = "standard_error."
        return {
            name.removeprefix(head): array
            for name, array in self.arrays.items()
            if name.startswith(head)
        }

    def sets(self) -> list[list[str]]:
        """Return the names of the classes that each row may have."""
        classes = np.array(self.classes)
        return [classes[inside].tolist() for inside in self.prediction_set]

    def table(self) -> dict[str, np.ndarray]:
        """Return a column per number, such as `label`, `probabilities.cat` and `interval.low`.

        It excludes arrays with more than two dimensions, such as `samples`.
        """
        columns: dict[str, np.ndarray] = {}
        names = [name for name in self.arrays if name not in GLOBAL_FIELDS]
        order = {name: index for index, name in enumerate(COLUMN_ORDER)}
        for name in sorted(names, key=lambda n: order.get(n, len(order))):
            array = self.arrays[name]
            if array.ndim == 1:
                columns["id" if name == "ids" else name] = array
            elif array.ndim == 2:
                for part, column in zip(
                    self._column_suffixes(name, array.shape[1]), array.T, strict=True
                ):
                    columns[f"{name}.{part}"] = column
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
            return "it needs more draws"
        return f"expected one of {sorted(self.arrays)}"


def read_predictions(content: bytes) -> Predictions:
    """Read the predictions of an npz answer.

    Raises:
        ServerError: if it is not an npz file.
    """
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return _freeze({name: arrays[name] for name in arrays.files})
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ServerError(
            200, f"expected predictions in an npz file, got {len(content)} bytes of another"
        ) from error


def concatenate(parts: Sequence[Predictions]) -> Predictions:
    """Join predictions of parts of the rows, made by one version under the same draws."""
    if len(parts) == 1:
        return parts[0]
    first, every = parts[0].arrays, [part.arrays for part in parts]
    arrays = {}
    for name, array in first.items():
        if name == "unknown_categories":
            array = np.sum([part[name] for part in every], axis=0)
        elif name not in GLOBAL_FIELDS:
            if not all(name in part for part in every):
                continue
            array = np.concatenate([part[name] for part in every])
        arrays[name] = array
    return _freeze(arrays)


def _freeze(arrays: dict[str, np.ndarray]) -> Predictions:
    for array in arrays.values():
        array.flags.writeable = False
    return Predictions(MappingProxyType(arrays))
