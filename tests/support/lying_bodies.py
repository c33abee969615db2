"""Bodies of at most a megabyte, of every format, that announce or become far more; for Hypothesis."""

import functools
import zipfile

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from tests.support.files import (
    CSV,
    NPY,
    NPZ,
    PARQUET,
    ZIP,
    npy_bytes,
    npy_header,
    npz_bytes,
    parquet_bytes,
    zip_bytes,
)
from tests.support.odd_files import damaged, odd_files

JSON = "application/json"
MOST = 1 << 20
DTYPES = ("<f8", "|u1", "<U1000", "|S4000", "<f4")
WRITTEN = ({"compression": "zstd"}, {"compression": "gzip"}, {"use_dictionary": False})
sizes = st.integers(0, 27).map(lambda power: 1 << power)
rows = st.one_of(st.integers(-(10**3), 10**3), st.integers(0, 2**66))


@functools.cache
def _odd():
    return odd_files()


def _deflated(count, width, dtype, letters):
    """An npz file of zeros, as many as its header says, and of ids."""
    member = npy_header((count, width), dtype) + bytes(min(count * width, 1 << 25))
    ids = np.zeros(min(count, 1 << 16), f"<U{letters}")
    return npz_bytes(x=member, ids=npy_bytes(ids))


def _parquet(kind, count, size, how):
    """A file of one value that repeats, in rows or in one."""
    options = {"compression": "zstd", **how}
    few = min(count, max(1, MOST * 64 // size))
    if size >= MOST or "use_dictionary" in how:  # the writer then repeats the value itself
        count = few
    values = {
        "text": lambda: pa.array(["a" * size] * few),
        "id": lambda: pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), ["a" * size]),
        "x": lambda: pa.array([[0.0] * size], pa.list_(pa.float32())),
        "age": lambda: pa.array(np.zeros(size * 4, np.float32)),
    }
    column = values[kind]()
    columns = {"text": ["a"] * len(column), "x": [[0.0] * 3] * len(column), kind: column}
    if len(column) > 1 << 16:
        columns = {kind: column}
    return parquet_bytes(columns, **options)


def _zip(count, size, how):
    count = min(count, 8000)
    return zip_bytes({f"{i}.txt": bytes(size if i == 0 else 0) for i in range(count)}, how)


def _json(field, item, count):
    rows = b",".join([item] * min(count, MOST // (len(item) + 1) - 64))
    return b'{"k":1,"%s":[%s]}' % (field, rows)


def _csv(head, item, count):
    return head + item * min(count, (MOST - len(head)) // len(item))


def _damaged(seed):
    ((_, media_type, content),) = damaged(_odd(), 1, seed)
    return media_type, content


def bodies():
    """Pairs of a media type and a body."""
    how = st.sampled_from((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED))
    dtypes, written = st.sampled_from(DTYPES), st.sampled_from(WRITTEN)
    counts, letters = st.integers(1, 10**5), st.integers(1, 1000)
    items = st.sampled_from(
        [b"[]", b"{}", b"0", b'"a"', b"null", b"[[0]]", b"[0,0,0]", b"NaN", b"1e999"]
    )
    heads = st.sampled_from(
        [b"", b"text\n", b"age,city\n", b'"', b"\xff\xfe", b"age,city,a\n1,Rome,"]
    )
    lines = st.sampled_from(
        [b",", b"\n", b'"', b'",\n"', b"1,Rome\n", b"a", b"9", b"\0", b"1,a,b\n"]
    )
    fields = st.sampled_from([b"pool", b"inputs", b"ids", b"rows", b"unknown"])
    columns = st.sampled_from(["text", "id", "x", "age"])
    lying = st.builds(lambda n, m, kind: npy_header((n, m), kind), rows, rows, dtypes)
    found = st.one_of(
        lying.map(lambda content: (NPY, content)),
        lying.map(lambda content: (NPZ, npz_bytes(x=content))),
        st.builds(_deflated, counts, st.just(3), dtypes, letters).map(lambda file: (NPZ, file)),
        st.builds(_parquet, columns, counts, sizes, written).map(lambda file: (PARQUET, file)),
        st.builds(_zip, counts, sizes, how).map(lambda file: (ZIP, file)),
        st.builds(_csv, heads, lines, st.integers(0, MOST)).map(lambda file: (CSV, file)),
        st.builds(_json, fields, items, st.integers(0, MOST)).map(lambda file: (JSON, file)),
        st.integers(0, 2**32).map(_damaged),
    )
    return found.filter(lambda body: len(body[1]) <= MOST)
