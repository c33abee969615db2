import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model_store.errors import DubitoError, InvalidInput, TooLarge
from service.api import json_blocks
from service.api.json_blocks import split_json

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    LEAVES,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=2),
    max_leaves=6,
)
OBJECTS = st.dictionaries(
    st.sampled_from(["inputs", "ids", "model", "seed", 'a"\\b']),
    st.lists(VALUES, max_size=12) | LEAVES,
    max_size=4,
)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(json_blocks, "BLOCK_BYTES", 5)
        yield


def read(text):
    try:
        content, rows = split_json(text, "inputs", 1000)
        if rows is not None:
            content["inputs"] = [row for block in rows.parts() for row in block]
            assert len(rows) == len(content["inputs"])
    except DubitoError:
        return None
    return content


def depth(value):
    """Count the levels of nested arrays and objects."""
    if not isinstance(value, list | dict):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@given(OBJECTS, st.sampled_from([None, 1]), st.booleans())
def test_valid_json_is_read_like_orjson(content, indent, as_bytearray):
    text = json.dumps(content, indent=indent).encode()
    deepest = max((depth(v) - isinstance(v, list) for v in content.values()), default=0)
    if deepest <= json_blocks.MAX_DEPTH:
        assert read(bytearray(text) if as_bytearray else text) == orjson.loads(text)


@given(OBJECTS, st.data())
@example({"inputs": [1, 2]}, None)
def test_edited_json_is_read_like_orjson_or_refused(content, data):
    text = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    variants = [
        text,
        text.replace(b"]", b",]", 1),
        text.replace(b"[", b"[,", 1),
        text + b" x",
        text[:-1],
        text + b"}",
    ]
    if data is not None:
        index = data.draw(st.integers(0, len(text)))
        char = data.draw(
            st.sampled_from(
                [b",", b"[", b"]", b"{", b"}", b'"', b"\\", b":", b" ", b"1", b"\xff", b""]
            )
        )
        variants += [text[:index] + char + text[index:], text[:index] + char + text[index + 1 :]]
    for variant in variants:
        try:
            expected = orjson.loads(variant)
        except orjson.JSONDecodeError:
            expected = None
        actual = read(variant)
        if not isinstance(expected, dict):
            assert actual is None, variant
        elif actual is not None:  # fields other than the rows can be refused for their depth
            assert actual == expected, variant
        else:
            assert (
                max(depth(value) - isinstance(value, list) for value in expected.values())
                > json_blocks.MAX_DEPTH
            ), variant


def test_too_many_or_too_long_rows_are_refused_before_parsing(monkeypatch):
    monkeypatch.setattr(json_blocks, "MAX_ITEM_BYTES", 100)
    with pytest.raises(TooLarge, match="inputs: expected at most 3 rows"):
        split_json(b'{"inputs": [1, 2, 3, 4', "inputs", 3)
    with pytest.raises(TooLarge, match=r"inputs\.1: expected at most 100 bytes of JSON"):
        split_json(b'{"inputs": [[0], [' + b"1," * 100 + b"1]]}", "inputs", 3)
    long = b"a" * 1000  # strings can be long, for example images
    _, rows = split_json(b'{"inputs": ["' + long + b'"]}', "inputs", 3)
    assert list(rows.parts()) == [[long.decode()]]


def test_rows_replaced_by_a_duplicate_key_must_be_valid_json():
    assert read(b'{"inputs": [1], "inputs": [2]}') == {"inputs": [2]}
    with pytest.raises(InvalidInput):
        split_json(b'{"inputs": [1x], "inputs": [2]}', "inputs", 3)


@pytest.mark.parametrize("depth", [5, 30])
def test_deeply_nested_rows_are_read_from_large_bodies(depth):
    row = b"[" * depth + b"1" + b"]" * depth
    body = b'{"inputs": [' + row + b"]}"
    _, rows = json_blocks.split_json(body, "inputs", 10)
    assert [*rows.parts()] == [json.loads(body)["inputs"]]
