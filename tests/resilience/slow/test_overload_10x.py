"""Load a model of MNIST's size with ten times its capacity for minutes (`OVERLOAD_S=N` seconds).

The targets are a goodput of at least 0.9 of the capacity, a 99th percentile of accepted requests up
to twice the value without load, and health checks under 0.1 s. The load generator shares the
processors with the service, so the margins asserted here are wider. They only detect a collapse.
The results page has the figures.
"""

import json
from urllib.parse import urlsplit

import numpy as np
import pytest

from benchmarks.common import publish_untrained
from model_store.artifacts.store import ModelStore
from tests.support.overload import overload
from tests.support.record import parameter, record

pytestmark = pytest.mark.slow


def test_service_survives_minutes_of_tenfold_overload(serve, tmp_path):
    store, seconds = ModelStore(tmp_path / "models"), parameter("OVERLOAD_S", 120.0)
    publish_untrained(store)
    rows = np.random.default_rng(0).integers(0, 256, (16, 784))
    body = json.dumps({"inputs": rows.tolist(), "num_samples": 100}).encode()
    with serve(store.root) as (url, _):
        measured = overload(urlsplit(url).port, body, seconds, tmp_path)
    record(
        "overload 10x",
        str(measured),
    )
    assert set(measured.loaded.counts) <= {"200", "429"}, measured.loaded.counts
    assert set(measured.unloaded.counts) == {"200"}
    assert set(measured.health_statuses) == {"200"}
    assert set(measured.predicted) <= {"200", "429"}
    assert measured.without_retry_after == 0
    assert measured.goodput > 0.5
    assert measured.slowdown < 10
    assert np.quantile(measured.health_s, 0.99) < 0.5
