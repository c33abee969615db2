"""Split large JSON bodies into blocks that are parsed one by one.

The JSON parser and the garbage collection of its objects block all threads. For large bodies,
regular expressions locate the rows, which are then parsed and converted block by block. Invalid
JSON (RFC 8259) is still rejected, because each block is parsed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from model_store.errors import InvalidInput, TooLarge, describe_value
from model_store.types import Content, JsonObject, Pause, no_pause
from service.request_context import RequestContext

BLOCK_BYTES = 64 << 10  # parsed in a few milliseconds
MAX_ITEM_BYTES = 4 << 20  # except strings
MAX_DEPTH = 32  # nested arrays and objects in an item; no model takes as many
MAX_NESTED_PER_ROW = 64  # arrays and objects per row, on average
MAX_NESTED = 1_000_000
# Upper bounds in bytes for each punctuation mark. A comma or colon stands for a number (float32
# and a finite flag), a bracket for the offsets of a row, and a quote for half a string.
JSON_OBJECT_BYTES = {",": 5, "[": 32, "{": 32, '"': 40, ":": 5}
COUNT_STEP_BYTES = 256 << 10  # takes a few tenths of a millisecond


_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_SPACE = re.compile(rb"[ \t\n\r]*+")
_KEY = re.compile(rb"[ \t\n\r]*+(" + _STRING + rb")[ \t\n\r]*+:[ \t\n\r]*+", re.DOTALL)


def _item_pattern() -> re.Pattern[bytes]:
    """Build a pattern for an item with balanced brackets and no comma outside them."""
    nested = rb""
    for _ in range(MAX_DEPTH):
        nested = rb"|[\[{](?:[^\"\[\]{}]++|" + _STRING + nested + rb")*+[\]}]"
    return re.compile(rb"(?:[^\"\[\]{},]++|" + _STRING + nested + rb")*+", re.DOTALL)


_ITEM = _item_pattern()


@dataclass(frozen=True, eq=False)
class JsonRows:
    """The unparsed rows of a JSON body."""

    body: Content
    blocks: list[tuple[int, int]]  # start and end positions
    count: int

    def __len__(self) -> int:
        return self.count

    def parts(self) -> Iterator[list[Any]]:
        for start, end in self.blocks:
            items: list[Any] = parse(b"[" + self.body[start:end] + b"]")
            if not items:
                raise invalid_json("unexpected ',', expected a JSON value")
            yield items


def parse(text: bytes | bytearray) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid_json(error.msg) from None


def split_json(
    body: Content, rows_field: str, max_rows: int, pause: Pause = no_pause
) -> tuple[JsonObject, JsonRows | None]:
    """Split a JSON object into its fields and its unparsed rows, if any."""
    rows: JsonRows | None = None
    first = last = 0  # the rows are between these positions
    position = _after_space(body, 0) + 1
    while (key := _KEY.match(body, position)) is not None:
        name, start = parse(key[1]), key.end()
        blocks = None
        if body[start : start + 1] == b"[":
            blocks, end = _find_blocks(body, start + 1, name, max_rows, pause)
        else:
            end = _item_end(body, start, name)
        if name == rows_field:  # the last duplicate wins
            rows = blocks
            first, last = (0, 0) if blocks is None else (start + 1, end - 1)
        position = _after_space(body, end) + 1
    # The parser rejects everything that the loop passed over.
    content = parse(body[:first] + body[last:])
    if not isinstance(content, dict):
        raise InvalidInput("body", "a JSON object", describe_value(content))
    return content, rows


def _find_blocks(
    body: Content, start: int, field: str, max_rows: int, pause: Pause
) -> tuple[JsonRows, int]:
    blocks: list[tuple[int, int]] = []
    position = block_start = start
    end = _after_space(body, start)
    if body[end : end + 1] == b"]":
        return JsonRows(body, [], 0), end + 1
    count = 0
    while True:
        position = _item_end(body, position, f"{field}.{count}")
        count += 1
        if count > max_rows:
            raise TooLarge(field, f"at most {max_rows} rows", "more")
        mark = body[position : position + 1]
        if mark not in (b",", b"]"):
            raise invalid_json("unexpected character, expected ',' or ']'")
        if mark == b"]" or position - block_start >= BLOCK_BYTES:
            blocks.append((block_start, position))
            block_start = position + 1
            if mark == b"]":
                return JsonRows(body, blocks, count), position + 1
            pause()
        position += 1


def _item_end(body: Content, start: int, field: str) -> int:
    item_start = _after_space(body, start)
    if body[item_start : item_start + 1] == b'"':  # base64 images are long
        end = body.find(b'"', item_start + 1)
        if end > 0 and body.find(b"\\", item_start, end) < 0:
            return _after_space(body, end + 1)
    last = item_start + MAX_ITEM_BYTES
    match = _ITEM.match(body, item_start, last)
    assert match is not None  # the pattern matches empty text
    end = match.end()
    if len(body) > last and (end == last or body[end : end + 1] not in (b",", b"]", b"}")):
        raise TooLarge(field[:80], f"at most {MAX_ITEM_BYTES} bytes of JSON", "more")
    if body[end : end + 1] in (b"[", b"{"):
        depth = f"at most {MAX_DEPTH} levels in {field[:80]}"
        expected = f"JSON with closed arrays and objects of {depth}"
        raise InvalidInput("body", expected, "other JSON")
    return end


def _after_space(body: Content, position: int) -> int:
    space = _SPACE.match(body, position)
    assert space is not None
    return space.end()


def invalid_json(reason: str) -> InvalidInput:
    return InvalidInput("body", "JSON (which has no NaN or Infinity)", reason)


def reserve_json(
    body: Content,
    field: str,
    max_rows: int,
    call: RequestContext,
    mark_bytes: Mapping[str, int] = JSON_OBJECT_BYTES,
) -> None:
    """Reserve memory for parsing a JSON body, estimated from its punctuation.

    The default `mark_bytes` assume that rows become arrays and other fields become objects.
    """
    max_nested = min(max_rows * MAX_NESTED_PER_ROW, MAX_NESTED)
    counts = count_marks(body, field, max_nested, call.pause)
    size = sum(mark_bytes.get(mark, 0) * count for mark, count in counts.items())
    call.reservation.reserve(size, "body")


def count_marks(
    body: Content, field: str, max_nested: int, pause: Pause = no_pause
) -> dict[str, int]:
    """Count the structural characters of a JSON text, and limit its arrays and objects.

    `bytes.count` would block other threads, and is slower if there are many matches.
    """
    array, counts = np.frombuffer(body, dtype=np.uint8), dict.fromkeys(JSON_OBJECT_BYTES, 0)
    for first in range(0, len(array), COUNT_STEP_BYTES):
        part = array[first : first + COUNT_STEP_BYTES]
        for mark in counts:
            counts[mark] += int(np.count_nonzero(part == ord(mark)))
        pause()
    nested = counts["["] + counts["{"]
    if nested > max_nested:
        raise TooLarge(field, f"at most {max_nested} arrays and objects", str(nested))
    return counts
