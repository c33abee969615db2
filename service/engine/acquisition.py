"""Ranking a pool: by a score, ties and `random` decided by seed and id alone."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt64

from model_store.artifacts.manifest import Task
from model_store.errors import InvalidInput
from model_store.inference.runtime import DrawSet
from model_store.scores.classification import SCORE_NAMES, Scores
from model_store.scores.tasks import AnyScores, scores_of, sums_of
from service.registry.models import Served

RANDOM = "random"
VARIANCES = {"variance": "std", "epistemic_variance": "epistemic_std"}  # and of what they are the square
ACQUISITIONS: dict[Task, tuple[str, ...]] = {
    "classification": (*SCORE_NAMES, RANDOM),
    "regression": (*VARIANCES, RANDOM),
}
DEFAULTS: dict[Task, str] = {"classification": "bald", "regression": "epistemic_variance"}


def check_acquisition(name: str, task: Task) -> None:
    """Raise InvalidInput for an acquisition of another task."""
    if name not in ACQUISITIONS[task]:
        raise InvalidInput("acquisition", f"one of {list(ACQUISITIONS[task])} for a model of {task}", repr(name))


def acquisition_scores(scores: AnyScores, name: str) -> Float64[np.ndarray, "N"]:
    """Return the scores to rank by: more is more worth a label."""
    return scores.by_name()[name] if isinstance(scores, Scores) else np.square(scores.by_name()[VARIANCES[name]])


def id_hashes(ids: Sequence[str], seed: int) -> UInt64[np.ndarray, "N"]:
    """Return for each id 64 bits that are a function of it and the seed, whatever stands beside it."""
    key = seed.to_bytes(8, "little")
    digests = b"".join(blake2b(name.encode(), digest_size=8, key=key).digest() for name in ids)
    return np.frombuffer(digests, dtype="<u8")


def random_scores(hashes: UInt64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
    """Return uniform scores in [0, 1)."""
    return (hashes >> np.uint64(11)) * 2.0**-53


def top(scores: Float64[np.ndarray, "N"], hashes: UInt64[np.ndarray, "N"], k: int) -> Int64[np.ndarray, "K"]:
    """Return the indices of the k largest scores, largest first, ties by hash."""
    k = min(k, len(scores))
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    (candidates,) = np.nonzero(scores >= least)
    order = np.lexsort((hashes[candidates], -scores[candidates]))
    return candidates[order[:k]]


def pool_scores(
    served: Served, x: Float32[np.ndarray, "N I"], draws: DrawSet, score: str
) -> Float64[np.ndarray, "N"]:
    """Return one acquisition score of pool rows, all under the same draws; variances are in squared target units."""
    outputs, _ = served.model.runtime.run_set(x, draws)
    task = served.model.manifest.task
    return acquisition_scores(scores_of(task, sums_of(task, outputs), standard_errors=False), score)
