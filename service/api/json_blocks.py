"""Split large JSON bodies into blocks that are parsed one by one.

The JSON parser and the garbage collection of its objects block all threads. For large bodies,
regular expressions locate the rows, which are then parsed and converted block by block. Invalid
JSON (RFC 8259) is still rejected, because each block is parsed.
"""

import re
from collections.abc import Iterator
from typing import Any

import orjson

from model_store.errors import InvalidInput
from model_store.types import Content, Pause, no_pause
from service.errors import TooLarge

BLOCK_BYTES = 64 << 10  # parsed in a few milliseconds
MAX_ITEM_BYTES = 4 << 20  # except strings
MAX_DEPTH = 32  # nested arrays and objects in an item; no model takes as many

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


class JsonRows:
    """Unparsed rows of a JSON body. `blocks` are start and end positions."""

    def __init__(self, body: Content, blocks: list[tuple[int, int]], count: int) -> None:
        self.body = body
        self.blocks = blocks
        self.count = count

    def __len__(self) -> int:
        return self.count

    def parse_blocks(self) -> Iterator[list[Any]]:
        for start, end in self.blocks:
            items: list[Any] = parse(b"[" + self.body[start:end] + b"]")
            if not items:
                raise invalid_json("unexpected ',', expected a JSON value")
            yield items


def parse(text: Content) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid_json(error.msg) from None


def split_json(
    body: Content, rows_field: str, max_rows: int, pause: Pause = no_pause
) -> tuple[dict[str, Any], JsonRows | None]:
    """Split a JSON object into its fields and its unparsed rows, if any."""
    position = _after_space(body, 0)
    if body[position : position + 1] != b"{":
        raise InvalidInput("body", "a JSON object", "another JSON value, or none")
    content: dict[str, Any] = {}
    rows: JsonRows | None = None
    position += 1
    while True:
        key = _KEY.match(body, position)
        if key is None:
            if not content and body[_after_space(body, position) :].rstrip(b" \t\n\r") == b"}":
                return content, rows
            raise invalid_json("unexpected character, expected a field's name")
        name = parse(key[1])
        # The last duplicate wins, but all must be valid JSON.
        if name == rows_field and rows is not None:
            for _ in rows.parse_blocks():
                pause()
        if body[key.end() : key.end() + 1] == b"[":
            blocks, position = _find_blocks(body, key.end() + 1, name, max_rows, pause)
            if name == rows_field:
                rows, content[name] = blocks, []
            else:
                content[name] = []
                for items in blocks.parse_blocks():
                    content[name] += items
                    pause()
        else:
            position = _item_end(body, key.end(), name)
            content[name] = parse(body[key.end() : position])
            rows = None if name == rows_field else rows
        position = _after_space(body, position)
        mark, position = body[position : position + 1], position + 1
        if mark == b"}":
            break
        if mark != b",":
            raise invalid_json("unexpected character, expected ',' or '}'")
    if _after_space(body, position) != len(body):
        raise invalid_json("unexpected content after document")
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
