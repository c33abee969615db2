"""Rows of ids that are unlike the data: numbers that have no size bear no noise, no means and no
gradients.

N rows of I ids. What is random is by seed.
"""

import numpy as np
from jaxtyping import Bool, Float32, Int64, Num

from model_store.artifacts.manifest import InputSpec
from training.evaluation.near_manifold import partners_of_another_class
from training.seeds import EvaluationStream, generator

SAYS = (
    "Rows are ids: in place of noise they are drawn evenly from all that there are (`uniform`), "
    "those of two classes "
    "are crossed, place by place (`crossed`), and those of a row are put in another order "
    "(`shuffled`). A network "
    "that does not look at their order gives shuffled rows the same answer."
)


def random_ids(
    spec: InputSpec, x: Num[np.ndarray, "N I"], *seed: int
) -> Float32[np.ndarray, "N I"]:
    """Return rows of ids drawn evenly from all that there are."""
    drawn = generator(*seed).integers(int(spec.minimum), int(spec.maximum) + 1, x.shape)
    return np.where(is_token(spec, x), drawn, x).astype(np.float32)


def is_token(spec: InputSpec, x: Num[np.ndarray, "N I"]) -> Bool[np.ndarray, "N I"]:
    """Return which ids are of what a row says: of text, all but its padding."""
    return np.ones(x.shape, dtype=bool) if spec.text is None else x != spec.text.pad_id


def near_rows_of_ids(
    x: Num[np.ndarray, "N I"],
    y: Num[np.ndarray, "N"],
    spec: InputSpec,
    is_classified: bool,
    seed: int,
) -> dict[str, Float32[np.ndarray, "M I"]]:
    """Return sets by name: two classes crossed, and ids in another order."""
    sets = {"crossed": crossed_ids(x, y.astype(np.int64), spec, seed)} if is_classified else {}
    return {**sets, "shuffled": shuffled_ids(x, spec, seed)}


def crossed_ids(
    x: Num[np.ndarray, "N I"], y: Int64[np.ndarray, "N"], spec: InputSpec, seed: int
) -> Float32[np.ndarray, "M I"]:
    """Return rows that have in each place the id of one of two rows of different classes; of a lone
    class, none."""
    rng = generator(seed, EvaluationStream.MIXED)
    partners = partners_of_another_class(y, rng)
    own, others = x[: len(partners)], x[partners]
    is_other = (rng.random(own.shape) < 0.5) & is_token(spec, own) & is_token(spec, others)
    return np.where(is_other, others, own).astype(np.float32)


def shuffled_ids(
    x: Num[np.ndarray, "N I"], spec: InputSpec, seed: int
) -> Float32[np.ndarray, "N I"]:
    """Return rows whose ids stand in another order."""
    rng, rows = generator(seed, EvaluationStream.SHUFFLED), x.astype(np.float32)
    for row, tokens in zip(rows, is_token(spec, x), strict=True):
        row[tokens] = rng.permutation(row[tokens])
    return rows
