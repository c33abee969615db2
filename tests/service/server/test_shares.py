from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from service.request_context import RECORD_KEY, RequestContext, RequestRecord
from service.server.shares import KEY_NAME, Shares, address_client

LARGEST = 100
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, LARGEST), st.integers(0, 3)), max_size=60
)


def take_all(shares):
    order = []
    while shares:
        piece = shares.turns()[0]
        shares.take([piece])
        order.append(piece)
    return order


@given(ARRIVALS)
def test_all_work_is_taken_and_equal_costs_keep_their_order(arrivals):
    """Within a client, work overtakes only earlier work that costs more."""
    shares, order = Shares(), []
    for number, (client, cost, turns) in enumerate(arrivals):
        shares.put(number, client, cost)
        for _ in range(min(turns, len(shares))):
            piece = shares.turns()[0]
            shares.take([piece])
            order.append(piece)
    order += take_all(shares)
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
def test_wait_for_each_other_client_is_bounded_by_own_cost(waiting, turns, data):
    """Client 0 arrives while the others wait, have had turns and keep adding work."""
    shares = Shares()
    for number, (client, cost) in enumerate(waiting):
        shares.put(number, client, cost)
    for _ in range(min(turns, len(shares))):
        shares.take(shares.turns()[:1])
    cost = data.draw(st.integers(1, LARGEST))
    shares.put("mine", 0, cost)
    costs = {}
    while True:
        piece = shares.turns()[0]
        shares.take([piece])
        if piece.work == "mine":
            break
        costs[piece.client] = costs.get(piece.client, 0) + piece.cost
        shares.put(None, piece.client, data.draw(st.integers(1, LARGEST)))
    assert all(total <= cost for total in costs.values())


@given(st.integers(1, 40), st.integers(1, 10))
def test_small_request_overtakes_large_requests_of_its_client(large, turns):
    shares = Shares()
    for number in range(large):
        shares.put(number, "all", LARGEST)
    for _ in range(turns):
        (piece,) = shares.turns()[:1]
        shares.take([piece])
        shares.put(piece.work, "all", LARGEST)
    shares.put("small", "all", 1)
    order = [piece.work for piece in take_all(shares)]
    assert order.index("small") <= 1


def test_endless_small_requests_do_not_starve_a_large_request():
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


def test_clients_get_equal_shares_whatever_their_request_sizes():
    shares, costs = Shares(), {"many": 0, "one": 0}
    for _ in range(40):
        shares.put(None, "many", 3)
    shares.put(None, "one", 50)
    for _ in range(2000):
        (piece,) = shares.turns()[:1]
        shares.take([piece])
        costs[piece.client] += piece.cost
        shares.put(None, piece.client, piece.cost)
        assert abs(costs["many"] - costs["one"]) <= 50 + 3


def test_client_is_identified_by_key_address_or_ipv6_network():
    peer = ("192.0.2.1", 1234)

    def client_for(client, **key):
        record = RequestRecord("", "", 0.0)
        scope = {"type": "http", "headers": [], "client": client, RECORD_KEY: record, **key}
        return RequestContext.from_request(Request(scope), 1.0).client

    def client_with_key(key, client=peer):
        return client_for(client, **{KEY_NAME: key})

    assert client_with_key("a") != client_with_key("b")
    assert client_with_key("a") == client_with_key("a", ("192.0.2.2", 1))
    assert client_for(peer) == client_for(("192.0.2.1", 99)) != client_for(("192.0.2.2", 1234))
    assert address_client(("2001:db8::1", 1)) == address_client(("2001:db8::ffff:2", 1))
    assert address_client(("2001:db8::1", 1)) != address_client(("2001:db8:0:1::1", 1))
    assert address_client(("::ffff:192.0.2.1", 1)) == address_client(peer)
    assert address_client(None) != address_client(None)
