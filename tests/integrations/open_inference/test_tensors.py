import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from integrations.open_inference.tensors import (
    BYTES,
    NUMPY,
    Tensor,
    check_shape,
    decode_array,
    encode_array,
    flat_data,
    get_datatype,
    parse_array,
    parse_strings,
)
from model_store.errors import InvalidInput, TooLarge
from service.errors import Overloaded
from service.request_context import RequestContext
from service.server.budget import ByteBudget, Reservation

FORMATS = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
} | {"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"}
shapes = arrays.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4)


def make_context(max_bytes=1 << 30):
    return RequestContext(Reservation(ByteBudget(max_bytes)))


def decode_elements(content, count, max_bytes=1 << 30):
    tensor = Tensor("inputs.0", "x", BYTES, (count,), None, content=memoryview(content))
    return tensor.values(make_context(max_bytes))


def test_formats_cover_every_datatype():
    assert set(FORMATS) == set(NUMPY)


@given(data=st.data(), datatype=st.sampled_from(sorted(NUMPY)), shape=shapes)
def test_arrays_are_decoded_and_encoded_exactly(data, datatype, shape):
    array = data.draw(arrays.arrays(np.dtype(NUMPY[datatype]), shape))
    packed = b"".join(
        struct.pack("<" + FORMATS[datatype], value) for value in array.ravel().tolist()
    )
    decoded = decode_array(memoryview(packed), datatype, shape, "inputs.0")
    assert decoded.shape == shape
    assert decoded.tobytes() == array.tobytes()
    assert get_datatype(array) == datatype
    assert encode_array(np.asfortranarray(array)) == packed
    assert encode_array(array.astype(array.dtype.newbyteorder(">"))) == packed


@given(
    data=st.data(),
    datatype=st.sampled_from(sorted(set(NUMPY) - {"FP16"})),
    shape=shapes,
    is_nested=st.booleans(),
)
def test_json_data_can_be_flat_or_nested(data, datatype, shape, is_nested):
    finite = {"allow_nan": False, "allow_infinity": False} if datatype.startswith("FP") else {}
    array = data.draw(
        arrays.arrays(
            np.dtype(NUMPY[datatype]),
            shape,
            elements=arrays.from_dtype(np.dtype(NUMPY[datatype]), **finite),
        )
    )
    values = json.loads(json.dumps((array if is_nested else array.ravel()).tolist()))
    parsed = parse_array(values, datatype, shape, "inputs.0")
    assert parsed.dtype == array.dtype
    np.testing.assert_array_equal(parsed, array)


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_bytes_elements_are_decoded(values):
    packed = b"".join(struct.pack("<I", len(value)) + value for value in values)
    assert decode_elements(packed, len(values)) == values


@given(content=st.binary(max_size=60), count=st.integers(1, 8))
def test_bytes_with_another_element_count_are_rejected(content, count):
    def split():
        remaining, actual = content, []
        for _ in range(count):
            if len(remaining) < 4:
                return None
            (length,) = struct.unpack("<I", remaining[:4])
            if len(remaining) < 4 + length:
                return None
            actual.append(remaining[4 : 4 + length])
            remaining = remaining[4 + length :]
        return None if remaining else actual

    expected = split()
    if expected is None:
        with pytest.raises(InvalidInput, match=r"^inputs\.0: expected \d+ elements"):
            decode_elements(content, count)
    else:
        assert decode_elements(content, count) == expected


@given(st.lists(st.text(max_size=8), min_size=1, max_size=8))
def test_strings_are_encoded_as_elements(texts):
    array = np.array(texts)
    trimmed = array.tolist()  # numpy drops trailing zeros
    assert decode_elements(encode_array(array), len(texts)) == [text.encode() for text in trimmed]
    assert get_datatype(array) == BYTES


def test_element_count_is_checked_before_allocation():
    packed = struct.pack("<I", 0) * 10_000
    with pytest.raises((TooLarge, Overloaded)):
        decode_elements(packed, 10_000, max_bytes=100_000)
    assert len(decode_elements(packed, 10_000, max_bytes=10_000_000)) == 10_000


@pytest.mark.parametrize("shape", [None, [], [0], [-1], [1.0], [True], ["1"], [1] * 33, {}, 3])
def test_invalid_shapes_are_rejected(shape):
    with pytest.raises(
        InvalidInput, match=r"^inputs\.0\.shape: expected an array of 1 to 32 whole numbers"
    ):
        check_shape(shape, "inputs.0")


def test_huge_shape_is_rejected():
    shape = check_shape([1 << 62] * 32, "inputs.0")
    for decode in (
        lambda: decode_array(memoryview(b"1234"), "FP32", shape, "inputs.0"),
        lambda: parse_array([1.0], "FP32", shape, "inputs.0"),
        lambda: parse_strings(["a"], shape, "inputs.0"),
        lambda: Tensor("inputs.0", "x", BYTES, shape, None, content=memoryview(b"1234")).values(
            make_context()
        ),
    ):
        with pytest.raises(InvalidInput):
            decode()


@pytest.mark.parametrize(
    ("data", "datatype", "message"),
    [
        (None, "FP32", "an array, got null"),
        ([1], "FP32", "2 elements, by its shape, got 1"),
        ([1, "2"], "FP32", "numbers, or null for FP32, got a string of 1"),
        ([1, True], "FP64", "numbers, or null for FP64, got a boolean"),
        ([1, 2.0], "INT32", "whole numbers for INT32, got 2.0"),
        ([1, None], "INT32", "whole numbers for INT32, got null"),
        ([1, 256], "UINT8", "numbers in the range of UINT8, got a number outside it"),
        ([-1, 0], "UINT64", "numbers in the range of UINT64, got a number outside it"),
        ([0, 1], "BOOL", "true or false for BOOL, got 0"),
        ([1.0, 2.0], "FP16", "binary data, since FP16 is not available in JSON"),
        ([[1], [2]], "FP32", "numbers, or null for FP32, got an array of 1"),
    ],
)
def test_json_of_other_types_is_rejected(data, datatype, message):
    with pytest.raises(InvalidInput) as error:
        parse_array(data, datatype, (2,), "inputs.0")
    assert str(error.value).startswith(f"inputs.0.data: expected {message}")


@given(
    st.recursive(st.integers(0, 3), lambda inner: st.lists(inner, max_size=3), max_leaves=12),
    shapes,
)
def test_nested_data_is_flattened_like_numpy_or_rejected(data, shape):
    try:
        flat = flat_data(data, shape, "inputs.0")
    except InvalidInput:
        flat = None
    array = np.array(data, dtype=object)
    is_whole = array.shape in (shape, (math.prod(shape),)) and all(
        type(value) is int for value in array.ravel()
    )
    if is_whole:
        assert flat == array.ravel().tolist()
    elif flat is not None:  # nested lists, which the type check rejects
        assert any(isinstance(value, list) for value in flat)


def test_null_is_a_missing_value():
    assert np.isnan(parse_array([None, 1.5], "FP32", (2,), "inputs.0")).tolist() == [True, False]
    assert parse_strings([None, "a"], (2,), "inputs.0") == [None, "a"]


def test_booleans_must_be_0_or_1():
    with pytest.raises(InvalidInput, match="bytes 0 and 1"):
        decode_array(memoryview(b"\x00\x02"), "BOOL", (2,), "inputs.0")
