"""Measurements of a version's quality, for its manifest and the gate."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

from model_store.artifacts.manifest import InputSpec
from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from model_store.scores.tasks import AnyScores
from training.calibration.calibrate import match_groups
from training.data import Rows
from training.evaluation.figures import Figure, Share
from training.evaluation.metrics import class_figures, regression_figures
from training.evaluation.outliers import even_rows, random_ids, takes_even_rows
from training.evaluation.quality import REQUEST_ROWS
from training.scoring import rows_per_draw_set, served_prediction
from training.seeds import ServedRows, generator, hash_key

NOISE_ROWS = 1000
RELIABLE_PROBABILITY = 0.9  # as the web page rates answers
MIN_UNCERTAINTY = 1e-300  # avoids a division by 0


@dataclass(frozen=True, eq=False)
class MeasuredRows:
    """The test rows, and the settings for generating noise rows.

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
        """Rows of uniform noise, random ids or uniformly drawn columns.

        Their labels are not used.
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
        for row in x:  # drawing all rows at once would need three times the memory
            row[:] = draw.uniform(*self.extent, shape[1])
        return Rows(x, self.test.y[:NOISE_ROWS])


@dataclass(frozen=True, eq=False)
class Quality:
    figures: dict[str, Figure]
    disagreement: float  # between draws, on test rows
    disagreement_on_noise: float


def disagreement(scores: AnyScores) -> float:
    """Compute the share of the uncertainty that is due to disagreement between draws.

    It is mean BALD / mean entropy, or mean epistemic variance / mean variance. It is 0 if all draws
    agree.
    """
    if isinstance(scores, Scores):
        part, total = scores.bald, scores.entropy
    else:
        part, total = np.square(scores.epistemic_std), np.square(scores.std)
    return float(part.mean() / max(total.mean(), MIN_UNCERTAINTY))


def measure(model: Model, rows: MeasuredRows) -> Quality:
    """Measure predictions on test rows, and the flag rate on test and noise rows.

    Rows are scored as served, in requests of `REQUEST_ROWS` rows (or more, if more must share a
    draw set) with the default draws. The flag's rates are at fpr .05.
    """
    draws = int(model.calibration.draw_counts[-1])
    share = max(REQUEST_ROWS, rows_per_draw_set(model.runtime, len(rows.test), draws))
    seed = hash_key(rows.seed, ServedRows.TEST)
    noise_seed = hash_key(rows.seed, ServedRows.NOISE)
    test, likelihoods = served_prediction(model, rows.test, draws, seed, share)
    noise, _ = served_prediction(model, rows.noise, draws, noise_seed, share)
    groups = match_groups(model.calibration, rows.test, rows.groups)
    if groups is not None:
        test = test.with_groups(groups)
    if isinstance(test.scores, Scores):
        probs = _reorder(test.scores.probabilities, model.manifest.classes or (), rows.classes)
        figures = class_figures(probs, rows.test.y)
        is_reliable = _find_reliable(test)
        if is_reliable.any():
            figures["reliable_accuracy"] = Share((probs.argmax(axis=1) == rows.test.y)[is_reliable])
    else:
        intervals = test.intervals(0.95)
        assert intervals is not None
        assert likelihoods is not None
        figures = regression_figures(test.scores.in_units, likelihoods, intervals, rows.test.y)
    figures = {f"test_{key}": figure for key, figure in figures.items()}
    figures["flag_rate_at_05"] = Share(test.judged_p_values.p_value <= 0.05)
    figures["uniform_noise_flagged_at_05"] = Share(noise.judged_p_values.p_value <= 0.05)
    return Quality(figures, disagreement(test.scores), disagreement(noise.scores))


def _find_reliable(test: Prediction) -> Bool[np.ndarray, "N"]:
    """Mark unflagged rows with a probable label and a single-class prediction set.

    The prediction set has a coverage of 95 %.
    """
    sets = test.prediction_sets(0.95)
    assert sets is not None
    assert isinstance(test.scores, Scores)
    is_probable = test.scores.probabilities.max(axis=1) > RELIABLE_PROBABILITY
    is_flagged = test.judged_p_values.p_value <= 0.05
    return is_probable & ~is_flagged & (sets.sum(axis=1) == 1)


def _reorder(
    probs: Float64[np.ndarray, "N C"], names: tuple[str, ...], classes: tuple[str, ...]
) -> Float64[np.ndarray, "N D"]:
    """Reorder class probabilities to match `classes`, with extra classes at the end.

    Classes that are not in `names` get probability 0.
    """
    if classes == names:
        return probs
    index = {name: c for c, name in enumerate(names)}
    extra = [name for name in names if name not in classes]
    columns = [
        probs[:, index[name]] if name in index else np.zeros(len(probs))
        for name in (*classes, *extra)
    ]
    return np.stack(columns, axis=1)
