"""Calibration: detectors are fitted on one split that the model was not fitted on, and ranked on
another.

`python -m training fit` and `prune` calibrate here on the splits of a fit. The command `calibrate`,
for a published version and other rows, comes here by way of `training.publishing.recalibrate`.
"""

import numpy as np
from jaxtyping import Float32, Float64

from model_store.conformal.abstention import Answers
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.conformal.sets import class_nonconformity, target_nonconformity
from model_store.conformal.stopping import Spread
from model_store.inference.model import detector_scores
from model_store.inference.runtime import Runtime
from model_store.scores.classification import Scores
from model_store.scores.tasks import AnyScores
from model_store.scores.transforms import Transform
from model_store.types import DetectorNames
from training.calibration.categories import CategoriesWanted
from training.data import Rows
from training.data.targets import checked_fitted
from training.scoring import rows_per_draw_set, scores_and_spreads
from training.seeds import ServedRows, hash_key


def calibrate(
    runtime: Runtime,
    reference: Rows,
    ranking: Rows,
    counts: list[int],
    detectors: DetectorNames,
    num_labels: int,
    seed: int,
    transform: Transform | None = None,
    wanted: CategoriesWanted | None = None,
) -> Calibration:
    """Fit and rank the detectors on two splits that the model was not fitted on, by category where
    that is wanted.

    Raises:
        InvalidInput: naming a target that the transform cannot take.
    """
    share = rows_per_draw_set(runtime, min(len(reference), len(ranking)), counts[-1])
    of_reference, of_ranking = (
        hash_key(seed, ServedRows.REFERENCE),
        hash_key(seed, ServedRows.RANKING),
    )
    reference_scores, reference_densities, reference_spreads = scores_and_spreads(
        runtime, reference, counts, of_reference, share, transform
    )
    scores, densities, spreads = scores_and_spreads(
        runtime, ranking, counts, of_ranking, share, transform
    )
    return Calibration.fit(
        counts,
        by_detector(reference_scores, reference_densities, detectors.density, reference_spreads),
        by_detector(scores, densities, detectors.density, spreads),
        np.stack([nonconformity(s, ranking.y, transform) for s in scores]),
        detectors,
        num_labels,
        answers(reference_scores, scores, ranking.y),
        None if wanted is None else wanted.of_rows(scores, ranking),
    )


def by_detector(
    scores: list[AnyScores],
    density: Float32[np.ndarray, "n M"],
    names: tuple[str, ...],
    spreads: list[Spread] | None = None,
) -> DetectorScores:
    """Return each detector's scores, and the predicted labels, at each number of draws."""
    detected = [detector_scores(s, density, names) for s in scores]
    labels = np.stack([s.labels for s in scores])
    return DetectorScores(
        {name: np.stack([d[name] for d in detected]) for name in detected[0]}, labels, spreads
    )


def nonconformity(
    scores: AnyScores, y: np.ndarray, transform: Transform | None = None
) -> Float64[np.ndarray, "n"]:
    """Return how far labels or targets are from predictions: `model_store.conformal.sets` says in
    what measure.

    Raises:
        InvalidInput: naming a target that the transform cannot take.
    """
    if isinstance(scores, Scores):
        return class_nonconformity(scores.probabilities, y)
    if transform is not None:
        y = checked_fitted(transform, y)
    return target_nonconformity(scores.mean, scores.std, y)


def answers(reference: list[AnyScores], ranking: list[AnyScores], y: np.ndarray) -> Answers | None:
    """Return the uncertainty of either split at each number of draws, and where the ranking split's
    labels are wrong.

    A regression has no labels, and None.
    """
    of_ranking = [s for s in ranking if isinstance(s, Scores)]
    if not of_ranking:
        return None
    return Answers.of(
        np.stack([s.variation_ratio for s in reference if isinstance(s, Scores)]),
        np.stack([s.variation_ratio for s in of_ranking]),
        np.stack([s.label != y for s in of_ranking]),
    )
