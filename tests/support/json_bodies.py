"""JSON bodies of at most a megabyte that ask for much: for every route that takes one."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

MOST_BYTES = 1 << 20
ROW = [8] * 64
CONFIG = (
    '<View><Image name="p" value="$i"/><Choices name="d" toName="p">'
    + "".join(f'<Choice value="{digit}"/>' for digit in range(10))
    + "</Choices></View>"
)
TASK = {"id": 1, "data": {"dubito_input": ROW}}
RESULT = {"from_name": "d", "to_name": "p", "type": "choices", "value": {"choices": ["3"]}}
OPTIONS = {"model": "digits", "version": "1", "num_samples": 5, "seed": 1}
PREDICT = {**OPTIONS, "inputs": [ROW], "groups": ["a"], "priors": {"3": 1.0}, "explain": True}
ACQUIRE = {**OPTIONS, "pool": [ROW, ROW], "ids": ["a", "b"], "groups": ["a", "b"], "k": 1}
TENSOR = {"name": "input", "shape": [1, 64], "datatype": "FP32", "data": ROW}
ROUTES: dict[str, Any] = {  # with a body that is right, or nearly
    "/predict": PREDICT,
    "/acquire": {**ACQUIRE, "exclude": ["b"], "keep": True},
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
HERE = "@here@"


def repeat(piece: str) -> Callable[[int], str]:
    return lambda size: "[" + ",".join([piece] * (size // (len(piece) + 1))) + "]"


def nest(opening: str, closing: str) -> Callable[[int], str]:
    def nested(size: int) -> str:
        depth = size // len(opening + closing)
        return opening * depth + "0" + closing * depth

    return nested


def keys(value: str) -> Callable[[int], str]:
    def unknown(size: int) -> str:
        count = size // (len(value) + 11)
        return "{" + ",".join(f'"u{i:06}":{value}' for i in range(count)) + "}"

    return unknown


def text(piece: str) -> Callable[[int], str]:
    return lambda size: '"' + piece * (size // len(piece.encode())) + '"'


XML = [
    lambda size: json.dumps("<a>" * (size // 7) + "</a>" * (size // 7)),
    lambda size: json.dumps("<View>" + "<Choice value='1'/>" * (size // 19) + "</View>"),
    lambda size: json.dumps("<a " + " ".join(f"b{i}='1'" for i in range(size // 16)) + "/>"),
    lambda size: json.dumps("<a>" + "&amp;" * (size // 5) + "</a>"),
]
MUCH: list[Callable[[int], str]] = [
    *map(repeat, ["0", "null", "{}", "[]", '""', '"a"', "1e99", "1.5", "[0]", '{"a":0}', "[[[]]]"]),
    *(repeat(json.dumps(row)) for row in (ROW, {str(i): 1 for i in range(64)}, TENSOR, TASK)),
    *(repeat(json.dumps(one)) for one in ({"id": "a", "label": "3"}, {"id": "a", "x": 0}, RESULT)),
    *(nest(*pair) for pair in (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ("[0,", "]"))),
    *map(keys, ["0", "[]", '"a"', "null"]),
    *map(text, ["a", "\\u0000", "\\ud800", "\\\\", "é", "a,", "ﷺ", "1", "/"]),
    *XML,
    lambda size: "1" * size,
    lambda size: "0." + "3" * size,
    lambda size: "1e" + "9" * size,
    lambda size: " " * size + "1",
    lambda size: "[" * size,
    lambda size: '"' + "\\" * size,
    lambda size: "[" + "NaN," * (size // 4) + "0]",
]


def bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    """Routes and bodies: somewhere in one that is right there is much of something."""
    rng = random.Random(seed)
    while True:
        route, base = rng.choice(list(ROUTES.items()))
        size = rng.choice([MOST_BYTES - 4096, 300_000, 60_000, 1000])
        yield route, body_of(base, rng.choice(MUCH)(size), rng)


def body_of(base: Any, much: str, rng: random.Random) -> bytes:
    content = json.loads(json.dumps(base))
    places = list(_places(content))
    holder, name = rng.choice(places)
    if isinstance(holder, dict) and rng.random() < 0.2:
        name = "unknown"
    holder[name] = HERE
    whole = json.dumps(content)
    if rng.random() < 0.1:  # fields beyond those that are known, or the same again
        whole = whole[:-1] + "," + json.dumps(base)[1:]
    if much.startswith("{") and rng.random() < 0.3:  # keys next to those that are right
        whole = json.dumps(base)[:-1] + "," + much[1:]
    body = whole.replace(f'"{HERE}"', much).encode("utf-8", "surrogatepass")
    assert len(body) <= MOST_BYTES
    return body if rng.random() < 0.95 else body[: len(body) // 2]


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content[:3])
    for name, value in items:
        yield content, name
        if isinstance(value, dict | list) and value:
            yield from _places(value)
