"""All kinds of requests for ten minutes; `SOAK_S=N` for other seconds."""

from urllib.parse import urlsplit

import pytest

from tests.support.faults import reading_log
from tests.support.record import parameter, record
from tests.support.soak import soak

pytestmark = pytest.mark.slow

LARGEST_GROWTH = 1.1


def test_a_soak_leaves_memory_threads_and_open_files_as_they_were(serve, digits_store, digits_rows):
    seconds = parameter("SOAK_S", 600.0)
    with serve(digits_store) as (url, process):
        reading_log(process)
        measured = soak(urlsplit(url).port, process.pid, digits_rows, seconds)
    record(
        "soak",
        "pytest -s tests/resilience/slow/test_soak.py",
        f"1 worker, 4 clients, {seconds:.0f} s",
        str(measured),
    )
    assert measured.failures == []
    assert measured.growth < LARGEST_GROWTH
    assert (measured.after.threads, measured.after.open_files) == (
        measured.before.threads,
        measured.before.open_files,
    )
