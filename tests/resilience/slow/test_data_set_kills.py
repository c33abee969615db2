"""A job on a data set is killed again and again, here and on a cluster, and ends with the same
bytes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support import ray_cluster
from tests.support.data_sets import content_of, write_digits
from tests.support.environment import ROOT, environment_with

KILLS = 30
ROWS = 20_000  # of each of four files
RAY = ROOT / ".venv-ray" / "bin" / "python"


@pytest.fixture(scope="module")
def undisturbed(digits_store, digits_rows, tmp_path_factory):
    """The arguments of a job, and the output where nothing is killed."""
    folder = tmp_path_factory.mktemp("kills")
    write_digits(folder / "data", digits_rows, 4, ROWS)
    arguments = [
        "score",
        str(folder / "data"),
        "--seed",
        "1",
        "--shard-rows",
        "400",
        "--num-samples",
        "1000",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "service", *arguments, "--out", str(folder / "out"), "--quiet"],
        cwd=ROOT,
        env=environment_with(DUBITO_STORE=str(digits_store)),
        check=True,
    )
    assert done.returncode == 0
    return arguments, content_of(folder / "out")


def check(out, expected):
    """Every row is there once, and every file as it would have been."""
    ids = [
        name
        for part in sorted(out.glob("part-*"))
        for name in pq.read_table(part)["id"].to_pylist()
    ]
    assert len(ids) == len(set(ids)) == 4 * ROWS
    assert content_of(out) == expected


@pytest.mark.slow
def test_thirty_kills_of_workers_and_the_driver_change_nothing(undisturbed, digits_store, tmp_path):
    arguments, expected = undisturbed
    random, killed, driver = np.random.default_rng(0), Counter(), None
    command = [
        sys.executable,
        "-m",
        "service",
        *arguments,
        "--out",
        str(tmp_path / "out"),
        "--quiet",
    ]
    while True:
        if driver is None:
            driver = subprocess.Popen(
                command, cwd=ROOT, env=environment_with(DUBITO_STORE=str(digits_store))
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(random.uniform(1.0, 4.0) if killed.total() < KILLS else None)
            break
        if random.random() < 1 / 3:
            driver.kill()
            driver.wait()
            driver = None
            killed["driver"] += 1
        elif workers := ray_cluster.processes("multiprocessing.spawn", os.getpid()):
            os.kill(workers[int(random.integers(len(workers)))], signal.SIGKILL)
            killed["worker"] += 1
    assert driver.returncode == 0
    check(tmp_path / "out", expected)
    print(json.dumps({"where": "here", "rows": 4 * ROWS, "killed": killed}))


@pytest.mark.slow
@pytest.mark.skipif(not RAY.exists(), reason="not installed: ray")
def test_kills_of_workers_nodes_and_the_driver_on_a_cluster_change_nothing(
    undisturbed, digits_store, tmp_path
):
    arguments, expected = undisturbed
    random, begun = np.random.default_rng(0), time.monotonic()
    what = random.permutation(["worker", "node", "driver"] * (KILLS // 3)).tolist()
    kills = [[float(random.uniform(1.0, 5.0)), one] for one in what]
    told = {
        "nodes": 3,
        "command": [*arguments, "--out", str(tmp_path / "out"), "--quiet"],
        "kills": kills,
    }
    done = ray_cluster.run(RAY, told, environment_with(DUBITO_STORE=str(digits_store)), 1200)
    assert done["code"] == 0, done
    check(tmp_path / "out", expected)
    assert sum(done["killed"].values()) >= KILLS // 3  # the job may end before the last
    seconds = round(time.monotonic() - begun)
    print(
        json.dumps(
            {"where": "on Ray", "rows": 4 * ROWS, "killed": done["killed"], "seconds": seconds}
        )
    )
