"""What depends on the task, behind one interface: from a network's outputs to sums over draws,
scores and samples."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Float32, Float64

from model_store.scores.classification import (
    SCORE_NAMES,
    Scores,
    predictive_scores,
    predictive_sums,
)
from model_store.scores.joint import BatchBald, ClassMaxDet, JointScore, TargetMaxDet
from model_store.scores.regression import (
    MIXTURE_SCORE_NAMES,
    MixtureScores,
    mixture_scores,
    mixture_sums,
    target_scores,
)
from model_store.scores.sums import DrawSums
from model_store.scores.transforms import Transform, target_moments
from model_store.types import Task

AnyScores = Scores | MixtureScores


class Predictive(ABC):
    """The predictive distribution of a task: categorical of a classification, a mixture of
    Gaussians of a regression.

    Attributes:
        output: the name of the network's output.
        score_names: the uncertainty scores that detectors look at.
        acquisition_scores: which scores a pool can be ranked by, by the name of the acquisition.
        joint_scores: which joint scores it can be ranked by, by the name of the acquisition.
        default_acquisition: the one that a request without a name means.
        sampled: acquisitions by a score that is a row's weight in a random choice.
        raced: acquisitions by a score that has standard errors.
        jackknifed: acquisitions by a score that is made with a standard error, and of which.
    """

    output: ClassVar[str]
    score_names: ClassVar[tuple[str, ...]]
    acquisition_scores: ClassVar[dict[str, str]]
    joint_scores: ClassVar[dict[str, type[JointScore]]]
    default_acquisition: ClassVar[str]
    sampled: ClassVar[tuple[str, ...]] = ()
    raced: ClassVar[tuple[str, ...]] = ()
    jackknifed: ClassVar[dict[str, str]] = {}

    @property
    def batches(self) -> tuple[str, ...]:
        """Acquisitions that choose a batch: rows that are the same are taken once while others are
        left."""
        return (*self.sampled, *self.joint_scores)

    @abstractmethod
    def sums(self, outputs: Float[np.ndarray, "K N C"], first_draw: int = 0) -> DrawSums: ...

    @abstractmethod
    def scores(self, sums: DrawSums, standard_errors: bool | Collection[str] = True) -> AnyScores:
        """Return the scores of the draws summed, with the standard errors of all, of none or of
        those that are named, at least; raises ValueError where there is no draw."""

    @abstractmethod
    def samples(self, outputs: Float32[np.ndarray, "K N C"]) -> Float[np.ndarray, "K N C"]:
        """Return what each draw says of each row: class probabilities, or mean and standard
        deviation."""

    @abstractmethod
    def acquisition(self, scores: AnyScores, name: str) -> Float64[np.ndarray, "N"]:
        """Return what a pool is ranked by; more is more worth a label."""

    def of_raced(self, raced: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return what a pool is ranked by, of the scores that a race goes by."""
        return raced

    def race(
        self, scores: AnyScores, name: str
    ) -> tuple[Float64[np.ndarray, "N"], Float64[np.ndarray, "N"]]:
        """Return scores in the order of an acquisition, and their standard errors; there must be
        `FEWEST_FOR_SPREAD` draws or more."""
        shown = scores.in_units if isinstance(scores, MixtureScores) else scores
        assert shown.standard_error is not None
        score = self.acquisition_scores[name]
        return shown.by_name()[score], shown.standard_error[score]


class Classes(Predictive):
    output = "log_probs"
    score_names = SCORE_NAMES
    acquisition_scores: ClassVar = {name: name for name in (*SCORE_NAMES, "bald_corrected")} | {
        "power_bald": "bald"
    }
    joint_scores: ClassVar = {"batchbald": BatchBald, "max_det": ClassMaxDet}
    default_acquisition = "bald"
    sampled = ("power_bald",)
    raced = SCORE_NAMES
    jackknifed: ClassVar = {"bald_corrected": "bald"}

    def sums(self, outputs: Float[np.ndarray, "K N C"], first_draw: int = 0) -> DrawSums:
        return predictive_sums(outputs, first_draw)

    def scores(self, sums: DrawSums, standard_errors: bool | Collection[str] = True) -> Scores:
        return predictive_scores(sums, standard_errors)

    def samples(self, outputs: Float32[np.ndarray, "K N C"]) -> Float32[np.ndarray, "K N C"]:
        return np.exp(outputs)

    def acquisition(self, scores: AnyScores, name: str) -> Float64[np.ndarray, "N"]:
        score: Float64[np.ndarray, "N"] | None = getattr(scores, self.acquisition_scores[name])
        return scores.by_name()["bald"] if score is None else score


class Target(Predictive):
    """A regression's predictive distribution; `transform` is that of its target, if any."""

    output = "mean_log_variance"
    score_names = MIXTURE_SCORE_NAMES
    acquisition_scores: ClassVar = {"variance": "std", "epistemic_variance": "epistemic_std"}
    joint_scores: ClassVar = {"max_det": TargetMaxDet}
    raced = ("variance", "epistemic_variance")
    default_acquisition = "epistemic_variance"

    def __init__(self, transform: Transform | None = None) -> None:
        self.transform = transform

    def sums(self, outputs: Float[np.ndarray, "K N C"], first_draw: int = 0) -> DrawSums:
        return mixture_sums(outputs, first_draw, transform=self.transform)

    def scores(
        self, sums: DrawSums, standard_errors: bool | Collection[str] = True
    ) -> MixtureScores:
        if self.transform is not None:
            return target_scores(sums, self.transform, bool(standard_errors))
        return mixture_scores(sums, bool(standard_errors))

    def samples(self, outputs: Float32[np.ndarray, "K N C"]) -> Float[np.ndarray, "K N C"]:
        if self.transform is not None:
            mean, log_variance = np.moveaxis(outputs.astype(np.float64), -1, 0)
            mean, variance = target_moments(self.transform, mean, np.exp(log_variance))
            return np.stack([mean, np.sqrt(variance)], axis=-1)
        return np.stack([outputs[..., 0], np.exp(0.5 * outputs[..., 1])], axis=-1)

    def acquisition(self, scores: AnyScores, name: str) -> Float64[np.ndarray, "N"]:
        assert isinstance(scores, MixtureScores)
        return self.of_raced(scores.in_units.by_name()[self.acquisition_scores[name]])

    def of_raced(self, raced: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        return np.square(raced)


PREDICTIVES: dict[Task, Predictive] = {"classification": Classes(), "regression": Target()}
DETECTED = {task: predictive.score_names for task, predictive in PREDICTIVES.items()}


def predictive_of(task: Task, transform: Transform | None = None) -> Predictive:
    return PREDICTIVES[task] if task == "classification" else Target(transform)
