"""The budget of bytes: never more than there is, and something is left for whoever comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import Overloaded, TooLarge
from service.process.budget import SMALL_BYTES, TIMES_LEFT, ByteBudget, Lease

MOST = 64 << 20


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(SMALL_BYTES + 1, MOST)), max_size=60))
def test_no_client_takes_all_and_all_is_given_back(asked):
    budget, leases, held = ByteBudget(MOST), [], {}
    for client, size in asked:
        lease = Lease(budget, client)
        leases.append(lease)
        try:
            lease.acquire(size)
        except Overloaded:
            assert size > budget.most - budget.held or held.get(client, 0) + size > TIMES_LEFT * (
                budget.most - budget.held - size
            )
            continue
        held[client] = held.get(client, 0) + size
        assert budget.held == sum(held.values()) <= MOST
        left = MOST - budget.held
        assert held[client] <= TIMES_LEFT * left
        newcomer = Lease(budget, "newcomer")
        newcomer.acquire(left * TIMES_LEFT // (TIMES_LEFT + 1))
        newcomer.release()
    for lease in leases:
        lease.release()
    assert budget.held == 0


def test_small_requests_fit_where_their_client_has_its_share_already():
    budget = ByteBudget(MOST)
    large = Lease(budget, "a")
    large.acquire(large.most)
    with pytest.raises(Overloaded):
        Lease(budget, "a").acquire(SMALL_BYTES + 1)
    small = Lease(budget, "a")
    small.acquire(SMALL_BYTES)
    with pytest.raises(Overloaded):
        small.acquire(1)  # is small no more


def test_what_never_fits_is_too_large():
    lease = Lease(ByteBudget(MOST), "a")
    with pytest.raises(TooLarge, match="pool: expected at most 50331648 bytes in memory, got about 50331649"):
        lease.reserve(lease.most + 1, "pool")
    lease.reserve(lease.most, "pool")
    with pytest.raises(TooLarge):
        lease.reserve(1, "pool")
