"""A service that takes and runs jobs is killed again and again: no accepted job is lost or answered
wrongly."""

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.serving import serving, wait_until

KILLS = 50
SEED = 0


@pytest.mark.slow
def test_no_job_is_lost_in_fifty_kills(digits_store, digits_rows, tmp_path):
    """Jobs are asked for all the time; every kill is of the service or of a job's process, after a
    random time."""
    random = np.random.default_rng(SEED)
    pools = tmp_path / "pools"
    pools.mkdir()
    np.save(pools / "rows.npy", np.tile(digits_rows, (40, 1)))
    settings = {
        "DUBITO_POOLS": str(pools),
        "DUBITO_STATE": str(tmp_path / "state"),
        "DUBITO_THREADS": "1",
        "DUBITO_MAX_JOBS": "1000",
    }
    accepted: list[str] = []
    killed = {"the service": 0, "a job's process": 0}
    for kill in range(KILLS):
        with serving(digits_store, **settings) as (url, process):
            end = time.monotonic() + random.uniform(0.2, 6.0)
            others = time.monotonic() + random.uniform(
                0.2, 6.0
            )  # when a job's process is killed alone
            while time.monotonic() < end:
                with contextlib.suppress(httpx.HTTPError):
                    kind = "acquire" if len(accepted) % 2 else "predict"
                    field = "pool_file" if kind == "acquire" else "inputs_file"
                    body = {field: "rows.npy", "seed": 1, "num_samples": 20}
                    if len(accepted) < kill + 4:  # about as many as are done meanwhile
                        answer = httpx.post(f"{url}/{kind}/jobs", json=body)
                        accepted += [answer.json()["id"]] if answer.status_code == 202 else []
                if time.monotonic() > others:
                    others = end
                    for number in _job_processes(process.pid):
                        os.kill(number, signal.SIGKILL)
                        killed["a job's process"] += 1
                time.sleep(0.5)
            killed["the service"] += 1
            process.kill()
            process.wait()
    with (
        serving(digits_store, **settings) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        found = {job["id"]: job for job in client.get("/jobs").json()["jobs"]}
        assert set(accepted) <= set(
            found
        )  # and perhaps some that were accepted as the service died
        wait_until(lambda: not _unfinished(client), 1200)
        jobs = [client.get(f"/jobs/{name}").json() for name in accepted]
        assert [(job["state"], job["error"]) for job in jobs if job["state"] != "done"] == []
        results = {job["kind"]: set() for job in jobs}
        for job in jobs:
            results[job["kind"]].add(client.get(job["result"]).content)
        assert {kind: len(contents) for kind, contents in results.items()} == dict.fromkeys(
            results, 1
        )
    print(f"{killed}, {len(accepted)} jobs accepted, all done, with one result of each kind")


def _unfinished(client: httpx.Client) -> list[str]:
    return [
        job["id"]
        for job in client.get("/jobs").json()["jobs"]
        if job["state"] in ("queued", "running")
    ]


def _job_processes(parent: int) -> list[int]:
    """Processes of jobs that a service has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            is_job = b"service.batch.job_process" in (process / "cmdline").read_bytes()
            if (
                is_job
                and int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            ):
                found.append(int(process.name))
    return found
