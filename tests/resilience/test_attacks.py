import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support.attacks import attacking, bomb_statuses
from tests.support.environment import ROOT
from tests.support.memory_groups import memory_group
from tests.support.process import children
from tests.support.raw import Connection, Ended, request

GOOD = request(
    "POST",
    "/predict",
    b'{"model": "digits", "inputs": [[' + b",".join([b"8"] * 64) + b']], "seed": 7}',
)
LIVE = request("GET", "/health/live")
MOST_BYTES = 2 << 30


@pytest.fixture(scope="module")
def attacked_store(digits_store, tmp_path_factory):
    from model_store.artifacts.store import ModelStore
    from tests.support.models import publish_wide

    folder = tmp_path_factory.mktemp("attacked") / "models"
    shutil.copytree(digits_store, folder)
    publish_wide(ModelStore(folder))
    return folder


def resident_bytes(pid):
    total = 0
    for each in (pid, *children(pid)):
        try:
            status = Path(f"/proc/{each}/status").read_text()
        except OSError:
            continue
        total += sum(
            1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")
        )
    return total


def withstand(serve, store, seconds, workers):
    largest, statuses, health, wrong, latencies = 0, Counter(), Counter(), [], []
    settings = {"DUBITO_WORKERS": str(workers), "DUBITO_DEFAULT_MODEL": "digits"}
    with (
        memory_group(MOST_BYTES) as group,
        serve(store, within=group.joins if group else (), **settings) as (url, process),
    ):
        port = int(url.rpartition(":")[2])
        with Connection(port) as connection:
            expected = connection.ask(GOOD).body
        ending = threading.Event()

        def ask():
            while not ending.is_set():
                try:
                    with Connection(port, timeout_s=60.0) as connection:
                        while not ending.wait(0.1):
                            started_at = time.monotonic()
                            answer = connection.ask(GOOD)
                            latencies.append(time.monotonic() - started_at)
                            statuses[answer.status] += 1
                            if answer.status == 200 and answer.body != expected:
                                wrong.append(answer.body)
                            health[connection.ask(LIVE).status] += 1
                except (Ended, OSError) as error:
                    statuses[type(error).__name__] += 1

        before = children(process.pid)
        command = [sys.executable, "-m", "tests.support.probe", str(port), str(seconds)]
        honest = [threading.Thread(target=ask) for _ in range(3)]
        with (
            attacking(port),
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as probe,
        ):
            for thread in honest:
                thread.start()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                largest = max(largest, resident_bytes(process.pid))
                assert process.poll() is None
                assert largest < MOST_BYTES
                time.sleep(0.1)
            ending.set()
            for thread in honest:
                thread.join()
            waits = np.sort(json.loads(probe.communicate()[0])["latencies_s"])
        assert process.poll() is None
        killed = before - children(process.pid)
        assert group is None or group.kills == 0
    latencies.sort()
    print(
        f"{workers} workers, {seconds} s: at most {largest >> 20} MiB; honest {dict(statuses)}, "
        f"{dict(health)} live,"
        f" median {latencies[len(latencies) // 2]:.3f} s, most {latencies[-1]:.3f} s; "
        f"health median {np.median(waits):.3f} s, 99 % {np.quantile(waits, 0.99):.3f} s, most "
        f"{waits[-1]:.3f} s; {len(killed)} workers replaced; bombs {dict(bomb_statuses)}",
        file=sys.stderr,
    )
    assert wrong == []
    assert statuses[200] > 0
    assert bomb_statuses.keys() <= {200, 413, 422, 429, 503, 504, 507}
    return largest, statuses, health, killed


@pytest.mark.slow
def test_all_attacks_together_for_ten_seconds(serve, attacked_store):
    _, _, health, _ = withstand(serve, attacked_store, 10, 1)
    assert set(health) == {200}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_all_attacks_together_for_ten_minutes(serve, attacked_store, workers):
    _, _, health, _ = withstand(
        serve, attacked_store, float(os.environ.get("ATTACK_SECONDS", "600")), workers
    )
    assert set(health) == {200}
