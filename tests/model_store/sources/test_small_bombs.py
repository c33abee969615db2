"""Files of few bytes that announce or repeat very much: they are refused, or read in bounded
pieces, before memory is taken for them."""

import io
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from model_store.sources.csv import CsvTable
from model_store.sources.files import open_rows

NUMBERS = InputSpec(shape=(4,), minimum=0, maximum=1)
MOST_BYTES = 200 << 20


def npz(**members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return packed.getvalue()


def header(shape, dtype):
    """The header of an npy file, without its numbers."""
    file = io.BytesIO()
    form = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, {**form, "shape": shape})
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def parquet(table):
    file = io.BytesIO()
    pq.write_table(pa.table(table), file, compression="zstd")
    return file.getvalue()


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
    body = npz(x=header((rows, 4), "f4"))
    assert len(body) < 300
    with pytest.raises(InvalidInput, match="x: expected as many bytes as the npy header says"):
        open_rows(body, NUMBERS, "pool", ".npz")


def test_ids_of_millions_of_letters_are_refused():
    body = npz(x=npy(np.zeros((3, 4), np.float32)), ids=npy(np.array(["a" * 10**6, "b", "c"])))
    with pytest.raises(InvalidInput, match="ids: expected ids of at most 1000 letters"):
        open_rows(body, NUMBERS, "pool", ".npz")


def test_a_list_that_is_longer_than_a_row_is_refused_before_it_is_read():
    body = parquet({"x": pa.array([[0.0] * 10**7], pa.list_(pa.float32()))})
    with pytest.raises(InvalidInput, match="pool: expected lists of 4 numbers, got 10000000 in 1"):
        open_rows(body, NUMBERS, "pool", ".parquet")


def test_an_id_of_a_million_letters_that_repeats_is_refused():
    ids = pa.DictionaryArray.from_arrays(pa.array([0] * 5000), pa.array(["a" * 10**6]))
    rows = pa.array([[0.0] * 4] * 5000, pa.list_(pa.float32()))
    pool = open_rows(parquet({"id": ids, "x": rows}), NUMBERS, "pool", ".parquet")
    with pytest.raises(InvalidInput, match="id: expected ids of at most 1000 letters"):
        pool.ids()


def test_a_text_that_repeats_comes_in_pieces():
    spec = InputSpec(
        shape=(4,),
        dtype="int32",
        minimum=0,
        maximum=9,
        text={"column": "text", "max_tokens": 4, "pad_id": 0},
    )
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000), pa.array(["a" * 10**6]))
    pool = open_rows(parquet({"text": texts}), spec, "pool", ".parquet")
    assert sum(len(part) for part in pool.parts()) == 1000


def test_a_line_of_commas_is_refused():
    with pytest.raises(InvalidInput, match="pool: expected lines of at most 16777216 letters and 131072"):
        CsvTable(b"," * (1 << 21), "pool")
