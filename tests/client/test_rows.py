import io
import json
from datetime import date, datetime
from pathlib import Path

import numpy as np
import pandas
import polars
import pyarrow
import pytest
import torch
from PIL import Image

from dubito.errors import InvalidInput
from dubito.rows import PART_BYTES, Rows, encode_row, encode_rows, make_request, split_rows, texts

NUMBERS = [[1.5, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    "rows",
    [
        np.array(NUMBERS),
        NUMBERS,
        tuple(map(tuple, NUMBERS)),
        [np.array(row) for row in NUMBERS],
        iter(NUMBERS),
        torch.tensor(NUMBERS),
        [torch.tensor(row) for row in NUMBERS],
        np.ma.masked_array(NUMBERS, mask=False),
    ],
    ids=["array", "lists", "tuples", "arrays", "iterator", "tensor", "tensors", "masked"],
)
def test_numeric_rows_are_encoded_as_an_array(rows):
    actual = encode_rows(rows, "inputs")
    assert actual.kind == "numbers"
    assert actual.content.tolist() == NUMBERS


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint64", "float16", "float32", ">f8", "longdouble"]
)
def test_array_dtypes_are_converted_for_the_service(dtype):
    array = np.array([[0, 1]], dtype=dtype)
    content = encode_rows(array, "inputs").content
    assert content.dtype.kind in "iuf"
    assert content.dtype.itemsize <= 8
    assert content.tolist() == [[0, 1]]


FRAME = {
    "age": [31.0, None],
    "city": ["Rome", None],
    "since": [datetime(2024, 5, 1, 13, 30), None],
    "count": [3, 4],
    "fresh": [True, False],
}
EXPECTED = [
    {"age": 31.0, "city": "Rome", "since": "2024-05-01T13:30:00", "count": 3, "fresh": True},
    {"age": None, "city": None, "since": None, "count": 4, "fresh": False},
]


@pytest.mark.parametrize(
    "rows",
    [
        pandas.DataFrame(FRAME),
        pandas.DataFrame(FRAME).convert_dtypes(),
        pandas.DataFrame(FRAME).astype({"city": "category"}),
        polars.DataFrame(FRAME),
        polars.DataFrame(FRAME).with_columns(polars.col("age").cast(polars.Decimal(5, 1))),
        pyarrow.table(FRAME),
        [dict(zip(FRAME, values, strict=True)) for values in zip(*FRAME.values(), strict=True)],
    ],
    ids=["pandas", "nullable", "category", "polars", "decimals", "pyarrow", "objects"],
)
def test_data_frames_are_encoded_as_objects(rows):
    actual = encode_rows(rows, "inputs")
    assert actual.kind == "json"
    assert [json.loads(row) for row in actual.content] == EXPECTED


def test_numpy_cells_are_encoded_as_json():
    cells = [np.float32(0.5), np.int8(3), np.bool_(True), np.str_("x"), np.datetime64("NaT")]
    cells += [np.datetime64("2024-05-01T13:30"), date(2024, 5, 1), np.float64("nan"), pandas.NaT]
    (actual,) = encode_rows([dict(zip("abcdefghi", cells, strict=True))], "inputs").content
    expected = [0.5, 3, True, "x", None, "2024-05-01T13:30:00", "2024-05-01", None, None]
    assert json.loads(actual) == dict(zip("abcdefghi", expected, strict=True))


@pytest.mark.parametrize(
    "rows",
    [
        ["a", "b"],
        np.array(["a", "b"]),
        np.array(["a", "b"], dtype=object),
        pandas.Series(["a", "b"]),
    ],
    ids=["list", "array", "objects", "series"],
)
def test_strings_are_encoded_as_json(rows):
    assert encode_rows(rows, "inputs") and list(encode_rows(rows, "inputs").content) == [
        b'"a"',
        b'"b"',
    ]
    assert list(encode_rows(polars.Series(["a", "b"]), "inputs").content) == [b'"a"', b'"b"']


def test_rows_of_unequal_lengths_are_encoded_unchanged():
    assert list(encode_rows([[1, 2], [3]], "inputs").content) == [b"[1,2]", b"[3]"]


def test_images_and_paths_are_encoded_as_files(tmp_path):
    image = Image.new("RGB", (3, 2), (1, 2, 3))
    (tmp_path / "x.bin").write_bytes(b"abc")
    actual = encode_rows([image, b"def", tmp_path / "x.bin"], "inputs")
    assert actual.kind == "files"
    assert actual.content[1:] == [b"def", b"abc"]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(actual.content[0]))), np.asarray(image))
    assert encode_row(b"abc", "inputs.x") == "YWJj"
    with pytest.raises(InvalidInput, match=r"inputs\.0: expected an image"):
        encode_rows([image.convert("CMYK")], "inputs")
    with pytest.raises(InvalidInput, match=r"inputs\.1: expected an image or a file, .*, got int"):
        encode_rows([image, 3], "inputs")


@pytest.mark.parametrize(
    "rows",
    [
        "text",
        b"file",
        Path("file"),
        {"age": 3},
        3,
        None,
        [],
        np.ones(3),
        np.float64(1),
        [1, 2],
        np.ones((0, 3)),
    ],
    ids=str,
)
def test_invalid_rows_are_refused_by_field(rows):
    with pytest.raises(InvalidInput, match=r"^pool: expected "):
        encode_rows(rows, "pool")


@pytest.mark.parametrize(
    ("rows", "received"),
    [
        (np.ma.masked_array(NUMBERS, mask=[[0, 0], [1, 0]]), "masked values"),
        (np.zeros((1, 2), dtype="datetime64[ns]"), "an array of datetime64"),
        (pandas.DataFrame([[1, 2]], columns=["age", "age"]), "more than one 'age'"),
        (pyarrow.table([[1], [2]], names=["age", "age"]), "more than one 'age'"),
        (torch.ones((1, 2), requires_grad=True), "Tensor: .*detach"),
        (torch.ones((1, 2), dtype=torch.bfloat16), "Tensor: .*BFloat16"),
    ],
    ids=["masked", "dates", "pandas", "pyarrow", "gradient", "bfloat16"],
)
def test_rows_without_an_exact_encoding_are_refused(rows, received):
    with pytest.raises(InvalidInput, match=rf"^inputs: expected .*, got {received}"):
        encode_rows(rows, "inputs")


@pytest.mark.parametrize(
    ("value", "received"), [(float("inf"), "inf"), (object(), "object"), (3j, "complex")]
)
def test_error_for_cell_without_json_encoding_names_it(value, received):
    with pytest.raises(InvalidInput, match=rf"^inputs\.1\.age: expected .*, got {received}$"):
        encode_rows([{"age": 1}, {"age": value}], "inputs")


def test_parts_are_limited_by_rows_and_bytes():
    rows = encode_rows(np.zeros((7, 3)), "inputs")
    assert list(split_rows(rows, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    files = Rows(
        [bytes(size) for size in (PART_BYTES, 1, PART_BYTES - 1, PART_BYTES + 1, 2)], "files"
    )
    assert list(split_rows(files, 10)) == [slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 5)]


def test_options_are_sent_with_the_rows():
    options = {"model": "7", "fpr": 0.1, "explain": True, "priors": {"a": 1.0}}
    array, objects = encode_rows(np.ones((1, 2)), "inputs"), encode_rows([{"a": 1}], "inputs")
    array_request = make_request("/predict", "inputs", array, options).within(2.5)
    assert array_request.query == {
        "model": "7",
        "fpr": "0.1",
        "explain": "true",
        "priors": '{"a":1.0}',
        "deadline_s": "2.5",
    }
    assert array_request.headers["Content-Type"] == "application/x-npy"
    objects_request = make_request("/predict", "inputs", objects, options)
    assert json.loads(objects_request.content) == {**options, "inputs": [{"a": 1}]}
    expected = {**options, "inputs": [{"a": 1}], "deadline_s": 2.5}
    assert json.loads(objects_request.within(2.5).content) == expected
    without_options = make_request("/predict", "inputs", objects, {})
    assert json.loads(without_options.content) == {"inputs": [{"a": 1}]}
    files_request = make_request("/predict", "inputs", Rows([b"x"], "files"), options)
    assert files_request.form == texts(options)
    assert files_request.within(2.5).form == {**texts(options), "deadline_s": "2.5"}
    assert [field for field, _ in files_request.files] == ["inputs"]


def test_ids_are_sent_with_an_array():
    request = make_request(
        "/acquire",
        "pool",
        encode_rows(np.ones((2, 3)).T, "pool"),
        {"ids": ["a", "b", "c"], "k": 1},
    )
    assert request.query == {"k": "1"}
    with np.load(io.BytesIO(request.content), allow_pickle=False) as arrays:
        assert arrays["ids"].tolist() == ["a", "b", "c"]
        assert arrays["pool"].shape == (3, 2)
