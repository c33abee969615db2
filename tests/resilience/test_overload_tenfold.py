"""Ten times as many requests as can be answered: each is answered or told when to come again, and
health is."""

import json
from urllib.parse import urlsplit

from tests.support.overload import overload


def assert_only_answered_or_told_to_come_again(measured):
    assert set(measured.loaded.counts) <= {"200", "429"}, measured.loaded.counts
    assert set(measured.unloaded.counts) == {"200"}
    assert set(measured.health_statuses) == {"200"}
    assert set(measured.predicted) <= {"200", "429"}
    assert measured.without_retry_after == 0


def test_under_ten_times_its_capacity_a_service_answers_or_refuses_and_is_live(
    serve, digits_store, digits_rows, tmp_path
):
    body = json.dumps(
        {"inputs": digits_rows[:16].astype(int).tolist(), "num_samples": 100}
    ).encode()
    with serve(digits_store) as (url, _):
        measured = overload(urlsplit(url).port, body, 1.0, tmp_path)
    print(measured)
    assert_only_answered_or_told_to_come_again(measured)
    assert measured.loaded.counts["429"] > 0
