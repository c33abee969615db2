"""The noise behind every posterior draw: `eps[k]` is a function of (seed, k) and of nothing else.

Algorithm `philox4x64-10/linear-quantile` (its name stands in each manifest):

1. A draw of D numbers takes B = ceil(D / 8) blocks. Block b = 1 .. B of draw k is Philox4x64-10
   (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) of the
   counter k B + b and the key seed. It gives four 64-bit words; each is split in two 32-bit words,
   the low half first.
2. A 32-bit word is a sign (the highest bit) and a number v of 31 bits. With f = v + 1/2 in float32
   the size of the normal is the upper quantile of f / 2^32, linear in f between nodes: 256 to each
   power of two, so that the tail, where v is small, is as fine as the middle. The result is within
   1e-6 of the exact quantile everywhere; the largest is 6.34.

Step 2 is one rounded conversion, one addition, and a multiplication and an addition of float32 with
numbers from a table, all exactly rounded by IEEE 754; the table is made of float32 values of the
exact quantile at the nodes. So the same bits come out on every machine.
"""

from statistics import NormalDist

import numpy as np
from jaxtyping import Float32, UInt32

NOISE_ALGORITHM = "philox4x64-10/linear-quantile"
DRAW_INDEX = "draw-index"  # eps[k] = k, whatever the seed: for models that are a list of draws
ALGORITHMS = (NOISE_ALGORITHM, DRAW_INDEX)
MAX_SEED = 2**53 - 1  # the largest integer that JSON readers agree on
CHUNK = 16_384  # numbers made at a time, so that intermediate results stay in the processor's cache

SIGN = np.uint32(1 << 31)
HALF = np.float32(0.5)
NODE_BITS = 8  # of f's mantissa: 2^8 nodes to each power of two
SHIFT = 23 - NODE_BITS
FIRST_NODE = 126 << NODE_BITS  # the float32 bits of 1/2, shifted
NUM_NODES = (32 << NODE_BITS) + 1  # from 1/2 to 2^31


def standard_normal(
    seed: int, first_draw: int, num_draws: int, dimension: int
) -> Float32[np.ndarray, "K D"]:
    """Return the noise of draws `first_draw` to `first_draw + num_draws - 1` of a seed.

    Args:
        seed: 0 to `MAX_SEED`.
        first_draw: index of the first draw, from 0.
        num_draws: K, how many draws.
        dimension: D, how many numbers a draw holds.

    Returns:
        float32 array of shape (K, D), N(0, I). Row k depends on `seed`, D and `first_draw + k`
        alone.
    """
    blocks = -(-dimension // 8)
    eps_K_D = np.empty((num_draws, dimension), dtype=np.float32)
    # Adds one to the counter before each block
    generator = np.random.Philox(counter=first_draw * blocks, key=seed)
    draws = max(1, CHUNK // dimension)
    for k in range(0, num_draws, draws):
        for i in range(0, dimension, CHUNK):  # a step, unless a draw is larger
            part = eps_K_D[k : k + draws, i : i + CHUNK]
            num_rows, num_numbers = part.shape
            made = 8 * -(-num_numbers // 8)  # whole blocks
            words = generator.random_raw(num_rows * made // 2).astype("<u8", copy=False)
            part[:] = normal(words.view("<u4")).reshape(num_rows, made)[:, :num_numbers]
    return eps_K_D


def normal(words: UInt32[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Map uniform 32-bit words to standard normal numbers."""
    f = (words & ~SIGN).view(np.int32).astype(np.float32)
    f += HALF
    node = f.view(np.int32) >> SHIFT
    node -= FIRST_NODE
    z = SLOPE.take(node)
    z *= f
    z += INTERCEPT.take(node)
    bits = z.view(np.uint32)
    bits ^= words & SIGN
    return z


def _quantile_lines() -> tuple[Float32[np.ndarray, "nodes"], Float32[np.ndarray, "nodes"]]:
    """Return intercept and slope, from each node to the next, of the upper quantile as a function
    of f."""
    node = (
        ((np.arange(NUM_NODES, dtype=np.int32) + FIRST_NODE) << SHIFT)
        .view(np.float32)
        .astype(np.float64)
    )
    quantile = np.array([-NormalDist().inv_cdf(f / 2**32) for f in node], dtype=np.float32).astype(
        np.float64
    )
    # The last node, the median, is a value by itself
    slope = np.append(np.diff(quantile) / np.diff(node), 0.0)
    intercept = quantile - slope * node
    return intercept.astype(np.float32), slope.astype(np.float32)


INTERCEPT, SLOPE = _quantile_lines()


def noise(
    algorithm: str, seed: int, first_draw: int, num_draws: int, dimension: int
) -> Float32[np.ndarray, "K D"]:
    """Return the noise of draws by the algorithm of that name, as `standard_normal` does.

    Raises:
        ValueError: if there is no such algorithm.
    """
    if algorithm == NOISE_ALGORITHM:
        return standard_normal(seed, first_draw, num_draws, dimension)
    if algorithm == DRAW_INDEX:
        return np.arange(first_draw, first_draw + num_draws, dtype=np.float32)[:, None]
    raise ValueError(f"expected {NOISE_ALGORITHM!r} or {DRAW_INDEX!r}, got {algorithm!r}")
