"""A published model, loaded and ready to predict: manifest, runtime and calibration."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from safetensors import SafetensorError
from safetensors.numpy import load

from model_store.artifacts.manifest import GRAPHS, Manifest
from model_store.artifacts.store import Artifact
from model_store.conformal.calibration import Calibration
from model_store.conformal.detectors import flag_statistic
from model_store.conformal.rank_tables import ConformalPValues, RankTables
from model_store.conformal.sets import mass_above
from model_store.conformal.stopping import Spread, StoppingRule, stages_among
from model_store.errors import BrokenArtifact
from model_store.inference.noise import ALGORITHMS
from model_store.inference.runtime import GraphError, Runtime
from model_store.scores.classification import Scores, concatenated, taken
from model_store.scores.regression import MixtureScores
from model_store.scores.tasks import AnyScores, labels_of, scores_of, sums_of

CALIBRATION_FILE = "calibration.safetensors"
NEEDED = (*GRAPHS, CALIBRATION_FILE)


Outputs = Callable[[Int64[np.ndarray, "n"], int, int], Float32[np.ndarray, "K n C"]]


@dataclass(frozen=True)
class Prediction:
    """What a model says of N rows: the scores of all their draws, and the flag's p_values.

    `detected` holds each detector's score. Detectors of posterior scores look at the first draws, as many as the
    largest calibrated number or those at which the row stopped (`judged` are their scores), so that p-values,
    prediction sets and intervals, which are ranks among `ranked`, are exact whatever number was asked for.
    """

    scores: AnyScores
    detected: dict[str, Float64[np.ndarray, "N"]]
    calibrated_scores: AnyScores
    p_values: ConformalPValues
    mass_above: Float64[np.ndarray, "N C"] | None  # each class of the judged draws; None in a regression
    rank_tables: RankTables

    @classmethod
    def concatenate(cls, parts: list["Prediction"]) -> "Prediction":
        """Return the prediction of all parts' rows, in order; the parts' draws must be taken in the same way."""
        first = parts[0]
        if len(parts) == 1:
            return first
        return cls(
            concatenated([part.scores for part in parts]),
            {name: np.concatenate([part.detected[name] for part in parts]) for name in first.detected},
            concatenated([part.calibrated_scores for part in parts]),
            ConformalPValues.concatenate([part.p_values for part in parts]),
            None if first.mass_above is None else np.concatenate([part.mass_above for part in parts]),
            first.rank_tables,
        )

    def take(self, rows: slice | np.ndarray) -> "Prediction":
        """Return the prediction of some rows."""
        scores = taken(self.scores, rows)
        return Prediction(
            scores,
            {name: detected[rows] for name, detected in self.detected.items()},
            scores if self.calibrated_scores is self.scores else taken(self.calibrated_scores, rows),
            self.p_values.take(rows),
            None if self.mass_above is None else self.mass_above[rows],
            self.rank_tables,
        )


@dataclass(frozen=True)
class Model:
    """A published model. Its methods may be called from several threads at once."""

    manifest: Manifest
    runtime: Runtime
    calibration: Calibration

    @classmethod
    def load(cls, artifact: Artifact, threads: int = 0) -> "Model":
        """Make a model of a verified artifact.

        Raises:
            BrokenArtifact: if a file is not what this version of Dubito can run; it names the file.
        """
        manifest = artifact.manifest

        def broken(file: str, reason: str) -> BrokenArtifact:
            return BrokenArtifact(manifest.name, manifest.version, file, reason)

        if manifest.noise.algorithm not in ALGORITHMS:
            raise broken("manifest.json", f"noise.algorithm: expected one of {ALGORITHMS}, those known here")
        try:
            runtime = Runtime(
                artifact.files["sampler.onnx"],
                artifact.files["network.onnx"],
                manifest.noise.dimension,
                threads,
                manifest.noise.algorithm,
                manifest.noise.paired,
            )
        except GraphError as error:
            raise broken(error.file, error.reason) from None
        if runtime.task != manifest.task:
            raise broken("network.onnx", f"expected outputs of task {manifest.task}")
        try:
            calibration = Calibration.from_tensors(
                load(artifact.files[CALIBRATION_FILE]), manifest.detectors.names, manifest.num_labels
            )
        except (SafetensorError, ValueError) as error:
            raise broken(CALIBRATION_FILE, str(error)) from None
        if (calibration.answers is None) != (manifest.abstention is None):
            raise broken(CALIBRATION_FILE, "expected abstention.doubt if and only if the manifest has abstention")
        if (calibration.early_stopping is None) != (not stages_among(calibration.draw_counts.tolist())):
            raise broken(CALIBRATION_FILE, "expected settling.reference if and only if rows can stop early")
        model = cls(manifest, runtime, calibration)
        try:
            model.warm_up()
        except Exception:
            raise broken("network.onnx", "it does not run on rows of the manifest's shape") from None
        return model

    @property
    def row_size(self) -> int:
        """How many numbers a flat row has."""
        return int(np.prod(self.manifest.input.shape))

    def warm_up(self) -> None:
        """Predict once, so that the first caller does not pay for it and a wrong graph is found out."""
        theta = self.runtime.draw(0, 0, min(2, self.manifest.noise.max_draws or 2))
        prediction = self.predict(np.zeros((1, self.row_size), dtype=np.float32), theta)
        if isinstance(prediction.scores, Scores):
            given, expected = prediction.scores.probabilities.shape[1], self.manifest.output_size
            if given != expected:
                raise ValueError(f"expected probabilities of {expected} classes, got {given}")

    def predict(self, x: Float32[np.ndarray, "N I"], theta: Float32[np.ndarray, "K D"]) -> Prediction:
        """Return scores and p_values of rows under the K draws in `theta`, all rows the same."""
        return self.prediction(*self.runtime.run(x, theta[:, None]))

    def prediction(self, outputs: Float32[np.ndarray, "K N C"], density: Float32[np.ndarray, "N M"]) -> Prediction:
        """Return scores and p_values of rows, given what the network says of them under each draw."""
        num_draws, task = len(outputs), self.manifest.task
        used = self.calibration.draws_used(num_draws)
        sums = sums_of(task, outputs[:used])
        if used == num_draws:
            scores = calibrated_scores = scores_of(task, sums)
        else:
            calibrated_scores = scores_of(task, sums, standard_errors=False)
            scores = scores_of(task, sums.merge(sums_of(task, outputs[used:], used)))
        return self._prediction(scores, calibrated_scores, density, used, self.calibration.rank_tables(used))

    def prediction_with_stopping(
        self, outputs: Outputs, density: Float32[np.ndarray, "N M"], num_draws: int, rule: StoppingRule
    ) -> Prediction:
        """Return scores and p_values of rows, each of as many draws as a rule lets it take.

        Args:
            outputs: what the network says of rows, given their numbers, under their draws `first` to `last - 1`.
                It is asked for draws in their order, of fewer and fewer rows.
            density: the rows' density scores.
            num_draws: the most draws that a row takes.
            rule: when a row stops.
        """
        task, names = self.manifest.task, self.manifest.detectors.density
        used = self.calibration.draws_used(num_draws)
        rank_tables = self.calibration.rank_tables(used, rule)
        left = np.arange(len(density))
        first_stage, *stages = [*self.calibration.stages(used), used]
        sums = sums_of(task, outputs(left, 0, first_stage))
        parts, order = [], []
        for stage, following in pairwise([first_stage, *stages]):
            scores = scores_of(task, sums)
            stops = self.calibration.stops(
                detector_scores(scores, density, names), labels_of(scores), Spread.of(scores, sums), stage, rule
            )
            if stops.any():
                settled = taken(scores, stops)
                parts.append(self._prediction(settled, settled, density[stops], stage, rank_tables))
                order.append(left[stops])
                left, density, sums = left[~stops], density[~stops], sums.take(~stops)
            if len(left) == 0:
                break
            sums = sums.merge(sums_of(task, outputs(left, stage, following), stage))
        if len(left) > 0:
            scores = calibrated_scores = scores_of(task, sums)
            if num_draws > used:
                scores = scores_of(task, sums.merge(sums_of(task, outputs(left, used, num_draws), used)))
            parts.append(self._prediction(scores, calibrated_scores, density, used, rank_tables))
            order.append(left)
        if len(parts) == 1:
            return parts[0]
        return Prediction.concatenate(parts).take(np.argsort(np.concatenate(order)))

    def _prediction(
        self,
        scores: AnyScores,
        calibrated_scores: AnyScores,
        density: Float32[np.ndarray, "N M"],
        draws: int,
        rank_tables: RankTables,
    ) -> Prediction:
        """ServedPredictor rows by the scores of a calibrated number of draws."""
        detected = detector_scores(calibrated_scores, density, self.manifest.detectors.density)
        surprisals = self.calibration.surprisals_of(detected, labels_of(calibrated_scores), draws)
        p_values = rank_tables.p_values(flag_statistic(surprisals, self.calibration.combined), surprisals)
        mass = mass_above(calibrated_scores.probabilities) if isinstance(calibrated_scores, Scores) else None
        return Prediction(scores, detected, calibrated_scores, p_values, mass, rank_tables)

    def prediction_sets(self, prediction: Prediction, coverage: float) -> Bool[np.ndarray, "N C"]:
        """Return which classes belong to each row's prediction set; its label does, whatever the judged draws say."""
        scores, mass = prediction.scores, prediction.mass_above
        assert isinstance(scores, Scores)
        assert mass is not None
        inside = prediction.rank_tables.prediction_sets(mass, coverage)
        if scores is not prediction.calibrated_scores:
            inside[np.arange(len(inside)), scores.label] = True
        return inside

    def abstains(self, prediction: Prediction, fpr: float, risk: float) -> Bool[np.ndarray, "N"]:
        """Return which rows of a classification are left undecided, where the flag fires at `fpr`.

        Of a number of draws that was not calibrated so are rows whose label is not that of the judged draws.
        """
        calibrated_scores, scores = prediction.calibrated_scores, prediction.scores
        assert isinstance(calibrated_scores, Scores)
        assert isinstance(scores, Scores)
        largest = prediction.rank_tables.largest_uncertainty(fpr, risk)
        answers = (calibrated_scores.variation_ratio <= largest) & (prediction.p_values.p_value > fpr)
        return ~answers | (calibrated_scores.label != scores.label)

    def intervals(self, prediction: Prediction, coverage: float) -> Float64[np.ndarray, "N 2"]:
        """Return the lower and upper end of each row's interval, in the target's units."""
        calibrated_scores = prediction.calibrated_scores
        assert isinstance(calibrated_scores, MixtureScores)
        return prediction.rank_tables.intervals(calibrated_scores.mean, calibrated_scores.std, coverage)


def detector_scores(
    scores: AnyScores, density: Float32[np.ndarray, "N M"], names: tuple[str, ...]
) -> dict[str, Float64[np.ndarray, "N"]]:
    """Return every detector's score by name: the posterior scores, then the density scores of the graph."""
    return {**scores.by_name(), **dict(zip(names, density.T.astype(np.float64), strict=True))}
