from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from service.request_context import RECORD_KEY, RequestContext, RequestRecord
from service.server.shares import KEY_NAME, Shares, address_client

LARGEST = 100
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, LARGEST), st.integers(0, 3)), max_size=60
)


def taken_one_by_one(shares):
    order = []
    while shares:
        piece = shares.turns()[0]
        shares.take([piece])
        order.append(piece)
    return order


@given(ARRIVALS)
def test_nothing_is_lost_and_equals_of_a_client_keep_their_order(arrivals):
    """Some come while others are taken; of a client none goes before one that came earlier and is
    not larger."""
    shares, order = Shares(), []
    for number, (client, cost, turns) in enumerate(arrivals):
        shares.put(number, client, cost)
        for _ in range(min(turns, len(shares))):
            piece = shares.turns()[0]
            shares.take([piece])
            order.append(piece)
    order += taken_one_by_one(shares)
    assert sorted(piece.work for piece in order) == list(range(len(arrivals)))
    for i, later in enumerate(order):
        for earlier in order[:i]:
            if earlier.client == later.client and earlier.work > later.work:
                assert earlier.cost < later.cost


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, LARGEST)), max_size=80),
    st.integers(0, 40),
    st.data(),
)
def test_who_comes_waits_for_no_more_of_each_other_client_than_it_brings(waiting, taken, data):
    """Client 0 comes while others wait, were done for before, and have ever more."""
    shares = Shares()
    for number, (client, cost) in enumerate(waiting):
        shares.put(number, client, cost)
    for _ in range(min(taken, len(shares))):
        shares.take(shares.turns()[:1])
    cost = data.draw(st.integers(1, LARGEST))
    shares.put("mine", 0, cost)
    completed = {}
    while True:
        piece = shares.turns()[0]
        shares.take([piece])
        if piece.work == "mine":
            break
        completed[piece.client] = completed.get(piece.client, 0) + piece.cost
        shares.put(None, piece.client, data.draw(st.integers(1, LARGEST)))
    assert all(work <= cost for work in completed.values())


@given(st.integers(1, 40), st.integers(1, 10))
def test_a_small_request_does_not_wait_for_large_ones_of_its_own_client(large, begun):
    shares = Shares()
    for number in range(large):
        shares.put(number, "all", LARGEST)
    for _ in range(begun):
        (piece,) = shares.turns()[:1]
        shares.take([piece])
        shares.put(piece.work, "all", LARGEST)
    shares.put("small", "all", 1)
    order = [piece.work for piece in taken_one_by_one(shares)]
    assert order.index("small") <= 1


def test_small_requests_without_end_do_not_stop_a_large_one():
    shares = Shares()
    shares.put("large", "all", LARGEST)
    shares.put("small", "all", 1)
    for _ in range(3 * LARGEST):
        shares.put("small", "all", 1)
        (piece,) = shares.turns()[:1]
        shares.take([piece])
        if piece.work == "large":
            break
    assert piece.work == "large"


def test_clients_are_done_for_equally_whatever_they_bring():
    shares, completed = Shares(), {"many": 0, "one": 0}
    for _ in range(40):
        shares.put(None, "many", 3)
    shares.put(None, "one", 50)
    for _ in range(2000):
        (piece,) = shares.turns()[:1]
        shares.take([piece])
        completed[piece.client] += piece.cost
        shares.put(None, piece.client, piece.cost)
        assert abs(completed["many"] - completed["one"]) <= 50 + 3


def test_a_client_is_its_valid_key_else_its_address_and_of_ipv6_its_network():
    peer = ("192.0.2.1", 1234)

    def open_client(client, **key):
        record = RequestRecord("", "", 0.0)
        scope = {"type": "http", "headers": [], "client": client, RECORD_KEY: record, **key}
        return RequestContext.from_request(Request(scope), 1.0).client

    def client_with(key, client=peer):
        return open_client(client, **{KEY_NAME: key})

    assert client_with("a") != client_with("b")
    assert client_with("a") == client_with("a", ("192.0.2.2", 1))
    assert open_client(peer) == open_client(("192.0.2.1", 99)) != open_client(("192.0.2.2", 1234))
    assert address_client(("2001:db8::1", 1)) == address_client(("2001:db8::ffff:2", 1))
    assert address_client(("2001:db8::1", 1)) != address_client(("2001:db8:0:1::1", 1))
    assert address_client(("::ffff:192.0.2.1", 1)) == address_client(peer)
    assert address_client(None) != address_client(None)
