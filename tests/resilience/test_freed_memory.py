import httpx

from tests.support.process import own_bytes
from tests.support.serving import wait_until

BODY_BYTES = 15 << 20
JSON = {"Content-Type": "application/json"}


def test_nothing_is_held_of_refused_bodies(serve, digits_store):
    many_parts = b'{"inputs":[' + b"[]," * (BODY_BYTES // 3) + b"0]}"
    no_row = b'{"inputs":[' + b"1," * 2000 + b'"' + b"a" * BODY_BYTES + b'"]}'
    with serve(digits_store) as (url, process), httpx.Client(base_url=url, timeout=30) as client:
        before = own_bytes(process.pid)
        for body in (many_parts, no_row):
            for _ in range(4):
                answer = client.post("/predict", content=body, headers=JSON)
                assert answer.status_code in (413, 422)
            # Garbage collection comes every five seconds, and is not waited for.
            wait_until(lambda: own_bytes(process.pid) < before + BODY_BYTES // 2, 2)
