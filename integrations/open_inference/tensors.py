"""Tensors on the wire, as JSON or as bytes: the protocol's datatypes and its binary extension.

As bytes a tensor of numbers is an array in C order, little-endian. One of BYTES is each element's
length, four bytes, and then the element.
"""

import math
import struct
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from model_store.errors import InvalidInput, kind_of
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
OF_NUMPY = {np.dtype(name): datatype for datatype, name in NUMPY.items()}
ELEMENT_BYTES = 80  # of an element of BYTES in memory, without its content
ARRAY_BYTES = 5  # of a number: as float32, and whether it is finite
LENGTH = struct.Struct("<I")
ELEMENTS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of a request: an array of numbers, or of BYTES its elements, as they came in JSON or
    still as bytes.

    `place` is what errors call it: names that come in requests are not repeated.
    """

    place: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    array: np.ndarray | None  # of numbers
    elements: list[Any] | None = None  # of BYTES in JSON: strings, or null
    content: memoryview | None = None  # of BYTES as bytes
    is_base64: bool = False  # by what MLServer calls its content type

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def values(self, call: RequestContext) -> list[Any]:
        """Return the elements of BYTES: strings or null in JSON, else bytes; yields after each of
        many steps."""
        if self.elements is not None:
            return self.elements
        assert self.content is not None
        wrong = InvalidInput(
            self.place, f"{self.size} elements, each after its length in four bytes", "other bytes"
        )
        content, end = self.content, len(self.content)
        if 4 * self.size > end:
            raise wrong
        call.reservation.reserve(ELEMENT_BYTES * self.size + end, self.place)
        found: list[Any] = []
        at = 0
        while len(found) < self.size:
            if at + 4 > end:
                raise wrong
            (length,) = LENGTH.unpack_from(content, at)
            at += 4 + length
            if at > end:
                raise wrong
            found.append(bytes(content[at - length : at]))
            if len(found) % ELEMENTS_AT_ONCE == 0:
                call.pause()
        if at != end:
            raise wrong
        return found


def shape_of(given: Any, place: str) -> tuple[int, ...]:
    """Return a tensor's shape; its product may be as large as integers are."""
    is_shape = isinstance(given, list) and all(type(length) is int for length in given)
    if not is_shape or not 1 <= len(given) <= MAX_DIMENSIONS or min(given) < 1:
        expected = f"an array of 1 to {MAX_DIMENSIONS} whole numbers, each at least 1"
        raise InvalidInput(f"{place}.shape", expected, "another" if is_shape else kind_of(given))
    return tuple(given)


def array_of_bytes(
    content: memoryview, datatype: str, shape: tuple[int, ...], place: str
) -> np.ndarray:
    dtype = np.dtype(NUMPY[datatype])
    if dtype.itemsize * math.prod(shape) != len(content):
        expected = f"binary_data_size of {datatype} and its shape"
        raise InvalidInput(place, expected, f"{len(content)} bytes")
    if datatype == BOOL and (np.frombuffer(content, dtype=np.uint8) > 1).any():
        raise InvalidInput(place, "bytes of 0 and 1", "others")
    return np.frombuffer(content, dtype=dtype).reshape(shape)


def flat_data(data: Any, shape: tuple[int, ...], place: str) -> list[Any]:
    """Return the elements of JSON data, which come flat or nested as the shape says."""
    if not isinstance(data, list):
        raise InvalidInput(f"{place}.data", "an array", kind_of(data))
    size, level = math.prod(shape), data
    if len(shape) > 1 and level and isinstance(level[0], list):
        for axis, length in enumerate(shape):
            if axis and not all(type(part) is list and len(part) == length for part in level):
                expected = "elements flat, or nested as the shape says"
                raise InvalidInput(f"{place}.data", expected, "others")
            if axis == 0 and len(level) != length:
                expected = f"an array of {length}, as the shape says"
                raise InvalidInput(f"{place}.data", expected, kind_of(level))
            level = level if axis == 0 else list(chain.from_iterable(level))
    if len(level) != size:
        raise InvalidInput(f"{place}.data", f"{size} elements, as the shape says", f"{len(level)}")
    return level


def array_of_json(data: Any, datatype: str, shape: tuple[int, ...], place: str) -> np.ndarray:
    """Return the array of JSON data; null among floating-point numbers is NaN, a missing value."""
    if datatype == FP16:
        expected = "binary data, since FP16 has no form in JSON"
        raise InvalidInput(f"{place}.data", expected, "data in JSON")
    level = flat_data(data, shape, place)
    allowed: set[type]
    if datatype == BOOL:
        allowed, wanted = {bool}, "true or false"
    elif datatype.startswith("FP"):
        allowed, wanted = {int, float, type(None)}, "numbers, or null"
    else:
        allowed, wanted = {int}, "whole numbers"
    if not set(map(type, level)) <= allowed:
        odd = next(value for value in level if type(value) not in allowed)
        raise InvalidInput(f"{place}.data", f"{wanted} for {datatype}", kind_of(odd))
    try:
        if not datatype.startswith("FP"):
            return np.array(level, NUMPY[datatype]).reshape(shape)
        with np.errstate(over="ignore"):
            # null becomes NaN
            return np.array(level, dtype=np.float64).astype(NUMPY[datatype]).reshape(shape)
    except OverflowError:
        expected = f"numbers in the range of {datatype}"
        raise InvalidInput(f"{place}.data", expected, "one that is not") from None


def strings_of_json(data: Any, shape: tuple[int, ...], place: str) -> list[Any]:
    """Return the elements of BYTES in JSON: strings, or null where a value is missing."""
    level = flat_data(data, shape, place)
    odd = next((value for value in level if value is not None and type(value) is not str), None)
    if odd is not None:
        raise InvalidInput(f"{place}.data", f"strings, or null, for {BYTES}", kind_of(odd))
    return level


def bytes_of(array: np.ndarray) -> bytes:
    if array.dtype.kind != "U":
        return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
    elements = [text.encode() for text in array.ravel().tolist()]
    return b"".join(
        chain.from_iterable((LENGTH.pack(len(element)), element) for element in elements)
    )


def datatype_of(array: np.ndarray) -> str:
    return BYTES if array.dtype.kind == "U" else OF_NUMPY[array.dtype.newbyteorder("<")]
