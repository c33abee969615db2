"""The noise of a draw: golden values, the algorithm written out again in plain Python, prefixes, distribution."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from model_store import noise
from model_store.noise import MAX_SEED, NOISE_ALGORITHM, normal_quantile, standard_normal

# Draws 0 to 2, the first four numbers of each, as float32 bits. They are the promise that answers stay replayable:
# if they must change, so must NOISE_ALGORITHM.
GOLDEN = {
    0: [
        [0xBFE85A78, 0xC011668E, 0x3E919DA0, 0xBF338A3A],
        [0x3FEF336D, 0xBF4CCBDC, 0xBF336883, 0xBF498E21],
        [0xBEED0A31, 0x3ED36AB4, 0xBF43F560, 0x3E907A11],
    ],
    7: [
        [0xBF7AB093, 0x3F91708D, 0x3FF523AB, 0xBF09ABC7],
        [0x3DBB1897, 0x3F924907, 0xBE7F400C, 0x3F81BCD2],
        [0xBFBA3239, 0x3EC8A689, 0xBF03CF30, 0xBF57C699],
    ],
    2**53 - 1: [
        [0xBEB0FC51, 0xBE7655FC, 0xBEFCCFA9, 0xBE081064],
        [0xBEF7421D, 0xBF45821F, 0x3F9E8BFC, 0xC01FB6FC],
        [0x3E8E90D0, 0xBE008184, 0xBFBF80F1, 0x3FCBCF57],
    ],
}
WORD_64 = 2**64 - 1


@pytest.mark.parametrize("seed", GOLDEN)
def test_golden_values_do_not_change(seed):
    assert NOISE_ALGORITHM == "philox4x64-10/as241"
    assert standard_normal(seed, 0, 3, 4).view(np.uint32).tolist() == GOLDEN[seed]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, MAX_SEED), first_draw=st.integers(0, 2**40), dimension=st.integers(1, 40))
def test_every_bit_is_that_of_the_algorithm_in_plain_python(seed, first_draw, dimension):
    made = standard_normal(seed, first_draw, 3, dimension)
    for k in range(3):
        words = plain_words(seed, first_draw + k, dimension)
        expected = np.array([plain_normal(word) for word in words]).astype(np.float32)
        assert made[k].tobytes() == expected.tobytes()


def test_the_tails_are_those_of_the_algorithm_in_plain_python():
    words = extreme_words()
    expected = np.array([plain_normal(int(word)) for word in words])
    assert normal_quantile(words).tobytes() == expected.tobytes()


def test_plain_philox_gives_the_known_answers_of_its_authors():
    # From kat_vectors of the Random123 distribution, philox4x64 with 10 rounds.
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert philox4x64([0] * 4, [0] * 2) == zeros
    assert philox4x64([WORD_64] * 4, [WORD_64] * 2) == ones


@pytest.mark.parametrize("seed", [0, 7, MAX_SEED])
@pytest.mark.parametrize("dimension", [1, 8, 197])
def test_the_first_draws_of_many_are_the_draws_of_few(seed, dimension):
    assert (
        standard_normal(seed, 0, 100, dimension)[:50].tobytes() == standard_normal(seed, 0, 50, dimension).tobytes()
    )


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 99), count=st.integers(0, 30), dimension=st.integers(1, 30))
def test_any_chunk_by_itself_is_that_part_of_the_whole(first, count, dimension):
    whole = standard_normal(11, 0, 130, 30)
    chunk = standard_normal(11, first, count, dimension)
    assert chunk.tobytes() == whole[first : first + count, :dimension].tobytes()


@pytest.mark.parametrize("dimension", [noise.CHUNK // 50, noise.CHUNK - 1, noise.CHUNK, noise.CHUNK + 1])
def test_the_size_of_the_internal_chunk_does_not_show(dimension):
    whole = standard_normal(5, 3, 60, dimension)
    alone = [standard_normal(5, 3 + k, 1, dimension)[0] for k in (0, 1, 49, 50, 51, 59)]
    assert np.stack(alone).tobytes() == whole[[0, 1, 49, 50, 51, 59]].tobytes()


def test_draws_and_seeds_differ():
    rows = np.concatenate([standard_normal(seed, 0, 40, 6) for seed in (0, 1, 2, MAX_SEED - 1, MAX_SEED)])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_quantiles_are_accurate_to_the_last_word():
    middle = np.linspace(0, 2**32 - 1, 200_001).astype(np.uint32)
    words = np.concatenate([middle, extreme_words()])
    u = (words.astype(np.float64) + 0.5) / 2**32
    # From the near end: 1 - u is exact there, and the exact quantile keeps its digits.
    exact = np.where(u < 0.5, stats.norm.ppf(u), -stats.norm.ppf(1.0 - u))
    np.testing.assert_allclose(normal_quantile(words), exact, rtol=2e-7)


def test_the_logarithm_is_accurate():
    x = np.concatenate([np.linspace(2.0**-33, 0.1, 100_001), 2.0 ** -np.arange(1.0, 34.0)])
    np.testing.assert_allclose(noise.log(x), np.log(x), rtol=1e-9)


@pytest.mark.parametrize("seed", [0, 7, 2**31, MAX_SEED])
def test_numbers_are_standard_normal(seed):
    eps = standard_normal(seed, 0, 500, 400).astype(np.float64)
    assert stats.kstest(eps.ravel(), "norm").pvalue > 1e-7
    count = eps.size
    assert abs(eps.mean()) * math.sqrt(count) < 5.5  # 5.5 standard errors: a probability of 4e-8
    assert abs(eps.var() - 1.0) * math.sqrt(count / 2.0) < 5.5
    assert abs((eps**4).mean() - 3.0) * math.sqrt(count / 96.0) < 5.5  # var z^4 = 105 - 9


@pytest.mark.parametrize("seed", [0, MAX_SEED])
def test_neighbours_in_draw_position_and_seed_are_independent(seed):
    eps = standard_normal(seed, 0, 500, 400).astype(np.float64)
    other = standard_normal(seed ^ 1, 0, 500, 400).astype(np.float64)
    for a, b in ((eps[1:], eps[:-1]), (eps[:, 1:], eps[:, :-1]), (eps, other)):
        assert abs(np.mean(a * b)) * math.sqrt(a.size) < 5.5


def extreme_words():
    """Words at both ends, and on both sides of where the transform changes its formula."""
    near_ends = np.arange(3000)
    edges = [round((0.5 + sign * 0.425) * 2**32) + step for sign in (-1, 1) for step in range(-50, 50)]
    return np.array([*near_ends, *(2**32 - 1 - near_ends), *edges], dtype=np.uint32)


def plain_words(seed, draw, count):
    """The first 32-bit words of a draw, as the module's text says."""
    words = []
    block = 0
    while len(words) < count:
        block += 1
        for word in philox4x64([block, draw, 0, 0], [seed, 0]):
            words += [word & 0xFFFFFFFF, word >> 32]
    return words[:count]


def philox4x64(counter, key):
    """Philox4x64-10 of Salmon et al. (2011), section 3.3, in Python's integers."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        high_0, low_0 = divmod(0xD2E7470EE14C6C93 * a, 2**64)
        high_1, low_1 = divmod(0xCA5A826395121157 * c, 2**64)
        a, b, c, d = high_1 ^ b ^ k0, low_1, high_0 ^ d ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD_64, (k1 + 0xBB67AE8584CAA73B) & WORD_64
    return [a, b, c, d]


def plain_normal(word):
    """PPND7 of AS 241 in Python's floats, with the logarithm of the module."""
    u = (word + 0.5) / 2**32
    q = u - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        numerator = ((5.9109374720e1 * r + 1.5929113202e2) * r + 5.0434271938e1) * r + 3.3871327179
        return q * (numerator / (((6.7187563600e1 * r + 7.8757757664e1) * r + 1.7895169469e1) * r + 1.0))
    r = math.sqrt(-plain_log(min(u, 1.0 - u)))
    if r <= 5.0:
        r -= 1.6
        numerator = ((1.7023821103e-1 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777
        z = numerator / ((1.2021132975e-1 * r + 7.3700164250e-1) * r + 1.0)
    else:
        r -= 5.0
        numerator = ((1.7337203997e-2 * r + 4.2868294337e-1) * r + 3.0812263860) * r + 6.6579051150
        z = numerator / ((1.2258202635e-2 * r + 2.4197894225e-1) * r + 1.0)
    return math.copysign(z, q)


def plain_log(x):
    """log x = e log 2 + 2 artanh((m - 1) / (m + 1)), the series to t^13."""
    mantissa, exponent = math.frexp(x)
    if mantissa < math.sqrt(0.5):
        mantissa, exponent = mantissa * 2.0, exponent - 1
    t = (mantissa - 1.0) / (mantissa + 1.0)
    series = 0.0
    for n in reversed(range(7)):
        series = series * (t * t) + 1.0 / (2 * n + 1)
    return exponent * 0.6931471805599453 + 2.0 * t * series
