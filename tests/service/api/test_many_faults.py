import tracemalloc

import pytest

from model_store.errors import InvalidInput, TooLarge
from service.api.requests import parse_json, validate
from service.api.schemas import AcquireRequest, LabelsRequest, PredictRequest

NUM_FAULTS = 200_000
UNKNOWN = {f"unknown{i}": 0 for i in range(NUM_FAULTS)}


@pytest.mark.parametrize(
    ("schema", "content", "message"),
    [
        (LabelsRequest, {"labels": [0] * NUM_FAULTS}, r"^labels\.0: "),
        (LabelsRequest, {"labels": [{"id": "a", **UNKNOWN}]}, r"^labels\.0\.unknown0: "),
        (PredictRequest, {"inputs": [], **UNKNOWN}, r"^unknown0: expected one of confidence"),
        (PredictRequest, {"inputs": [], "groups": [0] * NUM_FAULTS}, r"^groups\.0: "),
        (AcquireRequest, {"pool": [], "k": 1, "ids": [0] * NUM_FAULTS}, r"^ids\.0: "),
    ],
)
def test_only_first_of_many_faults_is_reported_in_bounded_memory(schema, content, message):
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=message):
            validate(schema, content)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("piece", [b"[]", b'{"a":0}', b'"a"', b"[[[]]]"])
def test_json_with_too_many_parts_is_refused_before_parsing(piece):
    body = b'{"a":[' + b",".join([piece] * (4_000_000 // len(piece))) + b"]}"
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match=r"^body: expected (JSON of )?at most"):
            parse_json(body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
