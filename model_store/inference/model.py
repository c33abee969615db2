"""Models loaded from published versions."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32, Float64, Int64
from safetensors import SafetensorError
from safetensors.numpy import load

from model_store.artifacts.manifest import (
    ENCODER,
    GRAPHS,
    TOKENIZER,
    TRAINING_ROWS,
    CategoricalColumn,
    Manifest,
)
from model_store.artifacts.store import Artifact
from model_store.conformal.calibration import Calibration
from model_store.conformal.detectors import flag_statistic
from model_store.conformal.label_shift import LabelShift, WeightedRows, shift_log_probs
from model_store.conformal.mondrian import UNKNOWN, group_numbers
from model_store.conformal.rank_tables import RankTables, mass_above
from model_store.inference.encoder import Encoder, shared_encoder
from model_store.inference.graphs import GraphError
from model_store.inference.noise import ALGORITHMS
from model_store.inference.prediction import Prediction
from model_store.inference.runtime import Runtime
from model_store.inference.training_rows import TrainingRows
from model_store.scores.classification import Scores
from model_store.scores.tasks import AnyScores, Predictive, get_predictive
from model_store.sources.columns import category_indices

Rows = Float32[np.ndarray, "N I"]
Outputs = Float32[np.ndarray, "K N C"]

if TYPE_CHECKING:
    from model_store.sources.text import TextEncoder

CALIBRATION_FILE = "calibration.safetensors"
TOKENIZER_COPIES = 25  # memory of a tokenizer, in file sizes
DRAW_S = 1e-5  # approximate time of a row and draw
LARGEST = float(np.finfo(np.float32).max)
# The last two files are optional.
NEEDED = (*GRAPHS, CALIBRATION_FILE, TRAINING_ROWS, TOKENIZER)


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded model. Thread-safe."""

    manifest: Manifest
    runtime: Runtime
    calibration: Calibration
    label_shift: LabelShift | None = None
    training_rows: TrainingRows | None = None
    text_encoder: "TextEncoder | None" = None

    @classmethod
    def load(cls, artifact: Artifact, threads: int = 0) -> "Model":
        """Load a verified version. Raise BrokenArtifact if Dubito cannot run one of its files."""
        manifest = artifact.manifest
        if manifest.noise.algorithm not in ALGORITHMS:
            reason = f"noise.algorithm: expected one of {ALGORITHMS}"
            raise manifest.broken("manifest.json", reason)
        row_size = math.prod(manifest.input.shape)
        with _breaks(manifest, "network.onnx"):
            encoder = None
            if manifest.encoder is not None:
                path, file = artifact.folder / ENCODER, manifest.files[ENCODER]
                encoder = shared_encoder(path, file, manifest.encoder, row_size, threads)
            runtime = Runtime(
                artifact.files["sampler.onnx"],
                artifact.files["network.onnx"],
                manifest.noise.dimension,
                threads,
                manifest.noise.algorithm,
                manifest.noise.paired,
                encoder,
            )
            if runtime.task != manifest.task:
                raise ValueError(f"expected outputs of task {manifest.task}")
            attributed = manifest.detectors.attributed
            if runtime.terms_shape != ((len(attributed), row_size) if attributed else None):
                raise ValueError("expected terms of exactly the detectors in the manifest")
        calibration, label_shift = _calibration(artifact)
        model = cls(manifest, runtime, calibration, label_shift)
        with _breaks(manifest, "network.onnx"):
            try:
                model.warm_up()
            except GraphError:
                raise
            except Exception:
                raise ValueError("it does not run on rows of the manifest's shape") from None
        training_rows = None
        if TRAINING_ROWS in artifact.files:
            size = row_size if manifest.encoder is None else manifest.encoder.outputs
            with _breaks(manifest, TRAINING_ROWS):
                tensors = load(artifact.files[TRAINING_ROWS])
                training_rows = TrainingRows.from_tensors(tensors, size)
        return replace(model, training_rows=training_rows, text_encoder=_text_encoder(artifact))

    @cached_property
    def predictive(self) -> Predictive:
        return get_predictive(self.manifest.task, self.manifest.transform)

    @cached_property
    def row_size(self) -> int:
        return math.prod(self.manifest.input.shape)

    @cached_property
    def encoder(self) -> Encoder | None:
        encoder = self.runtime.encoder
        assert encoder is None or isinstance(encoder, Encoder)
        return encoder

    @cached_property
    def encoding_draws(self) -> int:
        """The cost of encoding a row, expressed in draws. It is 0 if there is no encoder."""
        return 0 if self.encoder is None else math.ceil(self.encoder.row_s / DRAW_S)

    @property
    def middle_row(self) -> Float32[np.ndarray, "1 I"]:
        """A row with each value in the middle of the input range. Zeros could be padding ids."""
        spec = self.manifest.input
        middle = spec.minimum / 2 + spec.maximum / 2
        number = float(int(middle)) if spec.takes_ids else middle
        return np.full((1, self.row_size), number, dtype=np.float32)

    def warm_up(self) -> None:
        """Predict once, to speed up the first request. Raise GraphError for an invalid graph."""
        theta = self.runtime.draw(0, 0, min(2, self.manifest.noise.max_draws or 2))
        outputs, density = self.runtime.run(self.middle_row, theta[:, None])
        num_outputs, expected = outputs.shape[2], self.manifest.output_size
        if num_outputs != expected:
            kind = "classes" if self.manifest.classes else "mean and log variance"
            reason = f"expected {expected} outputs per row ({kind}), got {num_outputs}"
            raise GraphError("network.onnx", reason)
        self.prediction(outputs, density)

    def find_groups(self, x: Rows) -> Int64[np.ndarray, "N"] | None:
        """Return each row's calibration group, or None if it is not a column of the rows."""
        spec, columns = self.manifest.categories, self.manifest.input.columns
        if spec is None or spec.kind != "group":
            return None
        for column in columns:
            if column.name == spec.column and isinstance(column, CategoricalColumn):
                numbers = np.append(group_numbers(column.categories, spec.names), UNKNOWN)
                return numbers[category_indices(x, columns, column.name)]
        return None

    def predict(self, x: Rows, theta: Float32[np.ndarray, "K D"]) -> Prediction:
        return self.prediction(*self.runtime.run(x, theta[:, None]))

    def prediction(
        self,
        outputs: Outputs,
        density: Float32[np.ndarray, "N M"],
        priors: tuple[float, ...] | None = None,
    ) -> Prediction:
        """Compute scores and p-values from the network's outputs.

        `priors` are the class shares of the rows (`model_store.conformal.label_shift`), if the
        version supports them. Detectors use the unchanged outputs.
        """
        num_draws, predictive = len(outputs), self.predictive
        calibrated = self.calibration.calibrated_draws(num_draws)
        sums = predictive.sums(outputs[:calibrated])
        tables: RankTables | WeightedRows
        if priors is not None:
            assert self.label_shift is not None
            scores = predictive.scores(predictive.sums(self.shifted(outputs, priors)))
            calibrated_scores = predictive.scores(sums, standard_errors=False)
            tables = self.label_shift.weigh_rows(self.calibration, calibrated, np.array(priors))
        else:
            tables = self.calibration.rank_tables[calibrated]
            if calibrated == num_draws:
                scores = calibrated_scores = predictive.scores(sums)
            else:
                calibrated_scores = predictive.scores(sums, standard_errors=False)
                rest = predictive.sums(outputs[calibrated:], calibrated)
                scores = predictive.scores(sums.merge(rest))
        detected = detector_scores(calibrated_scores, density, self.manifest.detectors.density)
        labels = calibrated_scores.labels
        surprisals = self.calibration.compute_surprisals(detected, labels, calibrated)
        statistic = flag_statistic(surprisals, self.calibration.names.combined)
        mass = None
        if isinstance(calibrated_scores, Scores):
            mass = mass_above(calibrated_scores.probabilities)
        categories = self.calibration.categories
        return Prediction(
            scores=scores,
            detected=detected,
            surprisals=surprisals,
            statistic=statistic,
            calibrated_scores=calibrated_scores,
            p_values=tables.p_values(statistic, surprisals),
            mass_above=mass,
            rank_tables=tables,
            transform=self.manifest.transform,
            categories=None if categories is None else categories.assign(labels),
        )

    def shifted(self, outputs: Outputs, priors: tuple[float, ...]) -> Float64[np.ndarray, "K N C"]:
        """Adjust the log class probabilities of each draw to new class shares."""
        assert self.manifest.priors is not None
        return shift_log_probs(outputs, self.manifest.priors, priors)


def _calibration(artifact: Artifact) -> tuple[Calibration, LabelShift | None]:
    manifest, categories = artifact.manifest, artifact.manifest.categories
    with _breaks(manifest, CALIBRATION_FILE):
        tensors = load(artifact.files[CALIBRATION_FILE])
        calibration = Calibration.from_tensors(
            tensors,
            manifest.detectors,
            manifest.num_labels,
            None if categories is None else (categories.kind, categories.names),
        )
        rows = calibration.statistic.shape[1]
        label_shift = LabelShift.from_tensors(tensors, rows, manifest.num_labels)
        if (calibration.answers is None) != (manifest.abstention is None):
            expected = "abstention.doubt if and only if the manifest has abstention"
            raise ValueError(f"expected {expected}")
    return calibration, label_shift


def _text_encoder(artifact: Artifact) -> "TextEncoder | None":
    manifest = artifact.manifest
    if manifest.input.text is None:
        return None
    from model_store.sources.text import TextEncoder  # needs an optional library

    with _breaks(manifest, TOKENIZER):
        encoder = TextEncoder(artifact.files[TOKENIZER], manifest.input.text)
        if encoder.vocabulary > manifest.input.maximum + 1:
            raise ValueError(f"expected ids up to {manifest.input.maximum:.0f}, got larger ones")
    return encoder


@contextmanager
def _breaks(manifest: Manifest, file: str) -> Iterator[None]:
    """Convert errors from loading a file to BrokenArtifact."""
    try:
        yield
    except GraphError as error:
        raise manifest.broken(error.file, error.reason) from None
    except (SafetensorError, ValueError) as error:
        raise manifest.broken(file, str(error)) from None


def detector_scores(
    scores: AnyScores, density: Float32[np.ndarray, "N M"], names: tuple[str, ...]
) -> dict[str, Float64[np.ndarray, "N"]]:
    """Return each detector's scores, with NaN and infinity as the largest float32 number."""
    if not np.isfinite(density).all():
        density = np.nan_to_num(density, nan=LARGEST, posinf=LARGEST, neginf=-LARGEST)
    return {**scores.by_name(), **dict(zip(names, density.T.astype(np.float64), strict=True))}
