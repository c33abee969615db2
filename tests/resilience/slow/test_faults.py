"""Inject faults under load and check every response (`FAULT_S=N` seconds for each fault)."""

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
    ("signum", "fault"),
    [(signal.SIGKILL, "kill -9 of a worker"), (signal.SIGSTOP, "a stopped worker")],
)
def test_killed_or_stopped_worker_is_replaced_under_load(
    serve, digits_store, requests, signum, fault
):
    recovery_s, figure = faults.signal_workers(serve, digits_store, requests, SECONDS, signum)
    record(fault, figure)
    assert recovery_s < 3 * faults.RECOVERY_S


def test_full_disk_during_publication(serve, digits_store, digits_rows, tmp_path):
    figure = faults.publish_on_full_disk(serve, digits_store, digits_rows, tmp_path)
    record("full disk", figure)


def test_clients_that_disconnect(serve, digits_store, requests):
    record(
        "30 % of clients hang up",
        faults.disconnect_clients(serve, digits_store, requests, SECONDS),
    )


def test_slow_clients(serve, digits_store, digits_rows, requests):
    record(
        "slow clients",
        faults.run_slow_clients(serve, digits_store, requests, digits_rows, SECONDS),
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_drain_completes_all_accepted_requests(serve, digits_store, requests, workers):
    file = io.BytesIO()
    np.save(
        file,
        np.random.default_rng(0).integers(0, 17, (30_000, 64), dtype=np.uint8),
        allow_pickle=False,
    )
    figure = faults.terminate_service(serve, digits_store, requests, file.getvalue(), workers)
    record(f"SIGTERM under load, {workers} workers", figure)
