"""Shards on this machine: a process for each processor, given one shard at a time. One that dies is
replaced."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import service
from service.batch.files import Stopped
from service.batch.job import OUT
from service.batch.shard_work import Said, Told

RUN = "service.batch.process"
MOST_TRIES = 5  # of one shard
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class At:
    """How many rows of a shard are done so far."""

    shard: int
    rows: int


@dataclass(eq=False)
class _Process:
    running: subprocess.Popen[bytes]
    shard: int | None = None
    said: bytes = b""

    @property
    def output(self) -> int:
        assert self.running.stdout is not None
        return self.running.stdout.fileno()


@dataclass(eq=False)
class _Pool:
    """The processes, and what is to be done."""

    told: Told
    todo: deque[int]
    tries: Counter[int] = field(default_factory=Counter)
    processes: list[_Process] = field(default_factory=list)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def fill(self, workers: int) -> None:
        """Have as many processes as there is work for, each with a shard."""
        for process in [p for p in self.processes if p.shard is None]:
            if self.todo:
                self._give(process)
            else:
                self.drop(process)
        while self.todo and len(self.processes) < workers:
            process = _Process(_started(self.told))
            self.processes.append(process)
            self.selector.register(process.output, selectors.EVENT_READ, process)
            self._give(process)

    def _give(self, process: _Process) -> None:
        process.shard = self.todo.popleft()
        assert process.running.stdin is not None
        with suppress(BrokenPipeError):  # its output says that it has died
            process.running.stdin.write(b"%d\n" % process.shard)
            process.running.stdin.flush()

    def drop(self, process: _Process) -> int:
        """End a process, and return its exit code."""
        self.selector.unregister(process.output)
        self.processes.remove(process)
        process.running.kill()
        code = process.running.wait()
        for pipe in (process.running.stdin, process.running.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        return code

    def again(self, shard: int, why: str) -> None:
        """Have a shard done once more.

        Raises:
            Stopped: if that was tried often enough.
        """
        self.tries[shard] += 1
        if self.tries[shard] >= MOST_TRIES:
            raise Stopped(f"{OUT}: part {shard} was tried {MOST_TRIES} times: {why}")
        self.todo.appendleft(shard)


def run_here(told: Told, todo: list[int], workers: int) -> Generator[At | Said, None, None]:
    """Do shards, and yield what comes of them and how far they are.

    Raises:
        Stopped: if a shard's process dies, or an error does not pass, again and again.
    """
    pool = _Pool(told, deque(todo))
    try:
        while pool.todo or pool.processes:
            pool.fill(workers)
            for key, _ in pool.selector.select() if pool.processes else ():
                yield from _heard(pool, key.data)
    finally:
        for process in list(pool.processes):
            pool.drop(process)
        pool.selector.close()


def _heard(pool: _Pool, process: _Process) -> Iterator[At | Said]:
    """Yield what a process says; one that has nothing more to say has died."""
    piece = os.read(process.output, PIECE_BYTES)
    if not piece:
        with suppress(subprocess.TimeoutExpired):
            process.running.wait(5)
        shard, code = process.shard, pool.drop(process)
        if shard is not None:
            pool.again(
                shard, f"its process died ({signal.Signals(-code).name if code < 0 else code})"
            )
        return
    *lines, process.said = (process.said + piece).split(b"\n")
    for line in lines:
        content = json.loads(line)
        if "rows" in content:
            yield At(content["shard"], content["rows"])
            continue
        said = Said(**{**content, "reasons": tuple(content["reasons"])})
        process.shard = None
        if said.error is not None and said.may_pass:
            pool.again(said.shard, said.error)
        else:
            yield said


def _started(told: Told) -> subprocess.Popen[bytes]:
    packages = str(Path(service.__path__[0]).parent)
    path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", RUN],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(told.to_json().encode() + b"\n")
        process.stdin.flush()
    return process
