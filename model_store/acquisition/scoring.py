"""Compute acquisition scores for a pool with draws shared by all rows."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64

from model_store.inference.model import Model
from model_store.inference.runtime import DrawSet
from model_store.scores.joint import Candidates

Scores = Float64[np.ndarray, "N"]


@dataclass(frozen=True, eq=False)
class PoolScorer:
    """A model's acquisition function. `priors` replaces the class shares from training."""

    model: Model
    acquisition: str
    priors: tuple[float, ...] | None = None

    def scores(self, x: Float32[np.ndarray, "N I"], draws: DrawSet) -> Scores:
        """Compute the score of each row, or its individual gain if the score is joint."""
        predictive, name = self.model.predictive, self.acquisition
        if name in predictive.joint_scores:
            return self.candidates(x, draws).gain
        errors = [score for key, score in predictive.jackknife_scores.items() if key == name]
        sums = predictive.sums(self._outputs(x, draws))
        return predictive.acquisition(predictive.scores(sums, errors), name)

    def race(self, x: Float32[np.ndarray, "N I"], draws: DrawSet) -> tuple[Scores, Scores]:
        predictive = self.model.predictive
        sums = predictive.sums(self._outputs(x, draws))
        errors = [predictive.acquisition_scores[self.acquisition]]
        return predictive.race(predictive.scores(sums, errors), self.acquisition)

    def candidates(self, x: Float32[np.ndarray, "N I"], draws: DrawSet) -> Candidates:
        predictive = self.model.predictive
        samples = predictive.samples(self._outputs(x, draws))
        return predictive.joint_scores[self.acquisition].from_samples(samples)

    def _outputs(self, x: Float32[np.ndarray, "N I"], draws: DrawSet) -> Float[np.ndarray, "K N C"]:
        runtime = self.model.runtime
        if self.acquisition in self.model.predictive.joint_scores and runtime.has_joint:
            runtime, draws = runtime.joint, DrawSet(draws.seed, draws.num_draws, theta=None)
        outputs = runtime.run_outputs(x, draws)
        return outputs if self.priors is None else self.model.shifted(outputs, self.priors)
