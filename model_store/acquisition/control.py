"""Rows that are set aside as control: no score chose them, so their labels can judge a version on
live data.

A row may be set aside if a number that its id alone decides, uniform from 0 to 1, is below the
share that is asked for; such rows are never ranked. So which rows can be control depends neither on
the version nor on earlier choices: as long as the share stays, they are a random sample of each
pool. Pools count by how many rows are acquired of them, not by their size.
"""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from model_store.acquisition.choice import id_hashes, random_scores, top

STRATUM = b"control"  # what hashes decide whether a row may be set aside
DRAWN = b"drawn"  # and which of these are
SHARE = b"share"  # and how many, where the share of k is no whole number
NO_SEED = 0


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows of a pool that are ranked and those that are set aside, by their places in it."""

    ranked: Int64[np.ndarray, "R"]
    control: Int64[np.ndarray, "C"]
    excluded: int  # rows that are labelled already


def select(
    ids: Sequence[str], labelled: AbstractSet[str], share: float, k: int, seed: int
) -> Selection:
    """Choose the rows that are set aside, `share` of k, among those without a label.

    A number that is not whole is rounded up or down by chance, so that it is right on average.
    There are fewer if the pool has too few that may be set aside; if k is the whole pool, all are.
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
