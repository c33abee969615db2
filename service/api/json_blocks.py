"""Large JSON bodies, taken apart block by block.

A parser holds the interpreter until it is done, half a second for 16 MB, in whatever thread it
runs, and its objects take many times the body's size and stop everything again when they are looked
through for garbage. So the rows of a large body are only found at first, and then parsed and read a
block at a time. Whatever is found is parsed in the end, so that what is accepted is JSON (RFC 8259)
and nothing else.
"""

import re
from collections.abc import Iterator
from typing import Any

import orjson

from model_store.errors import InvalidInput
from model_store.types import Pause, no_pause
from service.errors import TooLarge

BLOCK_BYTES = 64 << 10  # of an array that are parsed at once, or one item: some milliseconds
MOST_ITEM_BYTES = 4 << 20  # of an item that is no string
NESTED = 4  # arrays and objects in one another in an item

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_SPACE = re.compile(rb"[ \t\n\r]*+")
_KEY = re.compile(rb"[ \t\n\r]*+(" + _STRING + rb")[ \t\n\r]*+:[ \t\n\r]*+", re.DOTALL)


def _item() -> re.Pattern[bytes]:
    """Return what an item looks like from outside: brackets in pairs, and no comma outside of
    them."""
    nested = rb""
    for _ in range(NESTED):
        nested = rb"|[\[{](?:[^\"\[\]{}]++|" + _STRING + nested + rb")*+[\]}]"
    return re.compile(rb"(?:[^\"\[\]{},]++|" + _STRING + nested + rb")*+", re.DOTALL)


_ITEM = _item()


class JsonRows:
    """The rows of a JSON body, not parsed yet; `blocks` are where their text begins and ends."""

    def __init__(self, body: bytes | bytearray, blocks: list[tuple[int, int]], count: int) -> None:
        self.body = body
        self.blocks = blocks
        self.count = count

    def __len__(self) -> int:
        return self.count

    def parse_blocks(self) -> Iterator[list[Any]]:
        for start, end in self.blocks:
            items: list[Any] = parse(b"[" + self.body[start:end] + b"]")
            if not items:
                raise not_json("unexpected ',', expected a JSON value")
            yield items


def parse(text: bytes | bytearray) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise not_json(error.msg) from None


def take_apart(
    body: bytes | bytearray, rows_field: str, max_rows: int, pause: Pause = no_pause
) -> tuple[dict[str, Any], JsonRows | None]:
    """Return the fields of a JSON object, and the array of rows by itself, if it is one."""
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
            raise not_json("unexpected character, expected a field's name")
        name = parse(key[1])
        # the last one counts, but this one too must be JSON
        if name == rows_field and rows is not None:
            for _ in rows.parse_blocks():
                pause()
        if body[key.end() : key.end() + 1] == b"[":
            found, position = _find_blocks(body, key.end() + 1, name, max_rows, pause)
            if name == rows_field:
                rows, content[name] = found, []
            else:
                content[name] = []
                for items in found.parse_blocks():
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
            raise not_json("unexpected character, expected ',' or '}'")
    if _after_space(body, position) != len(body):
        raise not_json("unexpected content after document")
    return content, rows


def _find_blocks(
    body: bytes | bytearray, start: int, field: str, max_rows: int, pause: Pause
) -> tuple[JsonRows, int]:
    blocks: list[tuple[int, int]] = []
    position = begun = start
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
            raise not_json("unexpected character, expected ',' or ']'")
        if mark == b"]" or position - begun >= BLOCK_BYTES:
            blocks.append((begun, position))
            begun = position + 1
            if mark == b"]":
                return JsonRows(body, blocks, count), position + 1
            pause()
        position += 1


def _item_end(body: bytes | bytearray, start: int, field: str) -> int:
    begun = _after_space(body, start)
    if body[begun : begun + 1] == b'"':  # may be long: an image
        end = body.find(b'"', begun + 1)
        if end > 0 and body.find(b"\\", begun, end) < 0:
            return _after_space(body, end + 1)
    last = begun + MOST_ITEM_BYTES
    found = _ITEM.match(body, begun, last)
    assert found is not None  # it may be empty
    end = found.end()
    if len(body) > last and (end == last or body[end : end + 1] not in (b",", b"]", b"}")):
        raise TooLarge(
            field[:80], f"at most {MOST_ITEM_BYTES} bytes of JSON", "more or no end of it"
        )
    if body[end : end + 1] in (b"[", b"{"):
        nested = f"at most {NESTED} in one another in {field[:80]}"
        expected = f"JSON whose arrays and objects have an end, and {nested}"
        raise InvalidInput("body", expected, "something else")
    return end


def _after_space(body: bytes | bytearray, position: int) -> int:
    space = _SPACE.match(body, position)
    assert space is not None
    return space.end()


def not_json(what: str) -> InvalidInput:
    return InvalidInput("body", "JSON (which has no NaN or Infinity)", what)
