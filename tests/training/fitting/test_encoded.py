"""Rows that are encoded once: what is kept is what the encoder says, whatever became of the
file."""

import gc
import os

import numpy as np
import pytest

from training.fitting.encoding import CachedEncoder

WIDTH, RECORD = 3, 16 + 4 + 4 * 3


class Counting:
    """An encoder that notes how many rows it is asked for."""

    def __init__(self):
        self.asked = 0

    def __call__(self, x):
        self.asked += len(x)
        return np.stack([x.sum(1), x.max(1), x[:, 0]], axis=1).astype(np.float32)


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(150, 5)).astype(np.float32)


def test_rows_are_encoded_once_also_by_later_fits(tmp_path, x):
    counting = Counting()
    cached = CachedEncoder(counting, WIDTH, tmp_path / "a.rows")
    np.testing.assert_array_equal(cached.rows(x, quiet=True), Counting()(x))
    np.testing.assert_array_equal(cached(x[::-1]), Counting()(x[::-1]))
    later = CachedEncoder(counting, WIDTH, tmp_path / "a.rows")
    np.testing.assert_array_equal(later(x[7:20]), Counting()(x[7:20]))
    assert counting.asked == 150


def test_rows_that_lie_together_are_a_view_of_the_file(tmp_path, x):
    cached = CachedEncoder(Counting(), WIDTH, tmp_path / "a.rows")
    cached(x)
    assert isinstance(cached.rows(x[10:60], quiet=True).base, np.memmap)


def test_bytes_and_numbers_of_one_row_are_one(tmp_path):
    counting = Counting()
    cached = CachedEncoder(counting, WIDTH, tmp_path / "a.rows")
    x = np.arange(10, dtype=np.uint8).reshape(2, 5)
    np.testing.assert_array_equal(cached.rows(x, quiet=True), cached(x.astype(np.float32)))
    assert counting.asked == 2


@pytest.mark.parametrize("left", [0, 1, 31, RECORD, 5 * RECORD + 7])
def test_a_file_that_a_kill_cut_short_is_taken_up(tmp_path, x, left):
    path = tmp_path / "a.rows"
    CachedEncoder(Counting(), WIDTH, path)(x)
    path.write_bytes(path.read_bytes()[:left])
    counting = Counting()
    np.testing.assert_array_equal(CachedEncoder(counting, WIDTH, path)(x), Counting()(x))
    assert counting.asked == 150 - left // RECORD
    assert path.stat().st_size == 150 * RECORD


def test_a_damaged_record_is_encoded_again(tmp_path, x):
    path = tmp_path / "a.rows"
    CachedEncoder(Counting(), WIDTH, path)(x)
    content = bytearray(path.read_bytes())
    content[3 * RECORD + 20] ^= 1
    path.write_bytes(bytes(content))
    counting = Counting()
    np.testing.assert_array_equal(CachedEncoder(counting, WIDTH, path)(x), Counting()(x))
    assert counting.asked == 1


def test_two_fits_at_a_time_write_one_file(tmp_path, x):
    first, second = (CachedEncoder(Counting(), WIDTH, tmp_path / "a.rows") for _ in range(2))
    first(x[:100])
    np.testing.assert_array_equal(second(x), Counting()(x))
    np.testing.assert_array_equal(first(x), Counting()(x))


def test_what_the_file_has_no_room_for_is_in_memory(tmp_path, x):
    cached = CachedEncoder(Counting(), WIDTH, tmp_path / "a.rows", most_bytes=70 * RECORD)
    np.testing.assert_array_equal(cached.rows(x, quiet=True), Counting()(x))
    assert (tmp_path / "a.rows").stat().st_size <= 70 * RECORD


def test_files_used_longest_ago_make_room(tmp_path, x):
    paths = [tmp_path / f"{name}.rows" for name in "abc"]
    for i, path in enumerate(paths):
        CachedEncoder(Counting(), WIDTH, path)(x)
        os.utime(path, (i, i))
    gc.collect()
    CachedEncoder(Counting(), WIDTH, paths[1], most_bytes=2 * 150 * RECORD)
    assert [path.exists() for path in paths] == [False, True, True]


def test_a_file_that_another_fit_holds_is_never_removed(tmp_path, x):
    held = CachedEncoder(Counting(), WIDTH, tmp_path / "a.rows")
    held(x[:100])
    os.utime(tmp_path / "a.rows", (0, 0))
    other = CachedEncoder(Counting(), WIDTH, tmp_path / "b.rows", most_bytes=RECORD)
    other(x)
    np.testing.assert_array_equal(held(x), Counting()(x))
    assert (tmp_path / "a.rows").stat().st_size == 150 * RECORD
