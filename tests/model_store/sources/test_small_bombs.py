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
MAX_BYTES = 200 << 20


def zstd(columns):
    return parquet_bytes(columns, compression="zstd")


@pytest.fixture(autouse=True)
def _limit_memory():
    tracemalloc.start()
    arrow_bytes = pa.total_allocated_bytes()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MAX_BYTES
    assert pa.default_memory_pool().max_memory() - arrow_bytes < 2 * MAX_BYTES


@pytest.mark.parametrize("rows", [10**9, 10**15])
def test_npy_header_larger_than_its_data_is_refused(rows):
    body = npz_bytes(x=npy_header((rows, 4)))
    assert len(body) < 300
    with pytest.raises(InvalidInput, match="x: expected as many bytes as the npy header says"):
        open_rows(body, NUMBERS, "pool", ".npz")


def test_very_long_ids_are_refused():
    body = npz_bytes(x=np.zeros((3, 4)), ids=np.array(["a" * 10**6, "b", "c"]))
    with pytest.raises(InvalidInput, match="ids: expected ids of at most 1000 letters"):
        open_rows(body, NUMBERS, "pool", ".npz")


def test_list_longer_than_a_row_is_refused():
    body = zstd({"x": pa.array([[0.0] * 10**7], pa.list_(pa.float32()))})
    pool = open_rows(body, NUMBERS, "pool", ".parquet")
    with pytest.raises(InvalidInput, match=r"pool\.0: expected 4 numbers, got 10000000"):
        next(pool.parts())


def test_very_long_dictionary_encoded_id_is_refused():
    ids = pa.DictionaryArray.from_arrays(pa.array([0] * 50), pa.array(["a" * 10**6]))
    rows = pa.array([[0.0] * 4] * 50, pa.list_(pa.float32()))
    pool = open_rows(zstd({"id": ids, "x": rows}), NUMBERS, "pool", ".parquet")
    with pytest.raises(InvalidInput, match="id: expected ids of at most 1000 letters"):
        pool.ids()


def test_repeated_long_text_is_read_in_parts():
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000), pa.array(["a" * 10**6]))
    pool = open_rows(zstd({"text": texts}), TEXT, "pool", ".parquet")
    assert sum(len(part) for part in pool.parts()) == 1000


def test_line_with_too_many_commas_is_refused():
    with pytest.raises(
        InvalidInput, match="pool: expected lines of at most 16777216 letters and 131072"
    ):
        CsvTable(b"," * (1 << 21), "pool")


class OutOfMemory(Exception):
    """The memory limit is exceeded."""


class TotalBounds(Bounds):
    """Bounds of `max_bytes` in total."""

    def __init__(self, max_bytes):
        self.remaining_bytes = max_bytes

    def reserve(self, size, _):
        self.remaining_bytes -= size
        if self.remaining_bytes < 0:
            raise OutOfMemory


def test_zip_members_are_counted_before_they_are_listed():
    content = zip_bytes({f"{i}.txt": b"" for i in range(1000)})
    base_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for suffix in (".npz", ".zip"):
        with pytest.raises(OutOfMemory):
            open_rows(content, TEXT, "pool", suffix, TotalBounds(500_000))
    assert tracemalloc.get_traced_memory()[1] - base_bytes < 300_000
    assert open_rows(content, TEXT, "pool", ".zip", TotalBounds(1 << 20)).rows == 1000


def test_memory_for_ids_is_reserved_while_reading():
    names = np.array([f"{i:0900}" for i in range(2000)])
    content = npz_bytes(x=np.zeros((2000, 4), np.uint8), ids=names)
    assert len(content) < 100_000
    with pytest.raises(OutOfMemory):
        open_rows(content, NUMBERS, "pool", ".npz", TotalBounds(1 << 20)).ids()
    ids = open_rows(content, NUMBERS, "pool", ".npz", TotalBounds(8 << 20)).ids()
    assert ids == names.tolist()


def test_large_zip_member_is_refused_before_it_is_inflated():
    content = zip_bytes({"a.txt": bytes(65 << 20)})
    with pytest.raises(InvalidInput, match="files of at most 67108864 bytes, got a larger one"):
        open_rows(content, TEXT, "pool", ".zip")


def test_unused_columns_are_not_kept_in_memory():
    cells = ",".join(f"{i}x" for i in range(1000, 2000))
    content = f"text,{cells}\n{(cells + ',1' + chr(10)) * 200}".encode()
    base_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    pool = open_rows(content, TEXT, "pool", ".csv")
    assert sum(len(part) for part in pool.parts()) == 200
    assert tracemalloc.get_traced_memory()[1] - base_bytes < 3 << 20


def test_row_over_several_lines_has_a_size_limit():
    lines = b'",' + b"," * 100_000 + b'"\n'
    with pytest.raises(InvalidInput, match="pool: expected lines of at most"):
        CsvTable(b'"x' + lines * 4, "pool")
