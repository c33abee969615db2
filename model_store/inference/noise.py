"""Random noise for posterior draws, where `eps[k]` depends only on the seed and k.

`model_store/README.md` specifies the algorithms: Philox4x64-10 (Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3", 2011) generates 32-bit words, and `normal` maps them
to quantiles of the normal distribution. With 256 nodes per power of two, linear interpolation is as
exact in the tail as in the middle: the error is below 1e-6. The largest value is 6.34.

All operations are float32 conversions, additions and multiplications, whose rounding IEEE 754
defines, so all machines produce the same bits.
"""

import hashlib
import secrets
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from jaxtyping import Float32, Int64, UInt32
from numpy.lib.stride_tricks import sliding_window_view

Draws = Float32[np.ndarray, "K D"]
NOISE_ALGORITHM = "philox4x64-10/linear-quantile"
DRAW_INDEX = "draw-index"  # eps[k] = k for any seed, for models that are a list of draws
ROW_NOISE = f"{NOISE_ALGORITHM}/row-signs"
ALGORITHMS = (NOISE_ALGORITHM, DRAW_INDEX, ROW_NOISE)
MAX_SEED = 2**53 - 1  # largest integer that is exact in all JSON parsers
CHUNK = 16_384  # numbers per step, whose intermediate results fit in the processor's cache

SIGN = np.uint32(1 << 31)
HALF = np.float32(0.5)
NODE_BITS = 8  # of f's mantissa, for 2^8 nodes per power of two
SHIFT = 23 - NODE_BITS
FIRST_NODE = 126 << NODE_BITS  # the float32 bits of 1/2, shifted
NUM_NODES = (32 << NODE_BITS) + 1  # from 1/2 to 2^31


def fresh_seed() -> int:
    return secrets.randbelow(MAX_SEED + 1)


def standard_normal(seed: int, first_draw: int, num_draws: int, dimension: int) -> Draws:
    """Generate draws from N(0, I). Row k depends only on `seed`, D and `first_draw + k`."""
    blocks = -(-dimension // 8)
    eps_K_D = np.empty((num_draws, dimension), dtype=np.float32)
    # The generator increments the counter before each block.
    generator = np.random.Philox(counter=first_draw * blocks, key=seed)
    draws = max(1, CHUNK // dimension)
    for k in range(0, num_draws, draws):
        for i in range(0, dimension, CHUNK):  # one step unless a draw is larger
            part = eps_K_D[k : k + draws, i : i + CHUNK]
            num_rows, num_numbers = part.shape
            block_numbers = 8 * -(-num_numbers // 8)  # rounded up to blocks
            words = generator.random_raw(num_rows * block_numbers // 2).astype("<u8", copy=False)
            part[:] = normal(words.view("<u4")).reshape(num_rows, block_numbers)[:, :num_numbers]
    return eps_K_D


def normal(words: UInt32[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Map uniform 32-bit integers to standard normal numbers."""
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
    """Compute the line segments that interpolate the upper normal quantile between nodes."""
    bits = (np.arange(NUM_NODES, dtype=np.int32) + FIRST_NODE) << SHIFT
    node = bits.view(np.float32).astype(np.float64)
    upper_quantile = [-NormalDist().inv_cdf(f / 2**32) for f in node]
    quantile = np.array(upper_quantile, dtype=np.float32).astype(np.float64)
    # The last node, the median, has no next node.
    slope = np.append(np.diff(quantile) / np.diff(node), 0.0)
    intercept = quantile - slope * node
    return intercept.astype(np.float32), slope.astype(np.float32)


INTERCEPT, SLOPE = _quantile_lines()


def noise(algorithm: str, seed: int, first_draw: int, num_draws: int, dimension: int) -> Draws:
    """Generate noise with the named algorithm. Raise ValueError if it is unknown."""
    if algorithm in (NOISE_ALGORITHM, ROW_NOISE):
        return standard_normal(seed, first_draw, num_draws, dimension)
    if algorithm == DRAW_INDEX:
        return np.arange(first_draw, first_draw + num_draws, dtype=np.float32)[:, None]
    raise ValueError(f"expected one of {ALGORITHMS}, got {algorithm!r}")


@dataclass(frozen=True, eq=False)
class RowSigns:
    """Each row's shift and signs s, which make the noise of rows nearly independent.

    Number i of a draw of D numbers is s_i eps[(i + shift) mod D].
    """

    shifts: Int64[np.ndarray, "N"]
    signs: Float32[np.ndarray, "N D"]

    @classmethod
    def from_rows(cls, x: Float32[np.ndarray, "N I"], dimension: int) -> "RowSigns":
        size = 8 + -(-dimension // 8)
        digests = b"".join(hashlib.shake_128(row).digest(size) for row in (x + 0.0).astype("<f4"))
        numbers = np.frombuffer(digests, dtype=np.uint8).reshape(len(x), size)
        words = numbers[:, :8].copy().view("<u8")[:, 0]
        signs = np.unpackbits(numbers[:, 8:], axis=1, count=dimension, bitorder="little")
        return cls((words % dimension).astype(np.int64), 1.0 - 2.0 * signs.astype(np.float32))

    def apply(self, eps: Float32[np.ndarray, "K P D"], rows: slice) -> Float32[np.ndarray, "K n D"]:
        """Compute the noise for some rows, from one shared draw set or from each row's own."""
        shifts, (draws, pairs, dimension) = self.shifts[rows], eps.shape
        windows = sliding_window_view(np.concatenate([eps, eps], axis=2), dimension, axis=2)
        # With an index for each axis, the result is contiguous.
        draw, row = np.ogrid[:draws, : len(shifts)]
        theta_by_row: np.ndarray = windows[draw, row % pairs, shifts]
        theta_by_row *= self.signs[rows]
        return theta_by_row
