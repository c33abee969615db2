"""Score rows as the service does, with exported graphs and one seed per request."""

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from model_store.inference.model import Model
from model_store.inference.noise import DRAW_INDEX, MAX_SEED
from model_store.inference.prediction import Prediction
from model_store.inference.runtime import Runtime
from model_store.scores.classification import MIN_PROBABILITY, Scores
from model_store.scores.records import concatenate
from model_store.scores.regression import log_density
from model_store.scores.sums import DrawSums
from model_store.scores.tasks import AnyScores, get_predictive
from model_store.scores.transforms import Transform
from model_store.types import Task
from training.data.rows import Rows
from training.seeds import Stream, hash_key

DRAW_COUNTS = (1, 2, 3, 5, 10, 20, 30, 50, 75, 100, 200, 500, 1000)
CHUNK_ROWS = 32
MAX_NOISE_NUMBERS = 2_000_000_000  # per calibration split, about a minute on one core
MIN_SHARING_ROWS = 16  # minimum rows per draw set, if draws are large


def draw_counts(default_draws: int) -> list[int]:
    """Return the draw counts to calibrate, up to the default count."""
    return sorted({count for count in DRAW_COUNTS if count < default_draws} | {default_draws})


def draw_seed(seed: int, request: int) -> int:
    return hash_key(seed, Stream.CALIBRATION, request) % (MAX_SEED + 1)


def rows_per_draw_set(runtime: Runtime, rows: int, num_draws: int) -> int:
    """Compute the number of calibration rows that share a draw set.

    Small draws are not shared. If a draw contains all weights, at least `MIN_SHARING_ROWS` rows
    share a draw set, which limits the noise to about `MAX_NOISE_NUMBERS`. This correlates their
    scores slightly, so the flag rate varies more between calibrations. Draws of ensembles do not
    depend on the seed, so all rows share them.
    """
    if runtime.algorithm == DRAW_INDEX:
        return rows
    if runtime.paired:
        return 1
    numbers = rows * num_draws * runtime.noise_dimension
    return max(MIN_SHARING_ROWS, math.ceil(numbers / MAX_NOISE_NUMBERS))


def served_outputs(
    runtime: Runtime, rows: Rows, num_draws: int, seed: int, share: int = 1
) -> Iterator[tuple[Float32[np.ndarray, "K N C"], Float32[np.ndarray, "N M"]]]:
    """Yield the outputs and density scores of each batch of rows.

    Each request has `share` rows, and request i has the seed `draw_seed(seed, i)`.
    """
    if not runtime.paired:  # all rows of a run share their draws
        for i, start in enumerate(range(0, len(rows), share)):
            draws = runtime.draw_set(draw_seed(seed, i), num_draws)
            yield runtime.run_set(rows.x[start : start + share].astype(np.float32), draws)
        return
    for start in range(0, len(rows), CHUNK_ROWS):
        x = rows.x[start : start + CHUNK_ROWS].astype(np.float32)
        requests = range(start // share, -(-(start + len(x)) // share))
        thetas = [runtime.draw(draw_seed(seed, i), 0, num_draws) for i in requests]
        theta = np.stack(thetas, axis=1)
        yield runtime.run(x, np.repeat(theta, share, axis=1)[:, start % share :][:, : len(x)])


def served_scores(
    runtime: Runtime,
    rows: Rows,
    counts: list[int],
    seed: int,
    share: int = 1,
    transform: Transform | None = None,
) -> tuple[list[AnyScores], Float32[np.ndarray, "N M"]]:
    """Score rows from the outputs of `served_outputs`, once for each draw count.

    Smaller counts use a prefix of the draws. Returns the scores for each count and the density
    scores.
    """
    predictive = get_predictive(runtime.task, transform)
    scores, densities = [], []
    for outputs, density in served_outputs(runtime, rows, counts[-1], seed, share):
        parts = (outputs[first:last] for first, last in pairwise([0, *counts]))
        sums = accumulate(map(predictive.sums, parts, [0, *counts]), DrawSums.merge)
        scores.append([predictive.scores(part, standard_errors=False) for part in sums])
        densities.append(density)
    return (
        [concatenate(list(parts)) for parts in zip(*scores, strict=True)],
        np.concatenate(densities),
    )


def served_prediction(
    model: Model,
    rows: Rows,
    num_draws: int,
    seed: int,
    share: int,
    measure: Callable[..., Any] | None = log_density,
) -> tuple[Prediction, Any]:
    """Make predictions from the outputs of `served_outputs`.

    Returns the prediction and, for regression, the measures of each target: by default, its
    log-likelihood under the mixture of draws, in nats.
    """
    predictions, measures, first = [], [], 0
    for outputs, density in served_outputs(model.runtime, rows, num_draws, seed, share):
        y = rows.y[first : first + len(density)].astype(np.float64)
        first += len(density)
        predictions.append(model.prediction(outputs, density))
        if measure is not None and model.manifest.task == "regression":
            measures.append(measure(outputs, y, model.manifest.transform))
    return Prediction.concatenate(predictions), concatenate(measures) if measures else None


def score(
    outputs: Float32[np.ndarray, "K N C"],
    y: np.ndarray,
    task: Task,
    transform: Transform | None = None,
) -> tuple[AnyScores, Float64[np.ndarray, "N"]]:
    """Compute each row's scores and log-likelihood.

    The log-likelihood is log mean_k p(y | x, theta_k), in nats and the target's units.
    """
    predictive = get_predictive(task, transform)
    scores = predictive.scores(predictive.sums(outputs), standard_errors=False)
    if isinstance(scores, Scores):
        probs = scores.probabilities[np.arange(len(y)), y]
        return scores, np.log(np.maximum(probs, MIN_PROBABILITY))
    return scores, log_density(outputs, y.astype(np.float64), transform)
