"""A published model, loaded and ready to predict: manifest, runtime and calibration."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64
from safetensors import SafetensorError
from safetensors.numpy import load

from model_store.calibration import Calibration, Judgement
from model_store.errors import BrokenArtifact
from model_store.manifest import GRAPHS, Manifest
from model_store.mixture import MixtureScores
from model_store.noise import ALGORITHMS
from model_store.outputs import AnyScores, labels_of, scores_of, sums_of
from model_store.runtime import GraphError, Runtime
from model_store.scores import Scores, concatenated, taken
from model_store.store import Artifact

CALIBRATION_FILE = "calibration.safetensors"
NEEDED = (*GRAPHS, CALIBRATION_FILE)


@dataclass(frozen=True)
class Prediction:
    """What a model says of N rows: the scores of all draws, and the flag's judgement.

    `detected` holds each detector's score. Detectors of posterior scores look at the first draws, as many as the
    largest calibrated number (`judged_draws`; `judged` are their scores), so that p-values, prediction sets and
    intervals are exact whatever number was asked for.
    """

    scores: AnyScores
    detected: dict[str, Float64[np.ndarray, "N"]]
    judged: AnyScores
    judged_draws: int
    judgement: Judgement

    def take(self, rows: slice) -> "Prediction":
        """Return the prediction of some rows."""
        scores = taken(self.scores, rows)
        return Prediction(
            scores,
            {name: score[rows] for name, score in self.detected.items()},
            scores if self.judged is self.scores else taken(self.judged, rows),
            self.judged_draws,
            self.judgement.take(rows),
        )

    @classmethod
    def concatenate(cls, parts: list["Prediction"]) -> "Prediction":
        """Return the prediction of all parts' rows, in order; the parts must be of the same draws."""
        first = parts[0]
        if len(parts) == 1:
            return first
        return cls(
            concatenated([part.scores for part in parts]),
            {name: np.concatenate([part.detected[name] for part in parts]) for name in first.detected},
            concatenated([part.judged for part in parts]),
            first.judged_draws,
            Judgement.concatenate([part.judgement for part in parts]),
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
        if (calibration.abstention is None) != (manifest.abstention is None):
            raise broken(CALIBRATION_FILE, "expected abstention.doubt if and only if the manifest has abstention")
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
        """Return scores and judgement of rows under the K draws in `theta`, all rows the same."""
        return self.judge(*self.runtime.run(x, theta[:, None]))

    def judge(self, outputs: Float32[np.ndarray, "K N C"], density: Float32[np.ndarray, "N M"]) -> Prediction:
        """Return scores and judgement of rows, given what the network says of them under each draw."""
        num_draws, task = len(outputs), self.manifest.task
        used = self.calibration.draws_used(num_draws)
        sums = sums_of(task, outputs[:used])
        if used == num_draws:
            scores = judged = scores_of(task, sums)
        else:
            judged = scores_of(task, sums, standard_errors=False)
            scores = scores_of(task, sums.merge(sums_of(task, outputs[used:], used)))
        detected = detector_scores(judged, density, self.manifest.detectors.density)
        return Prediction(scores, detected, judged, used, self.calibration.judge(detected, labels_of(judged), used))

    def prediction_sets(self, prediction: Prediction, coverage: float) -> Bool[np.ndarray, "N C"]:
        """Return which classes belong to each row's prediction set; its label does, whatever the judged draws say."""
        judged, scores = prediction.judged, prediction.scores
        assert isinstance(judged, Scores)
        assert isinstance(scores, Scores)
        inside = self.calibration.prediction_sets(judged.probabilities, prediction.judged_draws, coverage)
        inside[np.arange(len(inside)), scores.probabilities.argmax(axis=1)] = True
        return inside

    def abstains(self, prediction: Prediction, fpr: float, risk: float) -> Bool[np.ndarray, "N"]:
        """Return which rows of a classification are left undecided, where the flag fires at `fpr`.

        Of a number of draws that was not calibrated so are rows whose label is not that of the judged draws.
        """
        judged, scores = prediction.judged, prediction.scores
        assert isinstance(judged, Scores)
        assert isinstance(scores, Scores)
        largest = self.calibration.largest_doubt(prediction.judged_draws, fpr, risk)
        answers = (judged.variation_ratio <= largest) & (prediction.judgement.p_value > fpr)
        return ~answers | (judged.probabilities.argmax(axis=1) != scores.probabilities.argmax(axis=1))

    def intervals(self, prediction: Prediction, coverage: float) -> Float64[np.ndarray, "N 2"]:
        """Return the lower and upper end of each row's interval, in the target's units."""
        judged = prediction.judged
        assert isinstance(judged, MixtureScores)
        return self.calibration.intervals(judged.mean, judged.std, prediction.judged_draws, coverage)


def detector_scores(
    scores: AnyScores, density: Float32[np.ndarray, "N M"], names: tuple[str, ...]
) -> dict[str, Float64[np.ndarray, "N"]]:
    """Return every detector's score by name: the posterior scores, then the density scores of the graph."""
    return {**scores.by_name(), **dict(zip(names, density.T.astype(np.float64), strict=True))}
