"""Minutes of ten times the load that can be answered, on a model of MNIST's size; `OVERLOAD_S=N`
for other seconds.

The targets are a goodput of at least 0.9 of the capacity, a 99th percentile of accepted requests of
at most twice that without load, and health under 0.1 s. The load comes from the same processors as
the answers, so that the margins asserted here are wider: they catch a service that collapses, and
the page of results has the figures.
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


def test_minutes_of_tenfold_overload(serve, tmp_path):
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
