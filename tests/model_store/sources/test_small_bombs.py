import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from model_store.sources.csv import CsvTable
from model_store.sources.files import open_rows
from model_store.sources.row_file import Bounds
from tests.support.files import npy_header, npz_bytes, parquet_bytes, zip_bytes

NUMBERS = InputSpec(shape=(4,), minimum=0, maximum=1)
TEXT = InputSpec(
    shape=(4,),
    dtype="int32",
    minimum=0,
    maximum=9,
    text={"column": "text", "max_tokens": 4, "pad_id": 0},
)
MOST_BYTES = 200 << 20


def zstd(columns):
    return parquet_bytes(columns, compression="zstd")


@pytest.fixture(autouse=True)
def _in_little_memory():
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST_BYTES
    assert pa.default_memory_pool().max_memory() - before < 2 * MOST_BYTES


@pytest.mark.parametrize("rows", [10**9, 10**15])
def test_a_header_that_announces_more_than_its_bytes_can_hold_is_refused(rows):
    body = npz_bytes(x=npy_header((rows, 4)))
    assert len(body) < 300
    with pytest.raises(InvalidInput, match="x: expected as many bytes as the npy header says"):
        open_rows(body, NUMBERS, "pool", ".npz")


def test_ids_of_millions_of_letters_are_refused():
    body = npz_bytes(x=np.zeros((3, 4)), ids=np.array(["a" * 10**6, "b", "c"]))
    with pytest.raises(InvalidInput, match="ids: expected ids of at most 1000 letters"):
        open_rows(body, NUMBERS, "pool", ".npz")


def test_a_list_that_is_longer_than_a_row_is_refused():
    body = zstd({"x": pa.array([[0.0] * 10**7], pa.list_(pa.float32()))})
    pool = open_rows(body, NUMBERS, "pool", ".parquet")
    with pytest.raises(InvalidInput, match=r"pool\.0: expected 4 numbers, got 10000000"):
        next(pool.parts())


def test_an_id_of_a_million_letters_that_repeats_is_refused():
    ids = pa.DictionaryArray.from_arrays(pa.array([0] * 50), pa.array(["a" * 10**6]))
    rows = pa.array([[0.0] * 4] * 50, pa.list_(pa.float32()))
    pool = open_rows(zstd({"id": ids, "x": rows}), NUMBERS, "pool", ".parquet")
    with pytest.raises(InvalidInput, match="id: expected ids of at most 1000 letters"):
        pool.ids()


def test_a_text_that_repeats_comes_in_pieces():
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000), pa.array(["a" * 10**6]))
    pool = open_rows(zstd({"text": texts}), TEXT, "pool", ".parquet")
    assert sum(len(part) for part in pool.parts()) == 1000


def test_a_line_of_commas_is_refused():
    with pytest.raises(
        InvalidInput, match="pool: expected lines of at most 16777216 letters and 131072"
    ):
        CsvTable(b"," * (1 << 21), "pool")


class Refused(Exception):
    """Memory that is not to be had."""


class bounded(Bounds):
    """Bounds of `most` bytes in all."""

    def __init__(self, most):
        self.left = most

    def reserve(self, size, _):
        self.left -= size
        if self.left < 0:
            raise Refused


def test_the_members_of_a_zip_are_counted_before_they_are_listed():
    content = zip_bytes({f"{i}.txt": b"" for i in range(1000)})
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for ending in (".npz", ".zip"):
        with pytest.raises(Refused):
            open_rows(content, TEXT, "pool", ending, bounded(500_000))
    assert tracemalloc.get_traced_memory()[1] - used < 300_000
    assert open_rows(content, TEXT, "pool", ".zip", bounded(1 << 20)).rows == 1000


def test_ids_are_counted_as_they_are_read():
    names = np.array([f"{i:0900}" for i in range(2000)])
    content = npz_bytes(x=np.zeros((2000, 4), np.uint8), ids=names)
    assert len(content) < 100_000
    with pytest.raises(Refused):
        open_rows(content, NUMBERS, "pool", ".npz", bounded(1 << 20)).ids()
    ids = open_rows(content, NUMBERS, "pool", ".npz", bounded(8 << 20)).ids()
    assert ids == names.tolist()


def test_a_large_file_of_a_zip_is_refused_before_it_is_inflated():
    content = zip_bytes({"a.txt": bytes(65 << 20)})
    with pytest.raises(InvalidInput, match="files of at most 67108864 bytes, got a larger one"):
        open_rows(content, TEXT, "pool", ".zip")


def test_columns_that_are_not_wanted_are_not_kept():
    cells = ",".join(f"{i}x" for i in range(1000, 2000))
    content = f"text,{cells}\n{(cells + ',1' + chr(10)) * 200}".encode()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    pool = open_rows(content, TEXT, "pool", ".csv")
    assert sum(len(part) for part in pool.parts()) == 200
    assert tracemalloc.get_traced_memory()[1] - used < 3 << 20


def test_a_row_that_goes_on_over_lines_has_a_bound_too():
    lines = b'",' + b"," * 100_000 + b'"\n'
    with pytest.raises(InvalidInput, match="pool: expected lines of at most"):
        CsvTable(b'"x' + lines * 4, "pool")
