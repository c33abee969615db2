"""All kinds of requests for some seconds: none fails, and nothing is held when they are over."""

from urllib.parse import urlsplit

from tests.support.faults import reading_log
from tests.support.soak import soak


def soaked(serve, store, rows, seconds):
    """What a service of its own makes of a soak."""
    with serve(store) as (url, process):
        reading_log(process)
        return soak(urlsplit(url).port, process.pid, rows, seconds)


def test_mixed_requests_leave_no_thread_and_no_file_open(serve, digits_store, digits_rows):
    measured = soaked(serve, digits_store, digits_rows, 1.5)
    print(measured)
    assert measured.failures == []
    assert (measured.after.threads, measured.after.open_files) == (
        measured.before.threads,
        measured.before.open_files,
    )
