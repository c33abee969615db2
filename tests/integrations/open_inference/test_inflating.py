import asyncio
import gzip
import zlib

import pytest
from fastapi import Request
from hypothesis import given, settings
from hypothesis import strategies as st

from integrations.open_inference.routes import STEP_BYTES, read_inflated
from model_store.errors import InvalidInput, TooLarge
from service.errors import Overloaded
from service.request_context import RequestContext
from service.server.budget import ByteBudget, Reservation

ENCODERS = {"gzip": gzip.compress, "deflate": zlib.compress}
fewer_examples = settings(max_examples=60, database=None)


def read(pieces, coding, limit, max_bytes=1 << 30):
    remaining = [*pieces]
    reservation = Reservation(ByteBudget(max_bytes))

    async def receive():
        piece = remaining.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(remaining)}

    headers = [(b"content-encoding", coding.encode())]
    scope = {"type": "http", "headers": headers}
    return asyncio.run(
        read_inflated(RequestContext(reservation, request=Request(scope, receive)), limit)
    ), reservation


def split(content, places):
    """Split content at the places."""
    ends = sorted(place % (len(content) + 1) for place in places)
    return [content[a:b] for a, b in zip([0, *ends], [*ends, len(content)], strict=True)]


bodies = st.one_of(
    st.binary(max_size=300),
    st.sampled_from([n + d for n in (STEP_BYTES, 2 * STEP_BYTES) for d in (-1, 0, 1)]).map(bytes),
    st.binary(min_size=1, max_size=9).map(lambda part: part * 70_000),
)
places = st.lists(st.integers(0, 1 << 20), max_size=5)


@fewer_examples
@given(body=bodies, places=places, coding=st.sampled_from(sorted(ENCODERS)))
def test_compressed_body_is_inflated_from_any_chunks(body, places, coding):
    read_body, reservation = read(split(ENCODERS[coding](body), places), coding, 1 << 20)
    assert read_body == body
    assert reservation.used_bytes == len(body)


@fewer_examples
@given(
    body=bodies, places=places, coding=st.sampled_from(sorted(ENCODERS)), spare=st.integers(-3, 0)
)
def test_limit_applies_to_inflated_size(body, places, coding, spare):
    limit = len(body) + spare
    pieces = split(ENCODERS[coding](body), places)
    if spare == 0:
        assert read(pieces, coding, limit)[0] == body
    elif limit >= 0:
        with pytest.raises(TooLarge):
            read(pieces, coding, limit)


@fewer_examples
@given(places=places, end=st.integers(1, 11), coding=st.sampled_from(sorted(ENCODERS)))
def test_truncated_and_overlong_bodies_are_rejected(places, end, coding):
    full = ENCODERS[coding](b"a body" * 9)
    for invalid in (full[:-end], full + b"x" * end):
        with pytest.raises(InvalidInput, match=f"^body: expected a body compressed with {coding}"):
            read(split(invalid, places), coding, 1 << 20)


def test_bomb_uses_no_more_than_memory_budget():
    bomb = gzip.compress(bytes(64 << 20))
    assert len(bomb) < 100_000
    with pytest.raises(Overloaded):
        read([bomb], "gzip", 1 << 30, max_bytes=4 << 20)
