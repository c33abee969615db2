"""Select rows from a pool by score. A hash of the seed and row id breaks ties.

| acquisition | input per row | ranks by |
|---|---|---|
| `random` | its id | a uniform number |
| a score | the score | the score |
| `power_bald` | BALD | log BALD + Gumbel noise / beta: a sample with weights BALD^beta |
| a joint score | its outputs under each draw | a greedy choice |

The last two choose one of several identical rows, until no other rows are left.

**Control rows** are selected at random and measure a model's quality on live data. The hash of a
row's id is a uniform number. Rows below the requested share can become control rows and are never
ranked. These rows depend neither on the version nor on earlier rankings. So for a constant share,
they are a random sample of each pool. Each pool contributes in proportion to its acquired rows, not
to its size.
"""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int64, UInt64

from model_store.errors import InvalidInput, list_choices
from model_store.inference.model import Model
from model_store.inference.prediction import check_computed
from model_store.scores.joint import JointScore, greedy
from model_store.scores.tasks import PREDICTIVES
from model_store.types import Pause, Task, no_pause

RANDOM = "random"
CANDIDATE_BYTES = 64 << 20  # for all candidates of a joint score
MAX_JOINT_ROWS = 1000  # in a batch of a joint score
MIN_BETA, MAX_BETA = 1e-6, 1e6  # of power_bald: nearly random, nearly BALD
MIN_SCORE = 1e-300  # before a logarithm
HASH_STEP_ROWS = 256  # between two pauses
STRATUM = b"control"  # for possible control rows
CHOICE = b"drawn"  # for the choice among them
SHARE = b"share"  # for random rounding of their number
NO_SEED = 0
ACQUISITIONS: dict[Task, tuple[str, ...]] = {
    task: (*predictive.acquisition_scores, *predictive.joint_scores, RANDOM)
    for task, predictive in PREDICTIVES.items()
}


def check_acquisition(name: str | None, task: Task) -> str:
    """Check that the task supports an acquisition function and return its name.

    Raises:
        InvalidInput: if the task does not have this acquisition.
    """
    if name is None:
        return PREDICTIVES[task].default_acquisition
    if name not in ACQUISITIONS[task]:
        raise InvalidInput(
            "acquisition",
            f"{list_choices(ACQUISITIONS[task])} for a model of {task}",
            repr(name),
        )
    return name


def check_beta(beta: float | None, acquisition: str, task: Task) -> float:
    """Check and return the exponent of the sampling weights. The default is 1.

    Raises:
        InvalidInput: if the acquisition has no exponent, or it is out of bounds.
    """
    if beta is None:
        return 1.0
    supported = PREDICTIVES[task].sampling_acquisitions
    if acquisition not in supported:
        expected = f"the acquisition {supported[0]}" if supported else f"no beta for a {task}"
        raise InvalidInput("beta", expected, repr(acquisition))
    if not MIN_BETA <= beta <= MAX_BETA:
        raise InvalidInput("beta", f"a number from {MIN_BETA:g} to {MAX_BETA:g}", f"{beta:g}")
    return beta


def max_joint_candidates(
    name: str, model: Model, rows: int, k: int, num_samples: int
) -> int | None:
    """Return the maximum number of candidates, or None if the score is not joint.

    Raises:
        InvalidInput: if k is larger.
    """
    if name not in model.predictive.joint_scores:
        return None
    numbers = model.predictive.joint_scores[name].numbers_per_row(
        num_samples, model.manifest.output_size
    )
    max_candidates = CANDIDATE_BYTES // (4 * numbers)
    max_rows = min(max_candidates, MAX_JOINT_ROWS)
    if min(k, rows) > max_rows:
        expected = f"up to {max_rows} rows of this pool for {name} with {num_samples} draws"
        raise InvalidInput("k", expected, str(k))
    return min(max_candidates, rows)


@dataclass(frozen=True, eq=False)
class Copies:
    """The groups of identical rows in a pool, sorted by digest."""

    first: Int64[np.ndarray, "G"]  # a row of each group
    group: Int64[np.ndarray, "N"]  # of each row


def find_copies(x: Float32[np.ndarray, "N I"], pause: Pause = no_pause) -> Copies:
    digests = []
    for first in range(0, len(x), HASH_STEP_ROWS):
        digests.append(row_digests(x[first : first + HASH_STEP_ROWS]))
        pause()
    return group_copies(np.concatenate(digests))


def row_digests(x: Float32[np.ndarray, "N I"]) -> UInt64[np.ndarray, "N 2"]:
    """Compute a 128-bit digest of each row."""
    digests = b"".join(blake2b(row, digest_size=16).digest() for row in np.ascontiguousarray(x))
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64).reshape(len(x), 2)


def group_copies(digests: UInt64[np.ndarray, "N 2"]) -> Copies:
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (digests[order][1:] != digests[order][:-1]).any(axis=1)
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.cumsum(is_new) - 1
    return Copies(order[is_new], group)


def id_hashes(ids: Sequence[str], seed: int, use: bytes = b"") -> UInt64[np.ndarray, "N"]:
    """Compute a 64-bit hash for each id, given the seed and purpose."""
    key = seed.to_bytes(8, "little")
    digests = b"".join(
        blake2b(name.encode(), digest_size=8, key=key, person=use).digest() for name in ids
    )
    return np.frombuffer(digests, dtype="<u8")


def random_scores(hashes: UInt64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
    return (hashes >> np.uint64(11)) * 2.0**-53


def power_scores(
    bald: Float64[np.ndarray, "N"], ids: Sequence[str], seed: int, beta: float = 1.0
) -> Float64[np.ndarray, "N"]:
    """Compute log BALD + Gumbel noise / beta.

    The rows with the largest values are a sample without replacement, with weights BALD^beta
    (Kirsch et al. 2023, "Stochastic batch acquisition", power acquisition; Vieira 2014, "Gumbel-max
    trick").
    """
    uniform = random_scores(id_hashes(ids, seed, b"gumbel")) + 2.0**-54  # above 0
    scores: np.ndarray = np.log(np.maximum(bald, MIN_SCORE)) - np.log(-np.log(uniform)) / beta
    return scores


def ranking(
    scores: Float64[np.ndarray, "N"] | None,
    ids: Sequence[str],
    seed: int,
    k: int,
    copies: Copies | None = None,
) -> list[dict[str, Any]]:
    """Rank the k rows with the highest scores, or k random rows if there are no scores.

    If there are `copies`, the first row of each group precedes all repetitions.

    Raises:
        InvalidInput: for a row that the model cannot score.
    """
    hashes = id_hashes(ids, seed)
    if scores is None:
        scores = random_scores(hashes)
    check_computed(scores, "pool")
    if copies is None:
        best = top(scores, hashes, k)
    else:
        best = np.lexsort((hashes, -scores, is_repetition(copies, hashes)))[:k]
    return _ranked(best, scores[best], ids)


def _ranked(
    indices: Int64[np.ndarray, "K"], scores: Float64[np.ndarray, "K"], ids: Sequence[str]
) -> list[dict[str, Any]]:
    pairs = zip(indices.tolist(), scores.tolist(), strict=True)
    return [
        {"rank": rank, "index": i, "id": ids[i], "score": score}
        for rank, (i, score) in enumerate(pairs, start=1)
    ]


def joint_ranking(
    joint: JointScore,
    rows: Int64[np.ndarray, "M"],
    copies: Copies,
    ids: Sequence[str],
    k: int,
    pause: Pause = no_pause,
) -> list[dict[str, Any]]:
    """Select k rows from a pool by a joint score. The result is in the `/acquire` format.

    `rows` are the candidates, as indices of `copies.first`; all of them if k is larger. Hashes of
    all ids decide ties and the order of copies.
    """
    pause()
    hashes = id_hashes(ids, joint.seed)
    pause()
    by_group = np.lexsort((hashes, copies.group))
    starts = np.searchsorted(copies.group[by_group], np.arange(len(copies.first) + 1))
    order = np.argsort(hashes[by_group[starts[rows]]], kind="stable")
    selection = greedy(joint, np.diff(starts)[rows], order, min(k, len(hashes)), pause)
    next_copy = starts.copy()
    indices = np.empty(len(selection), dtype=np.int64)
    for i, (candidate, _) in enumerate(selection):
        group = rows[candidate]
        indices[i] = by_group[next_copy[group]]
        next_copy[group] += 1
    return _ranked(indices, np.array([gain for _, gain in selection]), ids)


def is_repetition(copies: Copies, hashes: UInt64[np.ndarray, "N"]) -> Bool[np.ndarray, "N"]:
    """Mark duplicate rows, keeping the row with the smallest hash in each group."""
    order = np.lexsort((hashes, copies.group))
    repetitions = np.empty(len(order), dtype=bool)
    repetitions[order] = np.diff(copies.group[order], prepend=-1) == 0
    return repetitions


def top(
    scores: Float[np.ndarray, "N"], hashes: UInt64[np.ndarray, "N"], k: int
) -> Int64[np.ndarray, "K"]:
    """Return the indices of the k highest scores in descending order. Hashes break ties."""
    k = min(k, len(scores))
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
    (candidates,) = np.nonzero(scores >= threshold)
    order = np.lexsort((hashes[candidates], -scores[candidates]))
    return candidates[order[:k]]


@dataclass(frozen=True, eq=False)
class Selection:
    ranked: Int64[np.ndarray, "R"]
    control: Int64[np.ndarray, "C"]
    excluded: int  # labelled rows


def select(
    ids: Sequence[str], labelled: AbstractSet[str], share: float, k: int, seed: int
) -> Selection:
    """Select random unlabelled rows as control rows. Their number is a share of k.

    The number is rounded at random, so it is correct on average. It is smaller if too few rows
    have hashes below the share. If k covers the pool, all these rows are selected.
    """
    rows = np.arange(len(ids))
    if labelled:
        rows = np.array([i for i in rows.tolist() if ids[i] not in labelled], dtype=np.int64)
    excluded = len(ids) - len(rows)
    if share == 0.0 or len(rows) == 0:
        return Selection(rows, np.empty(0, dtype=np.int64), excluded)
    names = [ids[i] for i in rows.tolist()]
    is_eligible = random_scores(id_hashes(names, NO_SEED, STRATUM)) < share
    expected = share * min(k, len(rows))
    uniform = float(random_scores(id_hashes([""], seed, SHARE))[0])
    count = math.floor(expected) + (uniform < expected - math.floor(expected))
    stratum = rows[is_eligible]
    if count == 0 or len(stratum) == 0:
        return Selection(rows[~is_eligible], stratum[:0], excluded)
    hashes = id_hashes([ids[i] for i in stratum.tolist()], seed, CHOICE)
    control = stratum if k >= len(rows) else stratum[top(random_scores(hashes), hashes, count)]
    return Selection(rows[~is_eligible], control, excluded)
