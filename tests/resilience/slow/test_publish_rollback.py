"""A thousand publications and roll-backs under load (ten minutes or so); `CYCLES=N` for another
number."""

import os
import time

import pytest

from tests.service.models.test_publish_rollback import cycle

pytestmark = pytest.mark.slow


def test_publications_and_roll_backs_under_load(digits_store, tmp_path):
    cycles = int(os.environ.get("CYCLES", "1000"))
    begun = time.monotonic()
    outcome = cycle(digits_store, tmp_path, cycles)
    print(f"{cycles} cycles in {time.monotonic() - begun:.0f} s: {outcome}")
    assert outcome.wrong == []
