"""Measure the quality of a version for its manifest and the gate."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from model_store.artifacts.manifest import InputSpec
from model_store.conformal.calibration import Calibration
from model_store.inference.model import Model, detector_scores
from model_store.inference.runtime import Runtime
from model_store.scores.classification import Scores
from model_store.scores.tasks import AnyScores
from model_store.scores.transforms import Transform, to_target
from training.calibration.calibrate import match_groups
from training.data import Rows
from training.evaluation.figures import Figure, Share
from training.evaluation.metrics import class_figures, regression_figures
from training.evaluation.outliers import even_rows, random_ids, takes_even_rows
from training.scoring import rows_per_draw_set, scores_and_likelihoods, served_scores
from training.seeds import ServedRows, generator, hash_key

REQUEST_ROWS = 16  # share a draw set
NOISE_ROWS = 1000
MIN_UNCERTAINTY = 1e-300  # avoids a division by 0


@dataclass(frozen=True, eq=False)
class MeasuredRows:
    """Test rows, and the settings of the noise rows.

    `classes` and `groups` are the names of the test rows' class and group numbers. Regression has
    no classes.
    """

    test: Rows
    extent: tuple[float, float]  # range of the data, and of the noise
    classes: tuple[str, ...]
    seed: int
    groups: tuple[str, ...] = ()
    inputs: InputSpec | None = None  # if set, noise can be ids or even rows

    @property
    def noise(self) -> Rows:
        """Rows of uniform noise, of random ids, or even rows. Their labels are not used."""
        shape = (min(len(self.test), NOISE_ROWS), self.test.x.shape[1])
        if self.inputs is not None and self.inputs.takes_ids:
            ids = random_ids(
                self.inputs, self.test.x[: shape[0]], self.seed, ServedRows.NOISE_VALUES
            )
            return Rows(ids, self.test.y[:NOISE_ROWS])
        if self.inputs is not None and takes_even_rows(self.inputs, self.test.x):
            even = even_rows(self.inputs, self.test.x, shape[0], self.seed, ServedRows.NOISE_VALUES)
            return Rows(even, self.test.y[:NOISE_ROWS])
        draw = generator(self.seed, ServedRows.NOISE_VALUES)
        x = np.empty(shape, dtype=np.float32)
        for row in x:  # drawing all rows at once would need three times the memory
            row[:] = draw.uniform(*self.extent, shape[1])
        return Rows(x, self.test.y[:NOISE_ROWS])


@dataclass(frozen=True, eq=False)
class Quality:
    figures: dict[str, Figure]
    disagreement: float  # between draws, on test rows
    disagreement_on_noise: float


def disagreement(scores: AnyScores) -> float:
    """Return mean BALD over mean entropy, or mean epistemic variance over mean variance.

    It is 0 if all draws agree.
    """
    if isinstance(scores, Scores):
        part, total = scores.bald, scores.entropy
    else:
        part, total = np.square(scores.epistemic_std), np.square(scores.std)
    return float(part.mean() / max(total.mean(), MIN_UNCERTAINTY))


@dataclass(frozen=True, eq=False)
class Measurable:
    """The parts of a version that determine its quality."""

    runtime: Runtime
    calibration: Calibration
    density: tuple[str, ...]  # names of the density detectors
    classes: tuple[str, ...]
    transform: Transform | None = None

    @classmethod
    def from_model(cls, model: Model) -> "Measurable":
        manifest = model.manifest
        density, classes = manifest.detectors.density, manifest.classes or ()
        return cls(model.runtime, model.calibration, density, classes, manifest.transform)

    def figures(self, rows: MeasuredRows) -> dict[str, Figure]:
        return self.measure(rows).figures

    def measure(self, rows: MeasuredRows) -> Quality:
        """Measure the predictions on test rows, and the flag's rate on test rows and on noise.

        Rows are scored as served, in requests of `REQUEST_ROWS` rows (or more, if more must share a
        draw set) with the default draws. The flag's rates are at fpr .05.
        """
        draws = int(self.calibration.draw_counts[-1])
        share = max(REQUEST_ROWS, rows_per_draw_set(self.runtime, len(rows.test), draws))
        seed = hash_key(rows.seed, ServedRows.TEST)
        noise_seed = hash_key(rows.seed, ServedRows.NOISE)
        scores, densities, likelihoods = scores_and_likelihoods(
            self.runtime, rows.test, draws, seed, share, self.transform
        )
        (noise_scores,), noise_densities = served_scores(
            self.runtime, rows.noise, [draws], noise_seed, share, self.transform
        )
        flagged: dict[str, Figure] = {}
        groups = match_groups(self.calibration, rows.test, rows.groups)
        for key, scored, density, row_groups in (
            ("flag_rate_at_05", scores, densities, groups),
            ("uniform_noise_flagged_at_05", noise_scores, noise_densities, None),
        ):
            detected = detector_scores(scored, density, self.density)
            p_values = self.calibration.p_values(detected, scored.labels, draws, row_groups)
            flagged[key] = Share(p_values.p_value <= 0.05)
        if isinstance(scores, Scores):
            probs = self._reorder(scores.probabilities, rows.classes)
            test_figures = class_figures(probs, rows.test.y)
        else:
            tables = self.calibration.rank_tables(draws)
            intervals = tables.intervals(scores.mean, scores.std, 0.95, categories=groups)
            if self.transform is not None:
                intervals = to_target(self.transform, intervals)
            test_figures = regression_figures(scores.in_units, likelihoods, intervals, rows.test.y)
        figures = {**{f"test_{key}": figure for key, figure in test_figures.items()}, **flagged}
        return Quality(figures, disagreement(scores), disagreement(noise_scores))

    def _reorder(
        self, probs: Float64[np.ndarray, "N C"], classes: tuple[str, ...]
    ) -> Float64[np.ndarray, "N D"]:
        """Order probabilities by `classes`, followed by the version's other classes.

        Classes that the version does not have get probability 0.
        """
        if classes == self.classes:
            return probs
        index = {name: c for c, name in enumerate(self.classes)}
        extra = [name for name in self.classes if name not in classes]
        columns = [
            probs[:, index[name]] if name in index else np.zeros(len(probs))
            for name in (*classes, *extra)
        ]
        return np.stack(columns, axis=1)
