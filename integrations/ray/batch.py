"""Shards on Ray: Ray Data hands them to actors, each with the model in memory, and gives them to
others if one dies.

Nothing of the data goes through Ray: an actor is given a shard's number, reads its rows and writes
its part.
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
from service.batch.data_set import OUT
from service.batch.files import Stopped
from service.batch.shards import MOST_TRIES, ShardResult, Worker, WorkerOptions

LOCAL = "local"  # Ray is started here, and ends with the job
OBJECT_BYTES = 100 << 20  # of its store of objects, which hold numbers of shards alone


class ShardActor:
    """Does the shard of each batch."""

    def __init__(self, options: WorkerOptions, threads: int) -> None:
        self._worker = Worker(options, threads)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = [self._worker.result(int(number), lambda _: None) for number in batch["shard"]]
        return {"result": np.array([json.dumps(asdict(result)) for result in results])}


def run_on_ray(
    options: WorkerOptions, todo: list[int], address: str, workers: int | None
) -> Generator[ShardResult, None, None]:
    """Do shards on a cluster, and yield their results.

    Raises:
        InvalidInput: if there is no Ray, or no cluster at the address.
        Stopped: if shards are lost again and again.
    """
    with _cluster(address) as ray:
        left = set(todo)
        why = "its actors died"
        for _ in range(MOST_TRIES):
            try:
                for result in _round(ray, options, sorted(left), workers):
                    if result.error is not None and result.may_pass:
                        why = result.error
                        continue
                    left.discard(result.shard)
                    yield result
            except ray.exceptions.RayError as error:
                why = one_line(error)
            if not left:
                return
        raise Stopped(f"{OUT}: part {min(left)} was tried {MOST_TRIES} times: {why}")


def _round(
    ray: Any, options: WorkerOptions, shards: list[int], workers: int | None
) -> Generator[ShardResult, None, None]:
    """Have each shard done once, as far as its actor lives."""
    most = min(len(shards), workers or int(ray.cluster_resources().get("CPU", 1)))
    done = ray.data.from_items(
        [{"shard": number} for number in shards], override_num_blocks=len(shards)
    ).map_batches(
        ShardActor,
        fn_constructor_args=(options, 1),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            min_size=1,
            max_size=most,
            initial_size=most,
            max_tasks_in_flight_per_actor=1,  # none waits behind another
        ),
        num_cpus=1,
    )
    for row in done.iter_rows():
        yield ShardResult(**json.loads(str(row["result"])))


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Join a cluster, or start one on this machine for a while; yield Ray."""
    set_ray_environment({}, address == LOCAL)
    try:
        import ray
        import ray.data
    except ImportError:
        raise InvalidInput("ray", "Ray, of the extra `scale`", "none of it") from None
    # A short path, as sockets need it
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
            context.max_errored_blocks = -1  # which the next round is for
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)
            try:
                yield ray
            finally:
                ray.shutdown()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _options(address: str, folder: str | None) -> dict[str, Any]:
    """Return options of `ray.init`; `folder` is for the files of a cluster that is started."""
    if address == LOCAL:
        own = {
            "num_cpus": processors(),
            "object_store_memory": OBJECT_BYTES,
            "include_dashboard": False,
        }
        return {"address": LOCAL, "_node_ip_address": "127.0.0.1", "_temp_dir": folder, **own}
    host = address.rpartition(":")[0]
    # On the loopback interface nodes would look for the driver at another address of this machine.
    return {"address": address, **({"_node_ip_address": host} if host.startswith("127.") else {})}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence standard error of Ray's library, and print its messages, such as that a node has
    died, to standard error."""
    ours, before = os.dup(2), sys.stderr
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        with os.fdopen(os.dup(ours), "w", buffering=1) as sys.stderr, redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr = before
        os.dup2(ours, 2)
        os.close(ours)
