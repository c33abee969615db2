import httpx
import pytest

from tests.support.process import own_bytes
from tests.support.serving import wait_until

BODY_BYTES = 15 << 20
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[' + b"[]," * (BODY_BYTES // 3) + b"0]}",
        b'{"inputs":[' + b"1," * 2000 + b'"' + b"a" * BODY_BYTES + b'"]}',
    ],
    ids=["too many parts", "no row"],
)
def test_nothing_is_held_of_refused_bodies(serve, digits_store, body):
    with serve(digits_store) as (url, process), httpx.Client(base_url=url, timeout=30) as client:
        before = own_bytes(process.pid)
        for _ in range(4):
            assert client.post("/predict", content=body, headers=JSON).status_code in (413, 422)
        # Garbage collection comes every five seconds, and is not waited for.
        wait_until(lambda: own_bytes(process.pid) < before + BODY_BYTES // 2, 2)
