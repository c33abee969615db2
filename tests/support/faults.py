"""Inject faults while clients send requests. Each function returns its observations."""

import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from urllib.parse import urlsplit

import httpx

from model_store.artifacts.store import ModelStore
from tests.support.crowd import Crowd, references, replayed
from tests.support.environment import ROOT
from tests.support.process import children, open_files, settled
from tests.support.raw import Connection, Ended, request
from tests.support.serving import metric, wait_until

TWO = {"DUBITO_WORKERS": "2", "DUBITO_POLL_INTERVAL_S": "0.1"}
SOON = {"DUBITO_POLL_INTERVAL_S": "0.05"}
RECOVERY_S = 5.0


def reading_log(process):
    def read():
        with suppress(OSError, ValueError):
            while os.read(process.stderr.fileno(), 1 << 16):
                pass

    threading.Thread(target=read, daemon=True).start()


def assert_right(told, port, may_end=0):
    assert told.wrong == [], told.wrong[:5]
    assert set(told.statuses) <= {200}, told.statuses
    assert told.ended <= may_end, told.ended
    return f"{told.right:,} seeded answers right, {replayed(port, told)} others replayed by their seeds, none wrong"


def starts(url):
    page = httpx.get(f"{url}/metrics", timeout=60).text
    return [metric(page, "process_start_time_seconds", worker=worker) for worker in "01"]


def hit_worker(url, process, crowd, how):
    """Send a signal to a worker. Return the times of the next response and of the new worker."""
    before, pids = starts(url), children(process.pid)
    start = time.monotonic()
    os.kill(min(pids), how)
    wait_until(
        lambda: children(process.pid).isdisjoint({min(pids)}) and len(children(process.pid)) == 2
    )
    noticed = time.monotonic() - start
    wait_until(lambda: all(new > 0 for new in starts(url)) and starts(url) != before)
    recovered = time.monotonic() - start
    right_at = crowd.totals().right_at
    gaps = [later - earlier for earlier, later in pairwise(right_at) if later > start]
    return noticed, recovered, max(gaps)


def signalled_worker(serve, store, made, seconds, how):
    """Kill or stop workers under load every few seconds. Return figures."""
    observed, ended = [], 0
    with serve(store, **TWO) as (url, process):
        reading_log(process)
        port = urlsplit(url).port
        wait_until(lambda: all(starts(url)))
        end = time.monotonic() + seconds
        while not observed or time.monotonic() < end:
            with Crowd(port, made, clients=6) as crowd:
                wait_until(lambda crowd=crowd: crowd.right > 20)
                observed.append(hit_worker(url, process, crowd, how))
                reached = crowd.right
                wait_until(lambda crowd=crowd, reached=reached: crowd.right > reached + 20)
            output = crowd.totals()
            text = assert_right(output, port, may_end=6)
            ended += output.ended
    noticed, recovered, gap = (max(values) for values in zip(*observed, strict=True))
    return recovered, (
        f"{len(observed)} times: {ended} connections ended, {text} in the last; noticed in "
        f"{noticed:.1f} s, a new worker "
        f"serves after {recovered:.1f} s at most, no answer for {gap:.2f} s at most"
    )


def hang_ups(serve, store, made, seconds, clients=8):
    with serve(store) as (url, process):
        reading_log(process)
        port = urlsplit(url).port
        files = settled(lambda: open_files(process.pid))
        with Crowd(port, made, clients, hang_up=0.3) as crowd:
            time.sleep(seconds)
        output = crowd.totals()
        text = assert_right(output, port)
        assert output.hung_up > 0
        page = httpx.get(f"{url}/metrics", timeout=60).text
        wait_until(
            lambda: (
                metric(httpx.get(f"{url}/metrics", timeout=60).text, "dubito_queued_requests") == 0
            )
        )
        assert metric(page, "dubito_failures_total", route="/predict", reason="unexpected") == 0
        assert settled(lambda: open_files(process.pid)) == files
    return f"{output.hung_up:,} hung up; {text}; nothing stays queued, as many files open as before"


def slow_clients(serve, store, made, rows, seconds, many=40, receive_s=2):
    """Run clients that send or read slowly, next to others. Return figures."""
    large = {
        "inputs": rows.astype(int).tolist(),
        "num_samples": 100,
        "return_samples": True,
        "seed": 1,
    }
    large = request("POST", "/predict", httpx.Request("POST", "http://x", json=large).content)
    with serve(store, DUBITO_DEADLINE_S=str(receive_s)) as (url, process):
        reading_log(process)
        port = urlsplit(url).port
        files = settled(lambda: open_files(process.pid))
        with Crowd(port, made, clients=4) as crowd:
            time.sleep(seconds / 4)
            alone = crowd.right / (seconds / 4)
            threads = [
                threading.Thread(target=trickle, args=(port, made[i % 3].bytes()))
                for i in range(many)
            ]
            for thread in threads:
                thread.start()
            unread = [Connection(port, receive_bytes=4096) for _ in range(many // 8)]
            for connection in unread:
                connection.send(large)
                time.sleep(0.3)
            started_at, so_far = time.monotonic(), crowd.right
            time.sleep(seconds / 2)
            meanwhile = (crowd.right - so_far) / (time.monotonic() - started_at)
            for thread in threads:
                thread.join()
        text = assert_right(crowd.totals(), port)
        left = settled(lambda: open_files(process.pid), quiet_s=2 * receive_s + 1)
        for connection in unread:
            connection.close()
        assert left == files
    return (
        f"{many} trickle and {len(unread)} do not read: all are hung up on, with {receive_s} s "
        f"allowed; {text}; "
        f"{meanwhile:.0f} right answers a second with them, {alone:.0f} before"
    )


def trickle(port, content):
    """Send a request one byte at a time until the service disconnects."""
    with Connection(port, timeout_s=60.0) as connection, suppress(Ended, OSError):
        for i in range(len(content)):
            connection.send(content[i : i + 1])
            time.sleep(0.05)
        raise AssertionError("a request that trickled was never refused")


def terminated(serve, store, made, pool, workers="1"):
    """Send SIGTERM under load, and check that all accepted requests complete. Return figures."""
    ranking = request("POST", "/acquire?k=3&seed=1", pool, content_type="application/x-npy")
    settings = {
        "DUBITO_WORKERS": workers,
        "DUBITO_SHUTDOWN_GRACE_S": "1",
        "DUBITO_SHUTDOWN_TIMEOUT_S": "120",
    }
    with serve(store, **settings) as (url, process), ExitStack() as connections:
        reading_log(process)
        port = urlsplit(url).port
        with Connection(port) as connection:
            expected = connection.ask(ranking)
        assert expected.status == 200
        long = [connections.enter_context(Connection(port, timeout_s=120.0)) for _ in range(3)]
        for connection in long:
            connection.send(ranking)
        with Crowd(port, made, until_closed=True) as crowd:
            wait_until(lambda: crowd.right > 50)
            start = time.monotonic()
            process.terminate()
            for thread in crowd.threads:
                thread.join()
            ranked = [connection.answer() for connection in long]
            assert all(answer.body == expected.body for answer in ranked)
            process.wait(120)
            seconds = time.monotonic() - start
        assert process.returncode == 0
        output = crowd.totals()
        assert output.wrong == []
        assert set(output.statuses) == {200}
        assert (output.ended, output.refused) == (0, 0)
    return f"{output.right:,} seeded answers and 3 large pools right, none lost, ended {seconds:.1f} s after"


def full_disk(serve, digits_store, rows, folder):
    """Publish with increasing disk space while workers cannot write. Return figures."""
    shutil.copytree(digits_store, folder / "models")
    store = ModelStore(folder / "models")
    largest = max(file.stat().st_size for file in (store.root / "digits" / "1").iterdir())
    limits = [0, 1, 1000, largest // 2, largest - 1]
    with serve(store.root, **SOON, DUBITO_WORKERS="2", DUBITO_LOG="json") as (url, process):
        reading_log(process)
        port = urlsplit(url).port
        wait_until(lambda: all(starts(url)))
        created = references(port, rows, version="1")
        prevent_writes(process.pid, *children(process.pid))
        with Crowd(port, created, clients=4) as crowd:
            for limit in limits:
                failed = publish_with(limit, store.root, digits_store)
                assert failed.returncode == 1
                assert "File too large" in failed.stderr, failed.stderr
                assert store.versions("digits") == ["1"]
                assert store.resolve("digits") == "1"
            wait_until(lambda: crowd.right > 20)
            published = publish_with(largest, store.root, digits_store)
            assert published.returncode == 0, published.stderr
            assert store.versions("digits") == ["1", "2"]
            wait_until(
                lambda: (
                    httpx.get(f"{url}/health/ready", timeout=60).json()["models"] == {"digits": "2"}
                )
            )
            assert httpx.get(f"{url}/metrics", timeout=60).status_code == 200
        output = crowd.totals()
        text = assert_right(output, port)
    drafts = [*(store.root / "digits").glob(".draft*")]
    assert drafts == []
    return f"{len(limits)} publications failed, none partial, and the next went through; {text}"


PUBLISH = """
import resource, sys
from pathlib import Path
from tests.support.stores import publish_again
from model_store.artifacts.store import ModelStore
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    publish_again(ModelStore(Path(sys.argv[1])), Path(sys.argv[2]))
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def publish_with(limit_bytes, root, source):
    """Publish in a process that can write files of up to `limit_bytes`."""
    command = [sys.executable, "-c", PUBLISH, str(root), str(source), str(limit_bytes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def prevent_writes(*pids):
    """Prevent processes from writing to files."""
    for pid in pids:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
