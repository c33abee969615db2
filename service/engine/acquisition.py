"""Ranking a pool: by a score, ties and `random` decided by seed and id alone."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, UInt64

from model_store.errors import InvalidInput
from model_store.scores.tasks import PREDICTIVES
from model_store.types import Task
from service.engine.decision import check_computed

RANDOM = "random"
ACQUISITIONS: dict[Task, tuple[str, ...]] = {
    task: (*predictive.acquisition_scores, RANDOM) for task, predictive in PREDICTIVES.items()
}


def checked_acquisition(name: str | None, task: Task) -> str:
    """Return the acquisition that a request means, None the task's default.

    Raises:
        InvalidInput: if it is one of another task.
    """
    if name is None:
        return PREDICTIVES[task].default_acquisition
    if name not in ACQUISITIONS[task]:
        raise InvalidInput("acquisition", f"one of {list(ACQUISITIONS[task])} for a model of {task}", repr(name))
    return name


def id_hashes(ids: Sequence[str], seed: int) -> UInt64[np.ndarray, "N"]:
    """Return for each id 64 bits that are a function of it and the seed, whatever stands beside it."""
    key = seed.to_bytes(8, "little")
    digests = b"".join(blake2b(name.encode(), digest_size=8, key=key).digest() for name in ids)
    return np.frombuffer(digests, dtype="<u8")


def random_scores(hashes: UInt64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
    """Return uniform scores in [0, 1)."""
    return (hashes >> np.uint64(11)) * 2.0**-53


def ranking(scores: Float64[np.ndarray, "N"] | None, ids: Sequence[str], seed: int, k: int) -> list[dict[str, Any]]:
    """Return the k rows most worth a label as /acquire answers them; without scores they are random.

    Raises:
        InvalidInput: naming a row that the model cannot score.
    """
    hashes = id_hashes(ids, seed)
    if scores is None:
        scores = random_scores(hashes)
    check_computed(scores, "pool")
    return [
        {"rank": rank, "index": i, "id": ids[i], "score": float(scores[i])}
        for rank, i in enumerate(top(scores, hashes, k).tolist(), start=1)
    ]


def top(scores: Float64[np.ndarray, "N"], hashes: UInt64[np.ndarray, "N"], k: int) -> Int64[np.ndarray, "K"]:
    """Return the indices of the k largest scores, largest first, ties by hash."""
    k = min(k, len(scores))
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    (candidates,) = np.nonzero(scores >= least)
    order = np.lexsort((hashes[candidates], -scores[candidates]))
    return candidates[order[:k]]
