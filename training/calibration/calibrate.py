"""Calibration of detectors on two held-out splits."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64

from model_store.artifacts.manifest import DetectorNames
from model_store.conformal.abstention import Answers
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.conformal.mondrian import UNKNOWN, Categories, CategoryKind
from model_store.conformal.rank_tables import class_nonconformity, target_nonconformity
from model_store.errors import InvalidInput
from model_store.inference.model import detector_scores
from model_store.inference.runtime import Runtime
from model_store.scores.classification import Scores
from model_store.scores.tasks import AnyScores
from model_store.scores.transforms import Transform
from training.data.rows import Dataset, Rows
from training.data.tables import MAX_GROUPS
from training.data.targets import apply_transform
from training.scoring import rows_per_draw_set, served_scores
from training.seeds import ServedRows, hash_key


@dataclass(frozen=True)
class CategoryChoice:
    kind: CategoryKind
    names: tuple[str, ...]
    column: str | None = None

    @classmethod
    def from_config(
        cls, calibration: str, data: Dataset, column: str | None
    ) -> "CategoryChoice | None":
        if calibration == "class":
            return cls("class", data.classes)
        if calibration != "group":
            return None
        if not data.group_names:
            where = "data.calibration_group or data.group"
            expected = f"a column of up to {MAX_GROUPS} groups in {where}"
            raise InvalidInput("serving.calibration", expected, repr(column))
        return cls("group", data.group_names, column)

    def categories(self, scores: list[AnyScores], rows: Rows) -> Categories:
        if self.kind == "class":
            return Categories("class", self.names, np.stack([s.labels for s in scores]), rows.y)
        assert rows.groups is not None
        return Categories.by_group(self.names, rows.groups, len(scores))


def calibrate(
    runtime: Runtime,
    reference: Rows,
    ranking: Rows,
    counts: list[int],
    detectors: DetectorNames,
    num_labels: int,
    seed: int,
    transform: Transform | None = None,
    by_category: CategoryChoice | None = None,
) -> Calibration:
    share = rows_per_draw_set(runtime, min(len(reference), len(ranking)), counts[-1])
    keys = hash_key(seed, ServedRows.REFERENCE), hash_key(seed, ServedRows.RANKING)
    (reference_scores, reference_density), (scores, density) = (
        served_scores(runtime, rows, counts, key, share, transform)
        for rows, key in zip((reference, ranking), keys, strict=True)
    )
    return Calibration.fit(
        counts,
        by_detector(reference_scores, reference_density, detectors.density),
        by_detector(scores, density, detectors.density),
        np.stack([nonconformity(s, ranking.y, transform) for s in scores]),
        detectors,
        num_labels,
        _answers(reference_scores, scores, ranking.y),
        None if by_category is None else by_category.categories(scores, ranking),
    )


def by_detector(
    scores: list[AnyScores], density: Float32[np.ndarray, "n M"], names: tuple[str, ...]
) -> DetectorScores:
    parts = [detector_scores(s, density, names) for s in scores]
    by_name = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
    return DetectorScores(by_name, np.stack([s.labels for s in scores]))


def nonconformity(
    scores: AnyScores, y: np.ndarray, transform: Transform | None = None
) -> Float64[np.ndarray, "n"]:
    if isinstance(scores, Scores):
        return class_nonconformity(scores.probabilities, y)
    if transform is not None:
        y = apply_transform(transform, y)
    return target_nonconformity(scores.mean, scores.std, y)


def _answers(reference: list[AnyScores], ranking: list[AnyScores], y: np.ndarray) -> Answers | None:
    scores = [s for s in ranking if isinstance(s, Scores)]
    if not scores:
        return None
    return Answers.from_splits(
        np.stack([s.variation_ratio for s in reference if isinstance(s, Scores)]),
        np.stack([s.variation_ratio for s in scores]),
        np.stack([s.label != y for s in scores]),
    )


def match_groups(
    calibration: Calibration, rows: Rows, names: tuple[str, ...]
) -> Int64[np.ndarray, "N"] | None:
    """Map each row's group to a calibration's group number, or `UNKNOWN` for new groups.

    `names` are the names of the rows' groups. Returns None if the calibration is
    not by group, or if rows have no groups.
    """
    categories = calibration.categories
    if categories is None or categories.kind != "group" or rows.groups is None:
        return None
    number = {name: i for i, name in enumerate(categories.names)}
    return np.array([number.get(name, UNKNOWN) for name in names], dtype=np.int64)[rows.groups]
