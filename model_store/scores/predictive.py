"""Interface for predictive distributions, which compute scores from network outputs."""

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
    """A task's predictive distribution: categorical, or a mixture of Gaussians.

    Attributes:
        output: the name of the network's output.
        score_names: the uncertainty scores that detectors use.
        acquisition_scores: the score of each acquisition that ranks rows separately.
        joint_scores: the joint score of each acquisition of batches.
        default_acquisition: used if a request names none.
        sampling_acquisitions: acquisitions that sample rows with weights.
        race_acquisitions: acquisitions whose scores have standard errors.
        jackknife_scores: the score whose standard error an acquisition needs.
    """

    output: ClassVar[str]
    score_names: ClassVar[tuple[str, ...]]
    acquisition_scores: ClassVar[dict[str, str]]
    joint_scores: ClassVar[dict[str, type[JointScore]]]
    default_acquisition: ClassVar[str]
    sampling_acquisitions: ClassVar[tuple[str, ...]] = ()
    race_acquisitions: ClassVar[tuple[str, ...]] = ()
    jackknife_scores: ClassVar[dict[str, str]] = {}

    @property
    def batch_acquisitions(self) -> tuple[str, ...]:
        """The acquisition functions that select duplicates only if no other rows remain."""
        return (*self.sampling_acquisitions, *self.joint_scores)

    @abstractmethod
    def sums(self, outputs: Float[np.ndarray, "K N C"], first_draw: int = 0) -> DrawSums: ...

    @abstractmethod
    def scores(self, sums: DrawSums, standard_errors: bool | Collection[str] = True) -> "AnyScores":
        """Compute the scores and the requested standard errors.

        Standard errors can be requested for all scores, for some by name, or for none.

        Raises:
            ValueError: if there are no draws.
        """

    @abstractmethod
    def samples(self, outputs: Float32[np.ndarray, "K N C"]) -> Float[np.ndarray, "K N C"]:
        """Return each draw's class probabilities, or its means and standard deviations."""

    @abstractmethod
    def acquisition(self, scores: "AnyScores", name: str) -> Float64[np.ndarray, "N"]:
        """Return the scores for ranking a pool. Rows with high scores should be labelled first."""

    def ranking_scores(self, race_scores: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Convert race scores to acquisition scores. This does not change the ranking."""
        return race_scores

    def race(
        self, scores: "AnyScores", name: str
    ) -> tuple[Float64[np.ndarray, "N"], Float64[np.ndarray, "N"]]:
        """Return scores for a race, with their standard errors.

        They rank rows as the acquisition does, and need `MIN_SPREAD_GROUPS` draws or more.
        """
        reported = scores.in_units
        assert reported.standard_error is not None
        score = self.acquisition_scores[name]
        return reported.by_name()[score], reported.standard_error[score]
