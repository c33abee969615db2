"""Process the shards of a data set with Ray Data.

Each actor has the model in memory. If an actor dies, its shards go to other actors. The data does
not pass through Ray: an actor gets a shard's number, reads its rows and writes its part.
"""

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from integrations.ray.environment import set_ray_environment
from model_store.errors import InvalidInput, one_line
from model_store.processes import processors
from service.batch.shards import ShardResult, Worker, WorkerOptions, run_rounds

LOCAL = "local"  # start Ray on this machine for the job
OBJECT_STORE_BYTES = 100 << 20  # enough for shard numbers and results


class ShardActor:
    def __init__(self, options: WorkerOptions, threads: int) -> None:
        self._worker = Worker(options, threads)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = [self._worker.result(int(number)) for number in batch["shard"]]
        return {"result": np.array([json.dumps(asdict(result)) for result in results])}


def run_on_ray(
    options: WorkerOptions, todo: list[int], address: str, workers: int | None
) -> Generator[ShardResult, None, None]:
    """Process the shards on a Ray cluster and yield their results.

    Raises:
        InvalidInput: if Ray is not installed, or the address has no cluster.
        Stopped: if a shard fails in every round.
    """
    with _cluster(address) as ray:

        def run_round(shards: list[int]) -> Generator[ShardResult, None, None]:
            try:
                yield from _round(ray, options, shards, workers)
            except ray.exceptions.RayError as error:
                yield ShardResult(shards[0], error=one_line(error), is_retryable=True)

        yield from run_rounds(run_round, todo)


def _round(
    ray: Any, options: WorkerOptions, shards: list[int], workers: int | None
) -> Generator[ShardResult, None, None]:
    """Process each shard once. A shard yields no result if its actor dies."""
    max_actors = min(len(shards), workers or int(ray.cluster_resources().get("CPU", 1)))
    results = ray.data.from_items(
        [{"shard": number} for number in shards], override_num_blocks=len(shards)
    ).map_batches(
        ShardActor,
        fn_constructor_args=(options, 1),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            min_size=1,
            max_size=max_actors,
            initial_size=max_actors,
            max_tasks_in_flight_per_actor=1,  # No shard should queue while an actor is idle.
        ),
        num_cpus=1,
    )
    for row in results.iter_rows():
        yield ShardResult(**json.loads(str(row["result"])))


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Connect to a Ray cluster or start a local one, then yield the `ray` module."""
    set_ray_environment({}, address == LOCAL)
    try:
        import ray
        import ray.data
    except ImportError:
        raise InvalidInput("ray", "the extra `scale` to be installed", "no Ray") from None
    # Paths of sockets must be short.
    folder = tempfile.mkdtemp(prefix="ray-") if address == LOCAL else None
    try:
        with _quiet():
            try:
                ray.init(
                    **_options(address, folder), log_to_driver=False, logging_level=logging.ERROR
                )
            except (ConnectionError, ValueError) as error:
                expected = "the address of a cluster, `local` or `auto`"
                raise InvalidInput("ray", expected, one_line(error)) from None
            context = ray.data.DataContext.get_current()
            context.enable_progress_bars = False
            context.max_errored_blocks = -1  # The next round retries them.
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)
            try:
                yield ray
            finally:
                ray.shutdown()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _options(address: str, folder: str | None) -> dict[str, Any]:
    """Return the options for `ray.init`. A new cluster stores its files in `folder`."""
    if address == LOCAL:
        return {
            "address": LOCAL,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": folder,
            "num_cpus": processors(),
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
    host = address.rpartition(":")[0]
    # If the cluster is on loopback, nodes cannot reach the driver at another address.
    return {"address": address, **({"_node_ip_address": host} if host.startswith("127.") else {})}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the standard error output of Ray's native code.

    Ray's Python messages, such as a node's death, go to standard error instead of output.
    """
    descriptor, stderr = os.dup(2), sys.stderr
    with Path(os.devnull).open("wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        file = os.fdopen(os.dup(descriptor), "w", buffering=1)
        with file as sys.stderr, redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr = stderr
        os.dup2(descriptor, 2)
        os.close(descriptor)
