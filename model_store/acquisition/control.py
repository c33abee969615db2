"""Randomly selected control rows, which measure a model's quality on live data.

The hash of a row's id is a uniform number. Rows below the requested share can become control rows
and are never ranked. These rows depend neither on the version nor on earlier rankings. So for a
constant share, they are a random sample of each pool. Each pool contributes in proportion to its
acquired rows, not to its size.
"""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from model_store.acquisition.choice import id_hashes, random_scores, top

STRATUM = b"control"  # for possible control rows
CHOICE = b"drawn"  # for the choice among them
SHARE = b"share"  # for random rounding of their number
NO_SEED = 0


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
