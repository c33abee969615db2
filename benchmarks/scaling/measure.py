"""Measurements of a few replicas: what the simulation's constants are, and what it is checked
against.

Each replica is `python -m service` with one thread, on one core that it is pinned to. Requests have
one row and 100 fresh draws, and come from a client in a process of its own on the second core: over
connections that are kept, at times of a Poisson process, to the less busy of two replicas.
"""

import contextlib
import io
import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.common import NAME, TICKS_A_SECOND, Service, serve
from benchmarks.load import Load, closed_loop, open_loop, post
from benchmarks.scaling.simulation import Costs
from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model

DRAWS = 100
FULL = 64  # connections that keep a replica busy
REFUSING = 200  # rows x draws that a replica lets in, to see what refusing costs
CALIBRATION_S, LOAD_S, WARM_UP_S = 4.0, 4.0, 1.0
CLIENT_CORE = 1
CORES = {0, CLIENT_CORE}
PLACES = {1: (0,), 2: (0, 1), 4: (0, 0, 1, 1)}  # the core of each replica
LOADS = {
    1: (50, 150, 300, 450, 600, 750),
    2: (100, 300, 600, 900),
    4: (100, 300, 600, 900),
}  # requests a second
ROUNDS, TRIES = 2, 2
OTHERS = 0.2  # processors: a load during which other programs took more is tried again
PATIENCE_S = 10.0  # that is waited until other programs take less


@dataclass(frozen=True)
class Replica:
    """What one replica is, besides its speed: seconds, bytes and counts."""

    ready_s: float
    start_processor_s: float
    memory_bytes: float
    version_bytes: int
    version_files: int
    set_bytes: int
    metrics_bytes: int
    metrics_series: int
    metrics_s: float  # of processor time, a page
    trial_s: float  # of processor time, a new version


@dataclass(frozen=True)
class Measured:
    """What came of a load: latencies in seconds, and processor seconds a second of all replicas
    together."""

    replicas: int
    rate: float
    seed: int  # of the round
    answered: float  # a second
    failed: float  # share that came to the client's timeout
    p50: float
    p95: float
    p99: float
    busy: float
    # processor seconds a second that other programs took of both cores, niced ones left out
    others: float
    niced: float | None  # the same, of niced ones; None where that was not looked at


def row(store: ModelStore) -> list[int]:
    size = int(np.prod(store.manifest(NAME, store.resolve(NAME)).input.shape))
    return np.random.default_rng(0).integers(0, 256, size).tolist()


@contextmanager
def replicas(
    store: ModelStore, places: tuple[int, ...], **settings: str
) -> Iterator[list[Service]]:
    everywhere = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        running = []
        for place in places:
            os.sched_setaffinity(0, {place})  # which the process inherits
            try:
                running.append(
                    stack.enter_context(
                        serve(store.root, DUBITO_THREADS="1", DUBITO_JOBS_AT_ONCE="0", **settings)
                    )
                )
            finally:
                os.sched_setaffinity(0, everywhere)
        time.sleep(2.0)  # for draws to be made
        yield running


def _on_core(
    connection: Any, core: int, work: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    os.sched_setaffinity(0, {core})
    begun = time.process_time()
    load = work(*arguments, **options)
    connection.send((load, time.process_time() - begun, begun))


def put_load(work: Any, *arguments: Any, **options: Any) -> tuple[Load, float, float]:
    """Put a load on replicas from the client's core, in a process of its own.

    Returns:
        what came of it, the client's processor seconds, and those of its start.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_on_core, args=(theirs, CLIENT_CORE, work, arguments, options))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def core_seconds(cores: set[int]) -> tuple[float, float]:
    """Return the seconds that cores have spent so far on programs that are not niced, and on those
    that are."""
    lines = Path("/proc/stat").read_text().splitlines()
    fields = [
        line.split()
        for line in lines
        if re.match(r"cpu\d", line) and int(line.split()[0][3:]) in cores
    ]
    own = sum(int(one[1]) + int(one[3]) + int(one[6]) + int(one[7]) for one in fields)
    return own / TICKS_A_SECOND, sum(int(one[2]) for one in fields) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(cores: set[int]) -> None:
    given_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < given_up:
        before, _ = core_seconds(cores)
        time.sleep(1.0)
        if core_seconds(cores)[0] - before <= OTHERS:
            return


def load(running: list[Service], request: bytes, rate: float, seed: int) -> Measured:
    ports = [replica.port for replica in running]
    before_cores, begun = core_seconds(CORES), time.perf_counter()
    before = sum(replica.processor_seconds() for replica in running)
    load, client_s, start_s = put_load(
        open_loop, ports, [request], rate, LOAD_S, warm_up_s=WARM_UP_S, seed=seed
    )
    busy = sum(replica.processor_seconds() for replica in running) - before
    seconds = time.perf_counter() - begun
    others, niced = (
        now - then for now, then in zip(core_seconds(CORES), before_cores, strict=True)
    )
    others -= busy + client_s + start_s
    percentiles = {f"p{percent}": load.percentile(percent) for percent in (50, 95, 99)}
    failed = 1.0 - load.counts.get("200", 0) / len(load.kinds)
    return Measured(
        len(running),
        rate,
        seed,
        load.rate,
        failed,
        busy=busy / (LOAD_S + WARM_UP_S),
        others=max(0.0, others / seconds),
        niced=niced / seconds,
        **percentiles,
    )


def calibrate(store: ModelStore) -> tuple[Costs, dict[str, float]]:
    """Return the costs of one replica on one core, and what they were made of.

    Processor milliseconds of the server for a request: P1 of one connection, whose requests are
        computed alone; P64
    of 64, of which m share a micro-batch and its draws; and of requests of many rows, b for a row
    more. Then

        P1 = r + b + (a + d),    P64 = r + b + (a + d) / m

    give a + d, of a micro-batch and its draws, and r, of reading and answering. d is measured by
    itself, in process.
    """
    one = post("/predict", orjson.dumps({"inputs": [row(store)], "num_samples": DRAWS}))
    found: dict[str, float] = {}
    with replicas(store, (0,)) as (replica,):
        for name, connections in (("alone", 1), ("together", FULL)):
            put_load(closed_loop, replica.port, [one], connections, 1.0, warm_up_s=0.0)
            before = replica.processor_seconds(), *count_batches(replica)
            load, client_s, _ = put_load(
                closed_loop, replica.port, [one], connections, CALIBRATION_S, warm_up_s=0.0
            )
            after = replica.processor_seconds(), *count_batches(replica)
            busy, requests, batches = (now - then for now, then in zip(after, before, strict=True))
            found |= {name: busy / requests, f"{name}, in a batch": requests / batches}
            found[f"{name}, client"] = client_s / len(load.kinds)
            found[f"{name}, requests a second"] = load.rate
        found["a row more"] = row_s(replica, store)
        health = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
        before_s = replica.processor_seconds()
        load, client_s, _ = put_load(closed_loop, replica.port, [health], 1, 1.0, warm_up_s=0.0)
        spent = (replica.processor_seconds() - before_s + client_s) / len(load.kinds)
        found["on the way"] = max(0.0, float(load.latencies_s.mean()) - spent)
    os.sched_setaffinity(0, {0})
    found["draws"] = draws_s(store)
    os.sched_setaffinity(0, {0, CLIENT_CORE})
    limits = {
        "DUBITO_MAX_QUEUED_ROW_DRAWS": str(REFUSING),
        "DUBITO_OVERLOAD_ROW_DRAWS": str(REFUSING),
    }
    shared = (found["alone"] - found["together"]) / (1.0 - 1.0 / found["together, in a batch"])
    rest = found["alone"] - shared - found["a row more"]
    with replicas(store, (0,), **limits) as (replica,):
        before_s = replica.processor_seconds()
        requests, batches = count_batches(replica)
        load, _, _ = put_load(closed_loop, replica.port, [one], FULL, 2.0, warm_up_s=0.0)
        spent = replica.processor_seconds() - before_s
        answered, batches = (
            now - then
            for now, then in zip(count_batches(replica), (requests, batches), strict=True)
        )
        refused = load.counts["429"]
        found["refused"] = (
            spent - answered * (rest + found["a row more"]) - batches * shared
        ) / refused
    costs = Costs(
        read_s=rest / 2,
        answer_s=rest / 2,
        batch_s=shared - found["draws"],
        row_draw_s=found["a row more"] / DRAWS,
        draw_s=found["draws"] / DRAWS,
        refuse_s=found["refused"],
        network_s=found["on the way"],
        client_s=found["together, client"],
    )
    return costs, found


def row_s(replica: Service, store: ModelStore) -> float:
    spent = []
    for rows in (1, 33):
        packed = io.BytesIO()
        np.save(packed, np.tile(np.array(row(store), dtype=np.float32), (rows, 1)))
        headers = "Content-Type: application/x-npy\r\nAccept: application/x-npz\r\n"
        request = post("/predict", packed.getvalue(), headers)
        put_load(closed_loop, replica.port, [request], 1, 0.5, warm_up_s=0.0)
        before = replica.processor_seconds()
        load, _, _ = put_load(closed_loop, replica.port, [request], 1, 3.0, warm_up_s=0.0)
        spent.append((replica.processor_seconds() - before) / len(load.kinds))
    return (spent[1] - spent[0]) / 32


def draws_s(store: ModelStore) -> float:
    model = Model.load(store.open(NAME, store.resolve(NAME), wanted=NEEDED), threads=1)
    model.runtime.draw_set(0, DRAWS)
    begun, sets = time.process_time(), 100
    for seed in range(sets):
        model.runtime.draw_set(seed, DRAWS)
    return (time.process_time() - begun) / sets


def count_batches(replica: Service) -> tuple[float, float]:
    """Return how many requests micro-batches had, and how many micro-batches there were."""
    page = replica.ask("GET", "/metrics").decode()
    return tuple(  # type: ignore[return-value]
        sum(
            float(value)
            for value in re.findall(rf"^dubito_batch_requests_{kind}{{.*}} (.*)$", page, re.M)
        )
        for kind in ("sum", "count")
    )


def describe(store: ModelStore) -> Replica:
    one = post("/predict", orjson.dumps({"inputs": [row(store)]}))
    artifact = store.open(NAME, store.resolve(NAME), wanted=NEEDED)
    folder = store.root / NAME / store.resolve(NAME)
    files = [path for path in folder.iterdir() if path.is_file()]
    set_bytes = Model.load(artifact, threads=1).runtime.draw_bytes * DRAWS
    with replicas(store, (0,)) as (replica,):
        start_s = replica.processor_seconds()
        put_load(closed_loop, replica.port, [one], 8, 1.0, warm_up_s=0.0)
        _, memory = replica.memory()
        page = replica.ask("GET", "/metrics").decode()
        before = replica.processor_seconds()
        for _ in range(50):
            replica.ask("GET", "/metrics")
        page_s = (replica.processor_seconds() - before) / 50
        before = replica.processor_seconds(of_children=True)
        publish_again(store)
        time.sleep(6.0)
        trial_s = replica.processor_seconds(of_children=True) - before
    return Replica(
        ready_s=replica.seconds,
        start_processor_s=start_s,
        memory_bytes=1e6 * memory,
        version_bytes=sum(path.stat().st_size for path in files),
        version_files=len(files),
        set_bytes=set_bytes,
        metrics_bytes=len(page),
        metrics_series=len([line for line in page.splitlines() if not line.startswith("#")]),
        metrics_s=page_s,
        trial_s=trial_s,
    )


def publish_again(store: ModelStore) -> str:
    first = store.open(NAME, store.resolve(NAME), wanted=FILES)
    description = Description.model_validate(
        first.manifest.model_dump(include=set(Description.model_fields))
    )
    return store.publish(NAME, description, {file: first.files[file] for file in FILES}).version


def measure(store: ModelStore, count: int, rounds: int) -> Iterator[Measured]:
    request = post("/predict", orjson.dumps({"inputs": [row(store)], "num_samples": DRAWS}))
    with replicas(store, PLACES[count]) as running:
        for seed, rate in itertools.product(range(rounds), LOADS[count]):
            for _ in range(TRIES):
                wait_for_quiet(CORES)  # draws are made meanwhile
                found = load(running, request, rate, seed)
                yield found
                if found.others <= OTHERS and not found.failed:
                    break
