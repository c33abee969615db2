"""Select rows from a pool by score. A hash of the seed and row id breaks ties.

| acquisition | input per row | ranks by |
|---|---|---|
| `random` | its id | a uniform number |
| a score | the score | the score |
| `power_bald` | BALD | log BALD + Gumbel noise / beta: a sample with weights BALD^beta |
| `batchbald` | its outputs under each draw | a greedy choice |

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

import numpy as np
from jaxtyping import Float, Float64, Int64, UInt64

from model_store.errors import InvalidInput, list_choices
from model_store.inference.model import Model
from model_store.inference.prediction import check_computed
from model_store.scores.joint import BatchBald, greedy
from model_store.scores.tasks import PREDICTIVES
from model_store.types import JsonObject, Pause, Task, no_pause

RANDOM = "random"
CANDIDATE_BYTES = 64 << 20  # for all candidates of `batchbald`
MAX_JOINT_ROWS = 1000  # in a batch of `batchbald`
MIN_BETA, MAX_BETA = 1e-6, 1e6  # of power_bald: nearly random, nearly BALD
MIN_SCORE = 1e-300  # before a logarithm
STRATUM = b"control"  # for possible control rows
CHOICE = b"drawn"  # for the choice among them
SHARE = b"share"  # for random rounding of their number
NO_SEED = 0
Scores = Float64[np.ndarray, "N"]
Hashes = UInt64[np.ndarray, "N"]
ACQUISITIONS: dict[Task, tuple[str, ...]] = {
    task: (*predictive.acquisition_scores, *predictive.joint_acquisitions, RANDOM)
    for task, predictive in PREDICTIVES.items()
}


@dataclass(frozen=True)
class Choice:
    """The options for selecting k rows from a pool."""

    task: Task
    acquisition: str
    k: int
    num_samples: int
    race: float | None = None  # probability of dropping one of the k best rows
    beta: float = 1.0  # of power_bald
    priors: tuple[float, ...] | None = None  # class shares; None: as in training


def check_acquisition(name: str | None, task: Task) -> str:
    """Return the acquisition's name. Raise InvalidInput if the task does not support it."""
    if name is None:
        return PREDICTIVES[task].default_acquisition
    if name not in ACQUISITIONS[task]:
        raise InvalidInput(
            "acquisition", f"{list_choices(ACQUISITIONS[task])} for a model of {task}", repr(name)
        )
    return name


def check_beta(beta: float | None, acquisition: str, task: Task) -> float:
    """Return the exponent of the sampling weights.

    Raise InvalidInput if `beta` is set for an acquisition that does not sample.
    """
    if beta is None:
        return 1.0
    supported = PREDICTIVES[task].sampling_acquisitions
    if acquisition not in supported:
        expected = f"the acquisition {supported[0]}" if supported else f"no beta for a {task}"
        raise InvalidInput("beta", expected, repr(acquisition))
    return beta


def max_joint_candidates(choice: Choice, model: Model, rows: int) -> int | None:
    """Return the maximum number of joint candidates, or None. Raise InvalidInput if k is larger."""
    name, draws = choice.acquisition, choice.num_samples
    if name not in model.predictive.joint_acquisitions:
        return None
    max_candidates = CANDIDATE_BYTES // (4 * draws * model.manifest.output_size)
    max_rows = min(max_candidates, MAX_JOINT_ROWS)
    if min(choice.k, rows) > max_rows:
        expected = f"up to {max_rows} rows of this pool for {name} with {draws} draws"
        raise InvalidInput("k", expected, str(choice.k))
    return min(max_candidates, rows)


def id_hashes(ids: Sequence[str], seed: int, use: bytes = b"") -> Hashes:
    """Compute a 64-bit hash for each id, given the seed and purpose."""
    key = seed.to_bytes(8, "little")
    digests = b"".join(
        blake2b(name.encode(), digest_size=8, key=key, person=use).digest() for name in ids
    )
    return np.frombuffer(digests, dtype="<u8")


def random_scores(hashes: Hashes) -> Scores:
    return (hashes >> np.uint64(11)) * 2.0**-53


def power_scores(bald: Scores, ids: Sequence[str], seed: int, beta: float = 1.0) -> Scores:
    """Compute log BALD + Gumbel noise / beta.

    The rows with the largest values are a sample without replacement, with weights BALD^beta
    (Kirsch et al. 2023, "Stochastic batch acquisition", power acquisition; Vieira 2014, "Gumbel-max
    trick").
    """
    uniform = random_scores(id_hashes(ids, seed, b"gumbel")) + 2.0**-54  # above 0
    return np.log(np.maximum(bald, MIN_SCORE)) - np.log(-np.log(uniform)) / beta


def ranking(scores: Scores | None, ids: Sequence[str], seed: int, k: int) -> list[JsonObject]:
    """Rank k rows by score, or at random if None. Raise InvalidInput for an invalid score."""
    hashes = id_hashes(ids, seed)
    if scores is None:
        scores = random_scores(hashes)
    check_computed(scores, "pool")
    best = top(scores, hashes, k)
    return _ranked(best, scores[best], ids)


def joint_ranking(
    joint: BatchBald,
    rows: Int64[np.ndarray, "M"],
    ids: Sequence[str],
    seed: int,
    k: int,
    pause: Pause = no_pause,
) -> list[JsonObject]:
    """Select k rows from a pool by their joint score. The result is in the `/acquire` format.

    `rows` are the candidates' indices in the pool. If k is larger, all of them are selected.
    """
    order = np.argsort(id_hashes([ids[i] for i in rows.tolist()], seed), kind="stable")
    selection = greedy(joint, order, min(k, len(rows)), pause)
    indices = rows[[candidate for candidate, _ in selection]]
    return _ranked(indices, np.array([gain for _, gain in selection]), ids)


def _ranked(
    indices: Int64[np.ndarray, "K"], scores: Float64[np.ndarray, "K"], ids: Sequence[str]
) -> list[JsonObject]:
    ranked = enumerate(zip(indices.tolist(), scores.tolist(), strict=True), start=1)
    return [{"rank": rank, "index": i, "id": ids[i], "score": score} for rank, (i, score) in ranked]


def top(scores: Float[np.ndarray, "N"], hashes: Hashes, k: int) -> Int64[np.ndarray, "K"]:
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
    """Select random unlabelled rows as control rows, as a share of k.

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
