"""The interface of a task's predictive distribution: from a network's outputs to sums over draws,
scores and samples."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Float, Float32, Float64

from model_store.scores.joint import JointScore
from model_store.scores.sums import DrawSums

if TYPE_CHECKING:
    from model_store.scores.tasks import AnyScores


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
    def scores(self, sums: DrawSums, standard_errors: bool | Collection[str] = True) -> "AnyScores":
        """Return the scores of the draws summed, with the standard errors of all, of none or of
        those that are named, at least; raises ValueError where there is no draw."""

    @abstractmethod
    def samples(self, outputs: Float32[np.ndarray, "K N C"]) -> Float[np.ndarray, "K N C"]:
        """Return what each draw says of each row: class probabilities, or mean and standard
        deviation."""

    @abstractmethod
    def acquisition(self, scores: "AnyScores", name: str) -> Float64[np.ndarray, "N"]:
        """Return what a pool is ranked by; more is more worth a label."""

    def of_raced(self, raced: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return what a pool is ranked by, of the scores that a race goes by."""
        return raced

    def race(
        self, scores: "AnyScores", name: str
    ) -> tuple[Float64[np.ndarray, "N"], Float64[np.ndarray, "N"]]:
        """Return scores in the order of an acquisition, and their standard errors; there must be
        `FEWEST_FOR_SPREAD` draws or more."""
        shown = scores.in_units
        assert shown.standard_error is not None
        score = self.acquisition_scores[name]
        return shown.by_name()[score], shown.standard_error[score]
