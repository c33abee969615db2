import math
from hashlib import sha256
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from model_store.inference import noise
from model_store.inference.noise import (
    DRAW_INDEX,
    MAX_SEED,
    NOISE_ALGORITHM,
    normal,
    standard_normal,
)

# The first four numbers of draws 0 to 2, as float32 bits. They keep answers replayable: if they
# change, NOISE_ALGORITHM must change too.
GOLDEN = {
    0: [
        [0x3FE85A7D, 0x4011668E, 0xBF9BAD28, 0x3F338A3D],
        [0xBFECD9F8, 0xC034AA52, 0xBE7292F8, 0x3F170846],
        [0xBDAA8620, 0x3F299A29, 0x3E81AB44, 0x3F5C03E3],
    ],
    7: [
        [0x3F7AB09A, 0xBEA7198C, 0xBD8E80D0, 0x3F09ABD0],
        [0x3C3F3100, 0x3FB16F10, 0x3F8159CE, 0xBF5A8CBF],
        [0x3EBCED94, 0x400C6F10, 0xBE7F3860, 0xBF1004AA],
    ],
    2**53 - 1: [
        [0x3EB0FC5C, 0x3E765608, 0x3EFCCFB0, 0x3E081068],
        [0x3E4EABF8, 0xBF96193A, 0x3EA31CE4, 0x3F788B1A],
        [0x3F1397CC, 0x3F5FB755, 0x3E674700, 0x3FDBC8B1],
    ],
}
GOLDEN_SHIFTS = [1, 3, 1]  # for 5 noise numbers per row
GOLDEN_SIGNS = [[-1, 1, 1, -1, -1], [1, -1, 1, -1, -1], [-1, 1, 1, -1, -1]]
WORD_64 = 2**64 - 1


@pytest.mark.parametrize("seed", GOLDEN)
def test_golden_values_do_not_change(seed):
    assert NOISE_ALGORITHM == "philox4x64-10/linear-quantile"
    assert standard_normal(seed, 0, 3, 4).view(np.uint32).tolist() == GOLDEN[seed]


@settings(max_examples=25)
@given(
    seed=st.integers(0, MAX_SEED), first_draw=st.integers(0, 2**70), dimension=st.integers(1, 40)
)
def test_noise_matches_plain_python_bit_for_bit(seed, first_draw, dimension):
    eps = standard_normal(seed, first_draw, 3, dimension)
    for k in range(3):
        words = plain_words(seed, first_draw + k, dimension)
        expected = np.array([plain_normal(word) for word in words]).astype(np.float32)
        assert eps[k].tobytes() == expected.tobytes()


def test_tails_and_middle_match_plain_python_bit_for_bit():
    words = extreme_words()
    expected = np.array([plain_normal(int(word)) for word in words])
    assert normal(words).tobytes() == expected.tobytes()


def test_quantile_table_is_the_same_on_every_machine():
    table = np.stack([noise.INTERCEPT, noise.SLOPE]).astype("<f4").tobytes()
    assert (
        sha256(table).hexdigest()
        == "0a2197705ec9290d9170cbf10799faf56face6415bac829bb72421f674aae96d"
    )


def test_plain_philox_matches_published_test_vectors():
    # From kat_vectors of the Random123 distribution, philox4x64 with 10 rounds.
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert philox4x64([0] * 4, [0] * 2) == zeros
    assert philox4x64([WORD_64] * 4, [WORD_64] * 2) == ones


@settings(max_examples=30)
@given(first=st.integers(0, 99), count=st.integers(0, 30), dimension=st.integers(1, 30))
def test_chunk_of_draws_equals_slice_of_all_draws(first, count, dimension):
    full = standard_normal(11, 0, 130, dimension)
    chunk = standard_normal(11, first, count, dimension)
    assert chunk.tobytes() == full[first : first + count].tobytes()


@pytest.mark.parametrize(
    "dimension", [noise.CHUNK // 50, noise.CHUNK - 1, noise.CHUNK, noise.CHUNK + 1]
)
def test_noise_does_not_depend_on_chunk_size(dimension):
    full = standard_normal(5, 3, 60, dimension)
    single_draws = [standard_normal(5, 3 + k, 1, dimension)[0] for k in (0, 1, 49, 50, 51, 59)]
    assert np.stack(single_draws).tobytes() == full[[0, 1, 49, 50, 51, 59]].tobytes()


def test_draw_larger_than_internal_chunk_has_the_same_bits(monkeypatch):
    full = standard_normal(5, 3, 4, 99)
    monkeypatch.setattr(noise, "CHUNK", 16)
    assert standard_normal(5, 3, 4, 99).tobytes() == full.tobytes()


def test_draw_index_noise_is_the_draw_number_for_any_seed():
    for seed in (0, 7, MAX_SEED):
        assert noise.noise(DRAW_INDEX, seed, 3, 4, 1).tolist() == [[3.0], [4.0], [5.0], [6.0]]
    assert (
        noise.noise(NOISE_ALGORITHM, 7, 3, 4, 5).tobytes() == standard_normal(7, 3, 4, 5).tobytes()
    )
    with pytest.raises(ValueError, match=r"expected one of .*, got 'another'"):
        noise.noise("another", 0, 0, 1, 1)


def test_row_digest_shifts_noise_and_flips_signs():
    x = np.array([[1.0, 0.0], [2.0, -1.0], [1.0, -0.0]], dtype=np.float32)
    eps = standard_normal(7, 0, 4, 5)[:, None]
    signs = noise.RowSigns.from_rows(x, 5)
    assert signs.shifts.tolist() == GOLDEN_SHIFTS
    assert signs.signs.tolist() == GOLDEN_SIGNS
    theta_by_row = signs.apply(eps, slice(0, 3))
    for n, (shift, row) in enumerate(zip(GOLDEN_SHIFTS, GOLDEN_SIGNS, strict=True)):
        np.testing.assert_array_equal(theta_by_row[:, n], np.roll(eps[:, 0], -shift, axis=1) * row)
    paired = signs.apply(np.repeat(eps, 2, axis=1), slice(1, 3))
    np.testing.assert_array_equal(paired, theta_by_row[:, 1:])


def test_numbers_match_exact_quantiles_to_a_millionth():
    middle = np.linspace(0, 2**32 - 1, 200_001).astype(np.uint32)
    words = np.concatenate([middle, extreme_words()])
    upper = -stats.norm.ppf(((words & 0x7FFFFFFF).astype(np.float64) + 0.5) / 2**32)
    np.testing.assert_allclose(
        normal(words), np.where(words >> 31, -upper, upper), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("seed", [0, 7, 2**31, MAX_SEED])
def test_numbers_are_standard_normal(seed):
    eps = standard_normal(seed, 0, 500, 400).astype(np.float64)
    assert stats.kstest(eps.ravel(), "norm").pvalue > 1e-7
    count = eps.size
    assert abs(eps.mean()) * math.sqrt(count) < 5.5  # 5.5 standard errors, probability 4e-8
    assert abs(eps.var() - 1.0) * math.sqrt(count / 2.0) < 5.5
    assert abs((eps**4).mean() - 3.0) * math.sqrt(count / 96.0) < 5.5  # var z^4 = 105 - 9


@pytest.mark.parametrize("seed", [0, MAX_SEED])
def test_neighbours_in_draw_position_and_seed_are_independent(seed):
    eps = standard_normal(seed, 0, 500, 400).astype(np.float64)
    neighbour = standard_normal(seed ^ 1, 0, 500, 400).astype(np.float64)
    for a, b in ((eps[1:], eps[:-1]), (eps[:, 1:], eps[:, :-1]), (eps, neighbour)):
        assert abs(np.mean(a * b)) * math.sqrt(a.size) < 5.5


def extreme_words():
    near_ends = np.arange(3000)
    edges = [2**power + step for power in range(4, 31) for step in range(-3, 4)]
    half = np.array([*near_ends, *(2**31 - 1 - near_ends), *edges])
    return np.concatenate([half, half + 2**31]).astype(np.uint32)


def plain_words(seed, draw, count):
    words = []
    blocks = -(-count // 8)
    for block in range(draw * blocks + 1, (draw + 1) * blocks + 1):
        for word in philox4x64([block % 2**64, block >> 64, 0, 0], [seed, 0]):
            words += [word & 0xFFFFFFFF, word >> 32]
    return words[:count]


def philox4x64(counter, key):
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        high_0, low_0 = divmod(0xD2E7470EE14C6C93 * a, 2**64)
        high_1, low_1 = divmod(0xCA5A826395121157 * c, 2**64)
        a, b, c, d = high_1 ^ b ^ k0, low_1, high_0 ^ d ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD_64, (k1 + 0xBB67AE8584CAA73B) & WORD_64
    return [a, b, c, d]


def plain_normal(word):
    f = np.float32(word & 0x7FFFFFFF) + np.float32(0.5)
    mantissa, exponent = math.frexp(float(f))
    low = math.floor(mantissa * 512) / 512 * 2.0**exponent  # 256 nodes from 1/2 to 1
    high = low + 2.0**exponent / 512
    if low == 2.0**31:
        size = np.float32(0.0)
    else:
        slope = (plain_quantile(high) - plain_quantile(low)) / (high - low)
        size = np.float32(slope) * f + np.float32(plain_quantile(low) - slope * low)
    return -size if word >> 31 else size


def plain_quantile(f):
    """Compute the upper quantile of f / 2^32, rounded to float32."""
    return float(np.float32(-NormalDist().inv_cdf(f / 2**32)))
