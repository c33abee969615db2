"""Hypothesis strategies for JSON bodies, damaged requests and files."""

import functools
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

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
from tests.support.odd_files import damage_files, odd_files
from tests.support.raw import JSON, request

CANARY = "canary-3f9a"  # errors must not contain it
MAX_BYTES = 1 << 20
ROW = [8] * 64
CONFIG = (
    '<View><Image name="p" value="$i"/><Choices name="d" toName="p">'
    + "".join(f'<Choice value="{digit}"/>' for digit in range(10))
    + "</Choices></View>"
)
TASK = {"id": 1, "data": {"dubito_input": ROW}}
RESULT = {"from_name": "d", "to_name": "p", "type": "choices", "value": {"choices": ["3"]}}
OPTIONS = {"model": "digits", "version": "1", "num_samples": 5, "seed": 1}
RATES = {"fpr": 0.1, "fdr": 0.1, "coverage": 0.9, "risk": 0.1, "deadline_s": 10, "explain": True}
PREDICT = {**OPTIONS, **RATES, "inputs": [ROW], "groups": ["a"], "priors": {"3": 1.0}}
ACQUIRE = {**OPTIONS, "pool": [ROW, ROW], "ids": ["a", "b"], "groups": ["a", "b"], "k": 1}
TENSOR = {"name": "input", "shape": [1, 64], "datatype": "FP32", "data": ROW}

# Every JSON route with a valid or nearly valid body.
ROUTES: dict[str, Any] = {
    "/predict": PREDICT,
    "/acquire": {**ACQUIRE, "acquisition": "bald", "exclude": ["b"], "keep": True},
    "/predict/jobs": {**OPTIONS, "inputs": [ROW], "inputs_file": None, "format": "json"},
    "/acquire/jobs": {**ACQUIRE, "pool_file": None, "race": False},
    "/labels": {"model": "digits", "labels": [{"id": "a", "label": "3", "input": ROW}]},
    "/labels/delete": {"model": "digits", "ids": ["a"]},
    "/invocations": {"dataframe_split": {"columns": None, "data": [ROW]}, "params": {"seed": 1}},
    "/v2/repository/index": {"ready": True},
    "/v2/models/digits/infer": {"id": "a", "inputs": [TENSOR], "parameters": {"seed": 1}},
    "/v2/models/digits/versions/1/infer": {"inputs": [TENSOR], "outputs": [{"name": "label"}]},
    "/label-studio/digits/setup": {"project": "1", "schema": CONFIG},
    "/label-studio/digits/predict": {"tasks": [TASK], "label_config": CONFIG, "params": {}},
    "/label-studio/digits/webhook": {
        "action": "ANNOTATION_CREATED",
        "annotation": {"id": 1, "result": [RESULT]},
        "task": TASK,
        "project": {"id": 2, "label_config": CONFIG},
    },
}
FILE_ROUTES = {
    "/acquire": {"k": 1},
    "/acquire/preview": {},
    "/acquire/jobs": {"k": 1},
    "/predict/jobs": {},
    "/predict": {},
    "/invocations": {},
}
PLACEHOLDER = "@value@"

# JSON texts of edge values, some of them invalid.
EDGES = [
    *("NaN", "-Infinity", "1e400", "1e39", "5e-324", "-0.0", "9" * 400, "01", "1.", "0x1", "1e"),
    *(
        "0",
        "1",
        "-1",
        "1.5",
        "17",
        "true",
        "null",
        "nul",
        "9007199254740993",
        "-9223372036854775809",
    ),
    *('""', '"1"', '"latest"', '"\\ud800"', '"\\u0000"', '"\x00"', '"' + "a" * 3000 + '"', "'a'"),
    *('"../../etc/passwd"', '"http://127.0.0.1:1/"', f'"{CANARY}"', '"\\x41"', '"\\', '"\udcff"'),
    *(
        "[]",
        "{}",
        "[[]]",
        "[{}]",
        "[null]",
        '{"a":1}',
        '{"":{}}',
        f'{{"{CANARY}":1}}',
        "",
        ",",
        "]",
    ),
    *(
        "[1,]",
        '{"a":}',
        "/**/1",
        "[" * 3000,
        "[" * 200 + "]" * 200,
        '{"a":' * 300 + "1" + "}" * 300,
    ),
]


def repeat(piece: str) -> Callable[[int], str]:
    return lambda size: "[" + ",".join([piece] * (size // (len(piece) + 1))) + "]"


def nest(opening: str, closing: str) -> Callable[[int], str]:
    def write(size: int) -> str:
        depth = size // len(opening + closing)
        return opening * depth + "0" + closing * depth

    return write


def fields(value: str) -> Callable[[int], str]:
    def write(size: int) -> str:
        count = size // (len(value) + 11)
        return "{" + ",".join(f'"u{i:06}":{value}' for i in range(count)) + "}"

    return write


def text(piece: str) -> Callable[[int], str]:
    return lambda size: '"' + piece * (size // len(piece.encode())) + '"'


# Functions that create a value of about `size` bytes.
HUGE: list[Callable[[int], str]] = [
    *map(repeat, ["0", "null", "{}", "[]", '""', '"a"', "1e99", "1.5", "[0]", '{"a":0}', "[[[]]]"]),
    *(repeat(json.dumps(row)) for row in (ROW, {str(i): 1 for i in range(64)}, TENSOR, TASK)),
    *(
        repeat(json.dumps(item))
        for item in ({"id": "a", "label": "3"}, {"id": "a", "x": 0}, RESULT)
    ),
    *(nest(*pair) for pair in (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ("[0,", "]"))),
    *map(fields, ["0", "[]", '"a"', "null"]),
    *map(text, ["a", "\\u0000", "\\ud800", "\\\\", "é", "a,", "ﷺ", "1", "/"]),
    lambda size: json.dumps("<a>" * (size // 7) + "</a>" * (size // 7)),
    lambda size: json.dumps("<View>" + "<Choice value='1'/>" * (size // 19) + "</View>"),
    lambda size: json.dumps("<a " + " ".join(f"b{i}='1'" for i in range(size // 16)) + "/>"),
    lambda size: json.dumps("<a>" + "&amp;" * (size // 5) + "</a>"),
    lambda size: "1" * size,
    lambda size: "0." + "3" * size,
    lambda size: "1e" + "9" * size,
    lambda size: " " * size + "1",
    lambda size: "[" * size,
    lambda size: '"' + "\\" * size,
    lambda size: "[" + "NaN," * (size // 4) + "0]",
]


def json_bodies(seed: int, max_bytes: int = MAX_BYTES) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(seed)
    sizes = [size for size in (1000, 60_000, 300_000, MAX_BYTES - 8192) if size <= max_bytes]
    while True:
        route, base = rng.choice(list(ROUTES.items()))
        value = rng.choice(EDGES) if rng.random() < 0.5 else rng.choice(HUGE)(rng.choice(sizes))
        yield route, _place(base, value, rng)


def _place(base: Any, value: str, rng: random.Random) -> bytes:
    content = json.loads(json.dumps(base))
    parent, key = rng.choice(list(_find_places(content)))
    if isinstance(parent, dict) and rng.random() < 0.2:
        key = "unknown"
    parent[key] = PLACEHOLDER
    text = json.dumps(content)
    if rng.random() < 0.1:  # duplicate the fields
        text = text[:-1] + "," + json.dumps(base)[1:]
    if value.startswith("{") and rng.random() < 0.3:
        text = json.dumps(base)[:-1] + "," + value[1:]
    body = text.replace(f'"{PLACEHOLDER}"', value).encode("utf-8", "surrogateescape")
    assert len(body) <= MAX_BYTES
    return body if rng.random() < 0.95 else body[: len(body) // 2]


def _find_places(content: Any) -> Iterator[tuple[Any, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content[:3])
    for key, value in items:
        yield content, key
        if isinstance(value, dict | list) and value:
            yield from _find_places(value)


def routes_with_json() -> st.SearchStrategy[tuple[str, bytes]]:
    """Draw routes and JSON bodies."""
    return st.integers(0, 2**32).map(lambda seed: next(json_bodies(seed)))


@st.composite
def damaged_requests(draw: st.DrawFn) -> bytes:
    """Draw a JSON or npy request with some modified bytes."""
    if draw(st.booleans()):
        content = request("POST", "/predict", npy_bytes(np.array([ROW], np.uint8)), (), NPY)
    else:
        route = draw(st.sampled_from(list(ROUTES)))
        content = request("POST", route, json.dumps(ROUTES[route]).encode(), (), JSON)
    pieces = st.sampled_from(
        [b"9" * 30, b"[" * 9, b"(", b"'''", b"\\ud800", b"-", b"\r\n", b"\n", b":", b"\0", b" "]
    )
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)) | st.integers(0, 130))
        piece = draw(st.binary(max_size=4) | pieces)
        content = content[:start] + piece + content[start + draw(st.integers(0, 4)) :]
    return content


# Files

DTYPES = ("<f8", "|u1", "<U1000", "|S4000", "<f4")
PARQUET_OPTIONS = ({"compression": "zstd"}, {"compression": "gzip"}, {"use_dictionary": False})


@functools.cache
def _odd_files():
    return odd_files()


def _deflated_npz(count, width, dtype, letters):
    """Write a compressed npz file of zeros and ids."""
    member = npy_header((count, width), dtype) + bytes(min(count * width, 1 << 25))
    ids = np.zeros(min(count, 1 << 16), f"<U{letters}")
    return npz_bytes(x=member, ids=npy_bytes(ids))


def _parquet(kind, count, size, options):
    """Write a Parquet file of one repeated value, in rows or in one row."""
    options = {"compression": "zstd", **options}
    max_rows = min(count, max(1, MAX_BYTES * 64 // size))
    if size >= MAX_BYTES or "use_dictionary" in options:  # the writer then stores every copy
        count = max_rows
    values = {
        "text": lambda: pa.array(["a" * size] * max_rows),
        "id": lambda: pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), ["a" * size]),
        "x": lambda: pa.array([[0.0] * size], pa.list_(pa.float32())),
        "age": lambda: pa.array(np.zeros(size * 4, np.float32)),
    }
    column = values[kind]()
    columns = {"text": ["a"] * len(column), "x": [[0.0] * 3] * len(column), kind: column}
    if len(column) > 1 << 16:
        columns = {kind: column}
    return parquet_bytes(columns, **options)


def _zip(count, size, method):
    count = min(count, 8000)
    return zip_bytes({f"{i}.txt": bytes(size if i == 0 else 0) for i in range(count)}, method)


def _csv(head, item, count):
    return head + item * min(count, (MAX_BYTES - len(head)) // len(item))


def _damage_file(seed):
    ((_, media_type, content),) = damage_files(_odd_files(), 1, seed)
    return media_type, content


def files() -> st.SearchStrategy[tuple[str, bytes]]:
    """Draw pairs of a media type and a file of up to a megabyte."""
    sizes = st.integers(0, 27).map(lambda power: 1 << power)
    counts, letters = st.integers(1, 10**5), st.integers(1, 1000)
    lengths = st.integers(-(10**3), 10**3) | st.integers(0, 2**66)
    methods = st.sampled_from((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED))
    dtypes, options = st.sampled_from(DTYPES), st.sampled_from(PARQUET_OPTIONS)
    columns = st.sampled_from(["text", "id", "x", "age"])
    heads = st.sampled_from(
        [b"", b"text\n", b"age,city\n", b'"', b"\xff\xfe", b"age,city,a\n1,Rome,"]
    )
    items = st.sampled_from(
        [b",", b"\n", b'"', b'",\n"', b"1,Rome\n", b"a", b"9", b"\0", b"1,a,b\n"]
    )
    headers = st.builds(lambda n, m, kind: npy_header((n, m), kind), lengths, lengths, dtypes)
    contents = st.one_of(
        headers.map(lambda content: (NPY, content)),
        headers.map(lambda content: (NPZ, npz_bytes(x=content))),
        st.builds(_deflated_npz, counts, st.just(3), dtypes, letters).map(lambda file: (NPZ, file)),
        st.builds(_parquet, columns, counts, sizes, options).map(lambda file: (PARQUET, file)),
        st.builds(_zip, counts, sizes, methods).map(lambda file: (ZIP, file)),
        st.builds(_csv, heads, items, st.integers(0, MAX_BYTES)).map(lambda file: (CSV, file)),
        st.integers(0, 2**32).map(_damage_file),
    )
    return contents.filter(lambda pair: len(pair[1]) <= MAX_BYTES)
