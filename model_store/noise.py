"""The noise behind every posterior draw: `eps[k]` is a function of (seed, k) and of nothing else.

Algorithm `philox4x64-10/as241` (its name stands in each manifest):

1. Block b = 1, 2, ... of draw k is Philox4x64-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
   easy as 1, 2, 3", 2011) with counter (b, k, 0, 0), least significant word first, and key (seed, 0). It gives
   four 64-bit words; each is split in two 32-bit words, the low half first.
2. A 32-bit word w becomes the uniform u = (w + 1/2) / 2^32, which lies strictly inside (0, 1).
3. u becomes a standard normal by PPND7 (Wichura, "Algorithm AS 241: the percentage points of the normal
   distribution", 1988; relative accuracy 1e-7), computed in float64 and rounded once to float32.

Every step is an integer operation or one of IEEE 754's exactly rounded operations (+, -, *, /, sqrt); the
logarithm in the tail is a polynomial of those. So the same bits come out on every machine.
"""

import numpy as np
from jaxtyping import Float, Float64, UInt32

NOISE_ALGORITHM = "philox4x64-10/as241"
MAX_SEED = 2**53 - 1  # the largest integer that JSON readers agree on
CHUNK = 16_384  # numbers made at a time, so that intermediate results stay in the processor's cache

# AS 241's PPND7: numerators and denominators by rising power.
CENTRE_NUM = (3.3871327179, 5.0434271938e1, 1.5929113202e2, 5.9109374720e1)
CENTRE_DEN = (1.0, 1.7895169469e1, 7.8757757664e1, 6.7187563600e1)
TAIL_NUM = (1.4234372777, 2.7568153900, 1.3067284816, 1.7023821103e-1)
TAIL_DEN = (1.0, 7.3700164250e-1, 1.2021132975e-1)
FAR_TAIL_NUM = (6.6579051150, 3.0812263860, 4.2868294337e-1, 1.7337203997e-2)
FAR_TAIL_DEN = (1.0, 2.4197894225e-1, 1.2258202635e-2)

LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476


def standard_normal(seed: int, first_draw: int, num_draws: int, dimension: int) -> Float[np.ndarray, "K D"]:
    """Return the noise of draws `first_draw` to `first_draw + num_draws - 1` of a seed.

    Args:
        seed: 0 to `MAX_SEED`.
        first_draw: index of the first draw, from 0.
        num_draws: K, how many draws.
        dimension: D, how many numbers a draw holds.

    Returns:
        float32 array of shape (K, D), N(0, I). Row k depends on `seed` and `first_draw + k` alone, and a
        shorter draw is a prefix of a longer one.
    """
    num_words = -(-dimension // 8) * 4
    eps_K_D = np.empty((num_draws, dimension), dtype=np.float32)
    chunk = max(1, CHUNK // dimension)
    for start in range(0, num_draws, chunk):
        stop = min(start + chunk, num_draws)
        words = np.empty((stop - start, num_words), dtype="<u8")
        for i in range(stop - start):
            # numpy adds one to the counter before it makes a block
            bits = np.random.Philox(counter=[0, first_draw + start + i, 0, 0], key=[seed, 0])
            words[i] = bits.random_raw(num_words)
        eps_K_D[start:stop] = normal_quantile(words.view("<u4")[:, :dimension])
    return eps_K_D


def normal_quantile(words: UInt32[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Map 32-bit words to the standard normal quantile of (word + 1/2) / 2^32, by AS 241's PPND7."""
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    q = u - 0.5
    r = 0.180625 - q * q
    z = q * (polynomial(CENTRE_NUM, r) / polynomial(CENTRE_DEN, r))
    tail = np.abs(q) > 0.425
    q_tail = q[tail]
    r = np.sqrt(-log(np.minimum(u[tail], 1.0 - u[tail])))
    near = polynomial(TAIL_NUM, r - 1.6) / polynomial(TAIL_DEN, r - 1.6)
    far = polynomial(FAR_TAIL_NUM, r - 5.0) / polynomial(FAR_TAIL_DEN, r - 5.0)
    z[tail] = np.copysign(np.where(r <= 5.0, near, far), q_tail)
    return z


def polynomial(coefficients: tuple[float, ...], x: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Evaluate a polynomial, coefficients by rising power, by Horner's rule."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value *= x
        value += coefficient
    return value


def log(x: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Natural logarithm of positive normal numbers to 1e-10, the same bits everywhere (libraries' logs differ)."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < SQRT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)  # now within a factor sqrt(2) of 1
    exponent = exponent - small
    t = (mantissa - 1.0) / (mantissa + 1.0)  # log m = 2 artanh t
    return exponent * LN2 + 2.0 * t * polynomial(tuple(1.0 / (2 * n + 1) for n in range(7)), t * t)
