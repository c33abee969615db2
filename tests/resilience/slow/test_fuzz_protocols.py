"""Twenty thousand bad requests of the Open Inference Protocol and of MLflow's; `REQUESTS=N`,
`SEED=N` for others."""

import time

import pytest

from tests.resilience.test_fuzz_bytes import fuzz_service
from tests.support.bad_inference import BadInference
from tests.support.record import parameter, record

pytestmark = pytest.mark.slow


def test_twenty_thousand_bad_requests_of_other_protocols(serve, kinds):
    begun = time.monotonic()
    first, outcome, growth = fuzz_service(
        serve, kinds, parameter("REQUESTS", 20_000), parameter("SEED", 0), BadInference
    )
    sent, parsed = first.sent + outcome.sent, first.past_parsing + outcome.past_parsing
    statuses = first.statuses + outcome.statuses
    counts = ", ".join(f"{status}: {number}" for status, number in sorted(statuses.items()))
    record(
        "generated bad requests to /v2 and /invocations",
        "pytest -s tests/resilience/slow/test_fuzz_protocols.py",
        "1 worker, 4 clients",
        f"{sent:,} sent, {parsed:,} past parsing ({100 * parsed / sent:.0f} %); {counts}; no "
        "other 5xx, no hang, "
        f"slowest {max(first.slowest_s, outcome.slowest_s):.1f} s; {first.good + outcome.good:,} "
        "good requests "
        f"between them right; memory {growth / 2**20:+.0f} MB over the last nine tenths; "
        f"{time.monotonic() - begun:.0f} s",
    )
    assert parsed >= sent / 3
