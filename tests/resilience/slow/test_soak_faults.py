"""An hour of requests with a fault every minute; `SOAK_S=N` for other seconds, `FAULT_EVERY_S=N`
for other pauses."""

import os
import shutil
import signal
import time
from contextlib import suppress
from itertools import cycle
from urllib.parse import urlsplit

import httpx
import pytest

from model_store.artifacts.store import ModelStore
from model_store.errors import DubitoError
from tests.support.attacks import (
    attacking,
    empty_parts,
    large_pool,
    pipeline_unread,
    unfinished_body,
)
from tests.support.crowd import Crowd, reference_answers
from tests.support.faults import ADMIN_KEY, assert_right, corrupted, reading_log, starts
from tests.support.process import children, open_files, own_bytes, settled, threads
from tests.support.record import parameter, record
from tests.support.serving import wait_until
from tests.support.stores import publish_again

pytestmark = pytest.mark.slow

LARGEST_GROWTH = 1.05
ATTACK_S = 10.0
WARM_UP_ROUNDS = 3
AT_ONCE = {"DUBITO_WORKERS": "2", "DUBITO_POLL_INTERVAL_S": "0.2", "DUBITO_ADMIN_KEY": ADMIN_KEY}


class Faults:
    def __init__(self, url, process, store, source):
        self.url, self.process, self.store, self.source = url, process, store, source
        self.port = urlsplit(url).port

    def kill(self):
        """Kill the younger worker."""
        self._hit(signal.SIGKILL)

    def stop(self):
        self._hit(signal.SIGSTOP)

    def publish(self):
        version = publish_again(self.store, self.source)
        self.store.set_alias("digits", "latest", version)
        self._look()
        self.store.set_alias("digits", "latest", "1")
        self._look()

    def damage(self):
        """Publish a version that breaks on its way."""
        version = publish_again(self.store, self.source)
        corrupted(self.store.root / "digits" / version / "network.onnx")
        with suppress(DubitoError):
            self.store.set_alias("digits", "latest", version)
        self._look()
        self.store.set_alias("digits", "latest", "1")
        self._look()

    def attack(self):
        """Attack for some seconds."""
        with attacking(
            self.port, {pipeline_unread: 4, unfinished_body: 4, empty_parts: 2, large_pool: 4}
        ):
            time.sleep(ATTACK_S)

    def _hit(self, how):
        before, pids = starts(self.url), children(self.process.pid)
        os.kill(max(pids), how)
        wait_until(
            lambda: (
                max(pids) not in children(self.process.pid) and len(children(self.process.pid)) == 2
            ),
            60,
        )
        wait_until(lambda: all(starts(self.url)) and starts(self.url) != before, 60)

    def _look(self):
        request = httpx.post(
            f"{self.url}/admin/refresh", headers={"X-API-Key": ADMIN_KEY}, timeout=60
        )
        assert request.status_code == 200


def measure_process(pid):
    """Memory, threads and open files of a process at rest."""
    files = settled(lambda: open_files(pid), 60)
    time.sleep(3.0)
    return own_bytes(pid), threads(pid), files


def test_an_hour_with_a_fault_every_minute_changes_no_answer(
    serve, digits_store, digits_rows, tmp_path
):
    seconds, pause = parameter("SOAK_S", 3600.0), parameter("FAULT_EVERY_S", 60.0)
    created = reference_answers(serve, digits_store, digits_rows)
    for reference in created:
        reference.content["version"] = "1"
    source = shutil.copytree(digits_store, tmp_path / "source")
    shutil.copytree(digits_store, tmp_path / "models")
    with serve(tmp_path / "models", **AT_ONCE) as (url, process):
        reading_log(process)
        wait_until(lambda: all(starts(url)), 60)
        elder = min(children(process.pid))
        faults = Faults(url, process, ModelStore(tmp_path / "models"), source)
        kinds = (faults.kill, faults.publish, faults.attack, faults.stop, faults.damage)
        with Crowd(faults.port, created, clients=4, hang_up=0.05) as crowd:
            for fault in kinds * WARM_UP_ROUNDS:
                fault()
            time.sleep(pause)
        warm_up = crowd.totals()
        before = measure_process(elder)
        completed, end = 0, time.monotonic() + seconds
        with Crowd(faults.port, created, clients=4, hang_up=0.05) as crowd:
            for fault in cycle(kinds):
                if time.monotonic() > end:
                    break
                due = time.monotonic() + pause
                fault()
                completed += 1
                reached = crowd.right
                wait_until(lambda reached=reached: crowd.right > reached + 20, 60)
                time.sleep(max(0.0, due - time.monotonic()))
        output, after = crowd.totals(), measure_process(elder)
        assert warm_up.wrong == []
        text = assert_right(output, faults.port, may_end=4 * completed)
        assert elder in children(process.pid)
    growth = after[0] / before[0]
    record(
        "soak with faults",
        f"{completed} faults: {text}; {output.ended} connections ended; of the worker that was never hit "
        "memory "
        f"{before[0] / 2**20:.0f} and {after[0] / 2**20:.0f} MB ({100 * (growth - 1):+.1f} %), "
        f"threads {before[1]} "
        f"and {after[1]}, open files {before[2]} and {after[2]}",
    )
    assert growth < LARGEST_GROWTH
    assert after[1:] == before[1:]
