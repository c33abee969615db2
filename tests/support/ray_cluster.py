"""Run a command on a local Ray cluster while nodes and processes are killed.

    .venv-ray/bin/python -m tests.support.ray_cluster
        '{"nodes": 3, "command": [...], "kills": [[2.5, "node"], ...]}'

`command` is passed to `python -m service` with the cluster's address. Each kill has a delay after
the previous one, and a target: `worker` (an actor's process), `node` (a raylet, which is replaced)
or `driver` (which is restarted). Prints JSON about the driver and the kills.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.environment import ROOT

ACTOR = "ray::MapWorker"


def main() -> None:
    config = json.loads(sys.argv[1])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    # Ray replaces 127.0.0.1 by another address of the machine.
    node = {"num_cpus": 1, "node_ip_address": "127.0.0.2", "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    nodes = [cluster.add_node(**node) for _ in range(config["nodes"] - 1)]
    random = np.random.default_rng(config.get("seed", 0))
    kills: Counter[str] = Counter()
    starts = 0
    try:
        driver = None
        for wait_s, kind in [*config["kills"], [None, "nothing"]]:
            end = time.monotonic() + (wait_s or 0)
            while driver is None or wait_s is None or time.monotonic() < end:
                if driver is None:
                    command = [
                        sys.executable,
                        "-m",
                        "service",
                        *config["command"],
                        "--ray",
                        cluster.address,
                    ]
                    driver = subprocess.Popen(
                        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                    )
                    starts += 1
                if driver.poll() is not None:
                    break
                time.sleep(0.05)
            if driver.poll() is not None:
                break
            if kind == "driver":
                driver.kill()
                driver.communicate()
                driver = None
            elif kind == "node":
                index = int(random.integers(len(nodes)))
                cluster.remove_node(nodes[index], allow_graceful=False)
                nodes[index] = cluster.add_node(**node)
            else:
                while not (actors := processes(ACTOR, os.getpid())) and driver.poll() is None:
                    time.sleep(0.05)
                if not actors:
                    break
                os.kill(actors[int(random.integers(len(actors)))], signal.SIGKILL)
            kills[kind] += 1
        assert driver is not None
        output, errors = driver.communicate()
        print(
            json.dumps(
                {
                    "code": driver.returncode,
                    "output": output,
                    "errors": errors,
                    "starts": starts,
                    "killed": kills,
                }
            )
        )
    finally:
        cluster.shutdown()


def processes(name: str, ancestor: int) -> list[int]:
    """Return descendants of a process whose command contains a name, sorted."""
    parents, candidates = {}, []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int(
                (process / "stat").read_text().rpartition(")")[2].split()[1]
            )
            if name.encode() in (process / "cmdline").read_bytes():
                candidates.append(int(process.name))
        except (OSError, IndexError):
            continue
    descendants = []
    for number in sorted(candidates):
        parent = parents.get(number)
        while parent not in (None, 0, ancestor):
            parent = parents.get(parent)
        if parent == ancestor:
            descendants.append(number)
    return descendants


def run(
    python: Path, config: dict[str, Any], environment: dict[str, str], timeout_s: float
) -> dict[str, Any]:
    """Run this module in the Ray environment."""
    command = [str(python), "-m", "tests.support.ray_cluster", json.dumps(config)]
    completed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
