import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from model_store.artifacts.manifest import ImageSpec, InputSpec, TextSpec
from model_store.errors import TooLarge
from model_store.sources.rows import RowReader
from model_store.sources.text import TextEncoder
from service.errors import Overloaded
from service.request_context import RequestContext
from service.server.budget import MAX_SHARE, SMALL_BYTES, ByteBudget, Reservation
from tests.support.texts import tokenizer

MAX_BYTES = 64 << 20


def context(max_bytes):
    return RequestContext(Reservation(ByteBudget(max_bytes)))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(SMALL_BYTES + 1, MAX_BYTES)), max_size=60))
def test_no_client_exhausts_the_budget_and_all_bytes_are_released(requests):
    budget, reservations, used_bytes = ByteBudget(MAX_BYTES), [], {}
    for client, size in requests:
        reservation = Reservation(budget, client)
        reservations.append(reservation)
        try:
            reservation.acquire(size)
        except Overloaded:
            assert size > budget.max_bytes - budget.used_bytes or used_bytes.get(
                client, 0
            ) + size > MAX_SHARE * (budget.max_bytes - budget.used_bytes - size)
            continue
        used_bytes[client] = used_bytes.get(client, 0) + size
        assert budget.used_bytes == sum(used_bytes.values()) <= MAX_BYTES
        free_bytes = MAX_BYTES - budget.used_bytes
        assert used_bytes[client] <= MAX_SHARE * free_bytes
        newcomer = Reservation(budget, "newcomer")
        newcomer.acquire(free_bytes * MAX_SHARE // (MAX_SHARE + 1))
        newcomer.release()
    for reservation in reservations:
        reservation.release()
    assert budget.used_bytes == 0


def test_small_requests_fit_even_if_their_client_has_used_its_share():
    budget = ByteBudget(MAX_BYTES)
    large = Reservation(budget, "a")
    large.acquire(large.max_bytes)
    with pytest.raises(Overloaded):
        Reservation(budget, "a").acquire(SMALL_BYTES + 1)
    small = Reservation(budget, "a")
    small.acquire(SMALL_BYTES)
    with pytest.raises(Overloaded):
        small.acquire(1)  # no longer small


def test_reservation_that_can_never_fit_is_too_large():
    reservation = Reservation(ByteBudget(MAX_BYTES), "a")
    with pytest.raises(
        TooLarge, match="pool: expected at most 50331648 bytes in memory, got about 50331649"
    ):
        reservation.reserve(reservation.max_bytes + 1, "pool")
    reservation.reserve(reservation.max_bytes, "pool")
    with pytest.raises(TooLarge):
        reservation.reserve(1, "pool")


def test_held_bytes_are_released_once_even_if_the_request_ends_first():
    budget = ByteBudget(MAX_BYTES)
    reservation = Reservation(budget, "a")
    reservation.acquire(1000)
    with reservation.hold(MAX_BYTES // 2, "inputs"):
        assert budget.used_bytes == 1000 + MAX_BYTES // 2
        with pytest.raises(Overloaded), Reservation(budget, "b").hold(MAX_BYTES // 2, "inputs"):
            pass
        reservation.release()  # the request ends
        assert budget.used_bytes == MAX_BYTES // 2
    assert budget.used_bytes == reservation.used_bytes == 0
    with (
        pytest.raises(TooLarge, match=r"inputs: expected at most"),
        reservation.hold(MAX_BYTES, "inputs"),
    ):
        pass
    assert budget.used_bytes == 0


def test_image_memory_is_reserved_before_decoding():
    file = io.BytesIO()
    Image.new("L", (1000, 1000)).save(file, "PNG")
    spec = InputSpec(shape=(4, 4), minimum=0, maximum=255, image=ImageSpec(mode="L", resize=True))
    rows = [file.getvalue()] * 3
    assert RowReader(spec, "inputs", context(20 << 20)).read_all(rows).shape == (3, 16)
    with pytest.raises(TooLarge, match=r"inputs\.0: expected at most .* bytes in memory"):
        RowReader(spec, "inputs", context(10 << 20)).read_all(rows)


def test_limits_apply_to_an_image_after_proportional_resizing():
    file = io.BytesIO()
    Image.new("L", (2, 200)).save(file, "PNG")  # resized to 100 x 10000 pixels
    image = ImageSpec(mode="L", resize=True, fit="crop", shorter=100)
    spec, rows = InputSpec(shape=(4, 4), minimum=0, maximum=255, image=image), [file.getvalue()] * 2
    reservation = Reservation(ByteBudget(20 << 20))
    limited = RequestContext(reservation, max_pixels=2_040_800)
    assert RowReader(spec, "inputs", limited).read_all(rows).shape == (2, 16)
    limited = RequestContext(reservation, max_pixels=2_040_799)
    with pytest.raises(
        TooLarge, match=r"inputs: expected images of at most 2040799 pixels in total"
    ):
        RowReader(spec, "inputs", limited).read_all(rows)
    with pytest.raises(TooLarge, match=r"inputs\.0: expected at most .* bytes in memory"):
        RowReader(spec, "inputs", context(9 << 20)).read_all(rows)


def test_text_memory_is_reserved_before_tokenizing():
    text = TextSpec(column="text", max_tokens=8, pad_id=0)
    spec = InputSpec(shape=(8,), dtype="int32", minimum=0, maximum=99, text=text)
    encoder = TextEncoder(tokenizer().to_str().encode(), text)
    rows = [{"text": "good " * 6_000}] * 2
    assert RowReader(spec, "inputs", context(30 << 20), encoder).read_all(rows).shape == (2, 8)
    with pytest.raises(TooLarge, match=r"inputs\.0\.text: expected at most .* bytes in memory"):
        RowReader(spec, "inputs", context(19 << 20), encoder).read_all(rows)
