"""Control rows: rows that no score has chosen, whose labels judge a version on live data.

The hash of a row's id is a uniform number. Rows below the requested share can become control rows
and are never ranked. So these rows depend neither on the version nor on earlier choices: for a
constant share they are a random sample of each pool. A pool counts by its acquired rows, not by its
size.
"""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from model_store.acquisition.choice import id_hashes, random_scores, top

STRATUM = b"control"  # hash of the rows that can be set aside
DRAWN = b"drawn"  # hash of the choice among them
SHARE = b"share"  # hash of rounding the number of rows
NO_SEED = 0


@dataclass(frozen=True, eq=False)
class Selection:
    """The ranked rows and the control rows of a pool, by index."""

    ranked: Int64[np.ndarray, "R"]
    control: Int64[np.ndarray, "C"]
    excluded: int  # labelled rows


def select(
    ids: Sequence[str], labelled: AbstractSet[str], share: float, k: int, seed: int
) -> Selection:
    """Choose control rows, `share` of k, among those without a label.

    The number is rounded at random, so that it is right on average. It is smaller if too few rows
    can be set aside. If k covers the pool, all of these are.
    """
    left = np.fromiter((i for i, name in enumerate(ids) if name not in labelled), dtype=np.int64)
    excluded = len(ids) - len(left)
    if share == 0.0 or len(left) == 0:
        return Selection(left, np.empty(0, dtype=np.int64), excluded)
    names = [ids[i] for i in left.tolist()]
    may_be = random_scores(id_hashes(names, NO_SEED, STRATUM)) < share
    wanted = share * min(k, len(left))
    by_chance = float(random_scores(id_hashes([""], seed, SHARE))[0])
    count = math.floor(wanted) + (by_chance < wanted - math.floor(wanted))
    stratum = left[may_be]
    if count == 0 or len(stratum) == 0:
        return Selection(left[~may_be], stratum[:0], excluded)
    hashes = id_hashes([ids[i] for i in stratum.tolist()], seed, DRAWN)
    drawn = stratum if k >= len(left) else stratum[top(random_scores(hashes), hashes, count)]
    return Selection(left[~may_be], drawn, excluded)
