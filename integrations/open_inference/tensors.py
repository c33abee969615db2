"""Parse and encode tensors in JSON or in the protocol's binary format.

In binary format, numbers are a little-endian array in C order. Each BYTES element follows its
length, a four-byte integer.
"""

import math
import struct
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from model_store.errors import InvalidInput, describe_value
from model_store.sources.npy import MAX_DIMENSIONS
from service.request_context import RequestContext

BYTES, BOOL, FP16 = "BYTES", "BOOL", "FP16"
NUMPY = {
    BOOL: "|b1",
    **{f"INT{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
    FP16: "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
DATATYPES = (*NUMPY, BYTES)
DATATYPE_BY_DTYPE = {np.dtype(name): datatype for datatype, name in NUMPY.items()}
ELEMENT_BYTES = 80  # memory of a BYTES element, without its content
ARRAY_BYTES = 5  # memory of a number: a float32 and a boolean
LENGTH = struct.Struct("<I")
ELEMENTS_PER_STEP = 4096


@dataclass(frozen=True, eq=False)
class Tensor:
    """An input tensor, which contains an array of numbers, JSON strings or binary data."""

    place: str  # for errors, which must not repeat names from requests
    name: str
    datatype: str
    shape: tuple[int, ...]
    array: np.ndarray | None  # numbers
    elements: list[Any] | None = None  # BYTES in JSON: strings or null
    content: memoryview | None = None  # BYTES in binary format
    is_base64: bool = False  # MLServer's content type

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def values(self, call: RequestContext) -> list[Any]:
        """Return the elements of a BYTES tensor.

        Elements from JSON are strings or None. Elements from binary data are bytes.
        """
        if self.elements is not None:
            return self.elements
        assert self.content is not None
        expected = f"{self.size} elements, each after its length in four bytes"
        error = InvalidInput(self.place, expected, "other bytes")
        content, end = self.content, len(self.content)
        if 4 * self.size > end:
            raise error
        call.reservation.reserve(ELEMENT_BYTES * self.size + end, self.place)
        elements: list[Any] = []
        position = 0
        while len(elements) < self.size:
            if position + 4 > end:
                raise error
            (length,) = LENGTH.unpack_from(content, position)
            position += 4 + length
            if position > end:
                raise error
            elements.append(bytes(content[position - length : position]))
            if len(elements) % ELEMENTS_PER_STEP == 0:
                call.pause()
        if position != end:
            raise error
        return elements


def check_shape(shape: Any, place: str) -> tuple[int, ...]:
    """Check the shape of a tensor. Its size is not limited."""
    is_shape = isinstance(shape, list) and all(type(length) is int for length in shape)
    if not is_shape or not 1 <= len(shape) <= MAX_DIMENSIONS or min(shape) < 1:
        expected = f"an array of 1 to {MAX_DIMENSIONS} whole numbers, each at least 1"
        raise InvalidInput(
            f"{place}.shape", expected, "another" if is_shape else describe_value(shape)
        )
    return tuple(shape)


def decode_array(
    content: memoryview, datatype: str, shape: tuple[int, ...], place: str
) -> np.ndarray:
    dtype = np.dtype(NUMPY[datatype])
    if dtype.itemsize * math.prod(shape) != len(content):
        expected = f"a binary_data_size that matches {datatype} and the shape"
        raise InvalidInput(place, expected, f"{len(content)} bytes")
    if datatype == BOOL and (np.frombuffer(content, dtype=np.uint8) > 1).any():
        raise InvalidInput(place, "bytes 0 and 1 only", "other bytes")
    return np.frombuffer(content, dtype=dtype).reshape(shape)


def flat_data(data: Any, shape: tuple[int, ...], place: str) -> list[Any]:
    """Flatten JSON data that may be nested according to the tensor's shape."""
    if not isinstance(data, list):
        raise InvalidInput(f"{place}.data", "an array", describe_value(data))
    size, level = math.prod(shape), data
    if len(shape) > 1 and level and isinstance(level[0], list):
        for axis, length in enumerate(shape):
            if axis and not all(type(part) is list and len(part) == length for part in level):
                expected = "flat elements, or arrays nested by shape"
                raise InvalidInput(f"{place}.data", expected, "other nesting")
            if axis == 0 and len(level) != length:
                expected = f"an array of {length}, the first length of the shape"
                raise InvalidInput(f"{place}.data", expected, describe_value(level))
            level = level if axis == 0 else list(chain.from_iterable(level))
    if len(level) != size:
        raise InvalidInput(f"{place}.data", f"{size} elements, by its shape", f"{len(level)}")
    return level


def parse_array(data: Any, datatype: str, shape: tuple[int, ...], place: str) -> np.ndarray:
    """Convert JSON data to an array. Null becomes NaN in floating-point tensors."""
    if datatype == FP16:
        expected = "binary data, since FP16 is not available in JSON"
        raise InvalidInput(f"{place}.data", expected, "data in JSON")
    level = flat_data(data, shape, place)
    types: set[type]
    if datatype == BOOL:
        types, expected = {bool}, "true or false"
    elif datatype.startswith("FP"):
        types, expected = {int, float, type(None)}, "numbers, or null"
    else:
        types, expected = {int}, "whole numbers"
    if not set(map(type, level)) <= types:
        invalid = next(value for value in level if type(value) not in types)
        raise InvalidInput(f"{place}.data", f"{expected} for {datatype}", describe_value(invalid))
    try:
        if not datatype.startswith("FP"):
            return np.array(level, NUMPY[datatype]).reshape(shape)
        with np.errstate(over="ignore"):
            return np.array(level, dtype=np.float64).astype(NUMPY[datatype]).reshape(shape)
    except OverflowError:
        expected = f"numbers in the range of {datatype}"
        raise InvalidInput(f"{place}.data", expected, "a number outside it") from None


def parse_strings(data: Any, shape: tuple[int, ...], place: str) -> list[Any]:
    """Return the elements of a JSON-encoded BYTES tensor. Missing values are None."""
    level = flat_data(data, shape, place)
    invalid = next((v for v in level if v is not None and type(v) is not str), None)
    if invalid is not None:
        raise InvalidInput(
            f"{place}.data", f"strings, or null, for {BYTES}", describe_value(invalid)
        )
    return level


def encode_array(array: np.ndarray) -> bytes:
    if array.dtype.kind != "U":
        return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
    elements = [text.encode() for text in array.ravel().tolist()]
    return b"".join(
        chain.from_iterable((LENGTH.pack(len(element)), element) for element in elements)
    )


def get_datatype(array: np.ndarray) -> str:
    return BYTES if array.dtype.kind == "U" else DATATYPE_BY_DTYPE[array.dtype.newbyteorder("<")]
