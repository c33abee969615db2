"""Inject faults while clients send requests. Each function returns a summary."""

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
from tests.support.crowd import Crowd, count_replayed, references
from tests.support.environment import ROOT
from tests.support.process import children, open_files, wait_until_stable
from tests.support.raw import Connection, ConnectionClosed, request
from tests.support.serving import metric, wait_until

TWO_WORKERS = {"DUBITO_WORKERS": "2", "DUBITO_POLL_INTERVAL_S": "0.1"}
FAST_POLLING = {"DUBITO_POLL_INTERVAL_S": "0.05"}
RECOVERY_S = 5.0


def drain_log(process):
    def read():
        with suppress(OSError, ValueError):
            while os.read(process.stderr.fileno(), 1 << 16):
                pass

    threading.Thread(target=read, daemon=True).start()


def assert_correct(tally, port, max_closed=0):
    assert tally.wrong == [], tally.wrong[:5]
    assert set(tally.statuses) <= {200}, tally.statuses
    assert tally.closed <= max_closed, tally.closed
    return f"{tally.correct:,} seeded answers correct, {count_replayed(port, tally)} others replayed from their seeds, none wrong"


def start_times(url):
    page = httpx.get(f"{url}/metrics", timeout=60).text
    return [metric(page, "process_start_time_seconds", worker=worker) for worker in "01"]


def signal_worker(url, process, crowd, signum):
    """Send a signal to a worker. Return the seconds to notice, to recover and without responses."""
    before, pids = start_times(url), children(process.pid)
    start = time.monotonic()
    os.kill(min(pids), signum)
    wait_until(
        lambda: children(process.pid).isdisjoint({min(pids)}) and len(children(process.pid)) == 2
    )
    notice_s = time.monotonic() - start
    wait_until(lambda: all(new > 0 for new in start_times(url)) and start_times(url) != before)
    recovery_s = time.monotonic() - start
    correct_at = crowd.totals().correct_at
    gaps = [later - earlier for earlier, later in pairwise(correct_at) if later > start]
    return notice_s, recovery_s, max(gaps)


def signal_workers(serve, store, requests, seconds, signum):
    """Kill or stop workers under load every few seconds. Return the recovery time and a summary."""
    times, closed = [], 0
    with serve(store, **TWO_WORKERS) as (url, process):
        drain_log(process)
        port = urlsplit(url).port
        wait_until(lambda: all(start_times(url)))
        end = time.monotonic() + seconds
        while not times or time.monotonic() < end:
            with Crowd(port, requests, clients=6) as crowd:
                wait_until(lambda crowd=crowd: crowd.correct > 20)
                times.append(signal_worker(url, process, crowd, signum))
                correct = crowd.correct
                wait_until(lambda crowd=crowd, correct=correct: crowd.correct > correct + 20)
            tally = crowd.totals()
            text = assert_correct(tally, port, max_closed=6)
            closed += tally.closed
    notice_s, recovery_s, gap_s = (max(values) for values in zip(*times, strict=True))
    return recovery_s, (
        f"{len(times)} times: {closed} connections ended, {text} in the last; noticed in "
        f"{notice_s:.1f} s, a new worker "
        f"serves after {recovery_s:.1f} s at most, no answer for {gap_s:.2f} s at most"
    )


def disconnect_clients(serve, store, requests, seconds, clients=8):
    with serve(store) as (url, process):
        drain_log(process)
        port = urlsplit(url).port
        files = wait_until_stable(lambda: open_files(process.pid))
        with Crowd(port, requests, clients, hang_up=0.3) as crowd:
            time.sleep(seconds)
        tally = crowd.totals()
        text = assert_correct(tally, port)
        assert tally.disconnects > 0
        page = httpx.get(f"{url}/metrics", timeout=60).text
        wait_until(
            lambda: (
                metric(httpx.get(f"{url}/metrics", timeout=60).text, "dubito_queued_requests") == 0
            )
        )
        assert metric(page, "dubito_failures_total", route="/predict", reason="unexpected") == 0
        assert wait_until_stable(lambda: open_files(process.pid)) == files
    return (
        f"{tally.disconnects:,} disconnected; {text}; no queued requests or additional open files"
    )


def run_slow_clients(serve, store, requests, rows, seconds, count=40, receive_s=2):
    """Run clients that send or read slowly, next to others. Return a summary."""
    large = {
        "inputs": rows.astype(int).tolist(),
        "num_samples": 100,
        "return_samples": True,
        "seed": 1,
    }
    large = request("POST", "/predict", httpx.Request("POST", "http://x", json=large).content)
    with serve(store, DUBITO_DEADLINE_S=str(receive_s)) as (url, process):
        drain_log(process)
        port = urlsplit(url).port
        files = wait_until_stable(lambda: open_files(process.pid))
        with Crowd(port, requests, clients=4) as crowd:
            time.sleep(seconds / 4)
            rate_before = crowd.correct / (seconds / 4)
            threads = [
                threading.Thread(target=trickle, args=(port, requests[i % 3].bytes()))
                for i in range(count)
            ]
            for thread in threads:
                thread.start()
            unread = [Connection(port, receive_bytes=4096) for _ in range(count // 8)]
            for connection in unread:
                connection.send(large)
                time.sleep(0.3)
            start, correct_before = time.monotonic(), crowd.correct
            time.sleep(seconds / 2)
            rate_during = (crowd.correct - correct_before) / (time.monotonic() - start)
            for thread in threads:
                thread.join()
        text = assert_correct(crowd.totals(), port)
        files_after = wait_until_stable(lambda: open_files(process.pid), quiet_s=2 * receive_s + 1)
        for connection in unread:
            connection.close()
        assert files_after == files
    return (
        f"{count} slow senders and {len(unread)} slow readers, all disconnected after {receive_s} s; "
        f"{text}; {rate_during:.0f} correct answers per second with them, {rate_before:.0f} before"
    )


def trickle(port, content):
    """Send a request one byte at a time until the service disconnects."""
    with Connection(port, timeout_s=60.0) as connection, suppress(ConnectionClosed, OSError):
        for i in range(len(content)):
            connection.send(content[i : i + 1])
            time.sleep(0.05)
        raise AssertionError("a slow request was never rejected")


def terminate_service(serve, store, requests, pool, workers="1"):
    """Send SIGTERM under load, and check that all accepted requests complete. Return a summary."""
    ranking = request("POST", "/acquire?k=3&seed=1", pool, content_type="application/x-npy")
    settings = {
        "DUBITO_WORKERS": workers,
        "DUBITO_SHUTDOWN_GRACE_S": "1",
        "DUBITO_SHUTDOWN_TIMEOUT_S": "120",
    }
    with serve(store, **settings) as (url, process), ExitStack() as connections:
        drain_log(process)
        port = urlsplit(url).port
        with Connection(port) as connection:
            expected = connection.ask(ranking)
        assert expected.status == 200
        rankings = [connections.enter_context(Connection(port, timeout_s=120.0)) for _ in range(3)]
        for connection in rankings:
            connection.send(ranking)
        with Crowd(port, requests, until_closed=True) as crowd:
            wait_until(lambda: crowd.correct > 50)
            start = time.monotonic()
            process.terminate()
            for thread in crowd.threads:
                thread.join()
            answers = [connection.answer() for connection in rankings]
            assert all(answer.body == expected.body for answer in answers)
            process.wait(120)
            seconds = time.monotonic() - start
        assert process.returncode == 0
        tally = crowd.totals()
        assert tally.wrong == []
        assert set(tally.statuses) == {200}
        assert (tally.closed, tally.refused) == (0, 0)
    return f"{tally.correct:,} seeded answers and 3 large pools correct, none lost, ended after {seconds:.1f} s"


def publish_on_full_disk(serve, digits_store, rows, folder):
    """Publish with increasing disk space while workers cannot write. Return a summary."""
    shutil.copytree(digits_store, folder / "models")
    store = ModelStore(folder / "models")
    largest = max(file.stat().st_size for file in (store.root / "digits" / "1").iterdir())
    limits = [0, 1, 1000, largest // 2, largest - 1]
    with serve(store.root, **FAST_POLLING, DUBITO_WORKERS="2", DUBITO_LOG="json") as (url, process):
        drain_log(process)
        port = urlsplit(url).port
        wait_until(lambda: all(start_times(url)))
        requests = references(port, rows, version="1")
        prevent_writes(process.pid, *children(process.pid))
        with Crowd(port, requests, clients=4) as crowd:
            for limit in limits:
                completed = publish_with(limit, store.root, digits_store)
                assert completed.returncode == 1
                assert "File too large" in completed.stderr, completed.stderr
                assert store.versions("digits") == ["1"]
                assert store.resolve("digits") == "1"
            wait_until(lambda: crowd.correct > 20)
            completed = publish_with(largest, store.root, digits_store)
            assert completed.returncode == 0, completed.stderr
            assert store.versions("digits") == ["1", "2"]
            wait_until(
                lambda: (
                    httpx.get(f"{url}/health/ready", timeout=60).json()["models"] == {"digits": "2"}
                )
            )
            assert httpx.get(f"{url}/metrics", timeout=60).status_code == 200
        tally = crowd.totals()
        text = assert_correct(tally, port)
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
