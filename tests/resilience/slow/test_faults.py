"""Faults while clients ask, every answer compared with what it must be; `FAULT_S=N` for other
seconds of each."""

import io
import signal

import numpy as np
import pytest

from tests.support import faults
from tests.support.crowd import reference_answers
from tests.support.record import parameter, record

pytestmark = pytest.mark.slow

SECONDS = parameter("FAULT_S", 20.0)


@pytest.fixture(scope="module")
def requests(digits_store, digits_rows):
    from tests.support.serving import serving

    return reference_answers(serving, digits_store, digits_rows)


@pytest.mark.parametrize(
    ("how", "what"), [(signal.SIGKILL, "kill -9 of a worker"), (signal.SIGSTOP, "a stopped worker")]
)
def test_a_worker_that_is_hit_under_load_is_replaced(serve, digits_store, requests, how, what):
    recovered, figure = faults.signalled_worker(serve, digits_store, requests, SECONDS, how)
    record(what, figure)
    assert recovered < 3 * faults.RECOVERY_S


def test_a_full_disk_while_versions_are_published(serve, digits_store, digits_rows, tmp_path):
    figure = faults.full_disk(serve, digits_store, digits_rows, tmp_path)
    record("full disk", figure)


def test_clients_that_hang_up(serve, digits_store, requests):
    record(
        "30 % of clients hang up",
        faults.hang_ups(serve, digits_store, requests, SECONDS),
    )


def test_slow_clients(serve, digits_store, digits_rows, requests):
    record(
        "slow clients",
        faults.slow_clients(serve, digits_store, requests, digits_rows, SECONDS),
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_drain_loses_nothing_accepted(serve, digits_store, requests, workers):
    file = io.BytesIO()
    np.save(
        file,
        np.random.default_rng(0).integers(0, 17, (30_000, 64), dtype=np.uint8),
        allow_pickle=False,
    )
    figure = faults.terminated(serve, digits_store, requests, file.getvalue(), workers)
    record(f"SIGTERM under load, {workers} workers", figure)
