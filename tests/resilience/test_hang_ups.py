"""Clients that hang up at random moments: the others' answers are right, and nothing is left
behind."""

from urllib.parse import urlsplit

import pytest

from tests.support.crowd import references
from tests.support.faults import hang_ups


def reference_answers(serve, store, rows):
    """Requests and their answers by a service at rest."""
    with serve(store) as (url, _):
        return references(urlsplit(url).port, rows)


@pytest.mark.slow
def test_clients_that_hang_up_at_random_moments_cost_no_other_its_answer(
    serve, digits_store, digits_rows
):
    print(
        hang_ups(
            serve, digits_store, reference_answers(serve, digits_store, digits_rows), seconds=2.0
        )
    )
