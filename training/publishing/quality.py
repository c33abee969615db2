"""The quality of a version, row by row: what its manifest says of it, and what a gate compares."""

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

MEASURED_ROWS = 16  # rows that share draws when quality is measured
NOISE_ROWS = 1000
LEAST_UNCERTAINTY = 1e-300  # so that none of none is none


@dataclass(frozen=True, eq=False)
class MeasuredRows:
    """What quality is measured on: test rows, uniform noise in the data's range (`extent`), and
    draws by a seed.

    `classes` are those that the test rows' class numbers mean; a regression has none. `groups` are
    those that their group numbers mean, where they have such. With `inputs`, rows for which noise
    means nothing are even ones in its place (`training.evaluation.outliers`).
    """

    test: Rows
    extent: tuple[float, float]
    classes: tuple[str, ...]
    seed: int
    groups: tuple[str, ...] = ()
    inputs: InputSpec | None = None

    @property
    def noise(self) -> Rows:
        """Rows of uniform noise, the plainest input that is unlike the data; their labels are not
        used.

        Of ids these are ids drawn evenly.
        """
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
        for row in x:  # all at once would take three times the memory
            row[:] = draw.uniform(*self.extent, shape[1])
        return Rows(x, self.test.y[:NOISE_ROWS])


@dataclass(frozen=True, eq=False)
class Measured:
    """Figures of quality, and which part of the uncertainty about test rows and about noise draws'
    disagreement is."""

    figures: dict[str, Figure]
    disagreement: float
    disagreement_on_noise: float


def disagreement(scores: AnyScores) -> float:
    """Return mean BALD over mean entropy, or mean epistemic variance over mean variance: 0 where
    draws agree."""
    if isinstance(scores, Scores):
        part, whole = scores.bald, scores.entropy
    else:
        part, whole = np.square(scores.epistemic_std), np.square(scores.std)
    return float(part.mean() / max(whole.mean(), LEAST_UNCERTAINTY))


@dataclass(frozen=True, eq=False)
class Measurable:
    """What of a version is measured: its graphs, its calibration, its densities' names, its
    classes, and by what a regression's target was transformed."""

    runtime: Runtime
    calibration: Calibration
    density: tuple[str, ...]
    classes: tuple[str, ...]
    transform: Transform | None = None

    @classmethod
    def from_model(cls, model: Model) -> "Measurable":
        manifest = model.manifest
        density, classes = manifest.detectors.density, manifest.classes or ()
        return cls(model.runtime, model.calibration, density, classes, manifest.transform)

    def figures(self, rows: MeasuredRows) -> dict[str, Figure]:
        """Measure quality, all of it as served in requests of `MEASURED_ROWS` rows (or as many as
        must share a draw set) at the default draws.

        Accuracy or error, and likelihood, of the test rows; how often the flag fires on them at fpr
        .05; and how often it fires on uniform noise. Probabilities of a version with other classes
        are those of the rows' classes.
        """
        return self.measure(rows).figures

    def measure(self, rows: MeasuredRows) -> Measured:
        draws = int(self.calibration.draw_counts[-1])
        share = max(MEASURED_ROWS, rows_per_draw_set(self.runtime, len(rows.test), draws))
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
        for key, scored, density, of_rows in (
            ("flag_rate_at_05", scores, densities, groups),
            ("uniform_noise_flagged_at_05", noise_scores, noise_densities, None),
        ):
            detected = detector_scores(scored, density, self.density)
            p_values = self.calibration.p_values(detected, scored.labels, draws, of_rows)
            flagged[key] = Share(p_values.p_value <= 0.05)
        if isinstance(scores, Scores):
            probs = self._probabilities_of(scores.probabilities, rows.classes)
            measured = class_figures(probs, rows.test.y)
        else:
            tables = self.calibration.rank_tables(draws)
            intervals = tables.intervals(scores.mean, scores.std, 0.95, categories=groups)
            if self.transform is not None:
                intervals = to_target(self.transform, intervals)
            measured = regression_figures(scores.in_units, likelihoods, intervals, rows.test.y)
        figures = {**{f"test_{key}": figure for key, figure in measured.items()}, **flagged}
        return Measured(figures, disagreement(scores), disagreement(noise_scores))

    def _probabilities_of(
        self, probs: Float64[np.ndarray, "N C"], classes: tuple[str, ...]
    ) -> Float64[np.ndarray, "N D"]:
        """Return probabilities in the order of `classes`, 0 of those that the version does not
        know.

        Other classes that it knows come last.
        """
        if classes == self.classes:
            return probs
        own = {name: c for c, name in enumerate(self.classes)}
        others = [name for name in self.classes if name not in classes]
        columns = [
            probs[:, own[name]] if name in own else np.zeros(len(probs))
            for name in (*classes, *others)
        ]
        return np.stack(columns, axis=1)
