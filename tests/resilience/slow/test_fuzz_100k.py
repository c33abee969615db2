"""A hundred thousand bad requests over every route (a few minutes); `REQUESTS=N` for another
number, `SEED=N`."""

import time

import pytest

from tests.resilience.test_fuzz_bytes import fuzz_service, store_to_fuzz
from tests.support.record import parameter, record

pytestmark = pytest.mark.slow


def test_a_hundred_thousand_bad_requests(serve, digits_store, tmp_path):
    begun = time.monotonic()
    count = parameter("REQUESTS", 100_000)
    first, outcome, growth = fuzz_service(
        serve, store_to_fuzz(digits_store, tmp_path), count, parameter("SEED", 0)
    )
    print(first, outcome, sep="\n")
    sent, parsed = first.sent + outcome.sent, first.past_parsing + outcome.past_parsing
    statuses = first.statuses + outcome.statuses
    counts = ", ".join(f"{status}: {number}" for status, number in sorted(statuses.items()))
    record(
        "generated bad requests",
        "pytest -s tests/resilience/slow/test_fuzz_100k.py",
        "1 worker, 4 clients",
        f"{sent:,} sent, {parsed:,} past parsing ({100 * parsed / sent:.0f} %); {counts}; no "
        "other 5xx, no hang, "
        f"slowest {max(first.slowest_s, outcome.slowest_s):.1f} s; {first.good + outcome.good:,} "
        "good requests "
        f"between them right; memory {growth / 2**20:+.0f} MB over the last nine tenths; "
        f"{time.monotonic() - begun:.0f} s",
    )
    assert parsed >= sent / 3
