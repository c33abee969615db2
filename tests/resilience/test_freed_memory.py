import httpx

from tests.support.process import anonymous_bytes
from tests.support.serving import wait_until

BODY_BYTES = 15 << 20
JSON = {"Content-Type": "application/json"}


def test_memory_of_rejected_bodies_is_freed(serve, digits_store):
    many_parts = b'{"inputs":[' + b"[]," * (BODY_BYTES // 3) + b"0]}"
    no_row = b'{"inputs":[' + b"1," * 2000 + b'"' + b"a" * BODY_BYTES + b'"]}'
    with serve(digits_store) as (url, process), httpx.Client(base_url=url, timeout=30) as client:
        before = anonymous_bytes(process.pid)
        for body in (many_parts, no_row):
            for _ in range(4):
                response = client.post("/predict", content=body, headers=JSON)
                assert response.status_code in (413, 422)
            # The timeout is shorter than the interval of garbage collection (5 s).
            wait_until(lambda: anonymous_bytes(process.pid) < before + BODY_BYTES // 2, 2)
