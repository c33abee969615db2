"""The training rows that are published beside a model, so that explanations can name the
nearest."""

import numpy as np
from safetensors.numpy import save

from model_store.artifacts.manifest import TRAINING_ROWS
from model_store.inference.training_rows import MAX_ID_BYTES, TrainingRows
from training.data import Dataset, Rows
from training.recipe import Recipe
from training.seeds import Stream, generator

MOST_NUMBERS = 1 << 21  # of all rows together: 8 MB, of pixels 2 MB


def training_rows(
    train: Rows, data: Dataset, recipe: Recipe, is_encoded: bool = False
) -> dict[str, bytes]:
    """Return the file of as many training rows as the recipe wants, a random choice; nothing where
    it wants none.

    Columns are compared as they are encoded, pixels by their values, other numbers in their
    standard deviations, and so is what an encoder says of rows. Ids are not near to each other: of
    such rows there is no file.
    """
    if data.takes_ids and not is_encoded:
        return {}
    count = min(recipe.serving.nearest_rows, max(1, MOST_NUMBERS // train.x.shape[1]))
    if count == 0:
        return {}
    index = np.sort(generator(recipe.seed, Stream.NEAREST_ROWS).permutation(len(train))[:count])
    chosen = train.take(index)
    scale = np.ones(train.x.shape[1], dtype=np.float32)
    if is_encoded or (not data.columns and data.image is None):
        std = chosen.x.astype(np.float64).std(axis=0).astype(np.float32)
        scale = np.where(std > 0, std, scale)
    ids = index if chosen.ids is None else chosen.ids
    shown = MAX_ID_BYTES // len(chosen)
    names = tuple(str(name).encode()[:shown].decode(errors="ignore") for name in ids.tolist())
    return {TRAINING_ROWS: save(TrainingRows(chosen.x, scale, names).tensors())}
