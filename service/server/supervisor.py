"""A supervisor for worker processes that share a listening socket.

The event loops of the workers send heartbeats through a pipe. The supervisor replaces a worker that
exits, or is silent for `SILENCE_S`. Workers stop if the supervisor exits.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import ClassVar

from service.settings import Settings

logger = logging.getLogger("dubito")

HEARTBEAT_S = 0.25
SILENCE_S = 5.0
START_S = 30.0  # until a new worker's first heartbeat
RESTART_S = 1.0  # minimum between two starts of a worker
KILL_S = 5.0  # after the shutdown timeout, until workers are killed


@dataclass(frozen=True)
class WorkerPlace:
    OPTION: ClassVar = "--worker"

    worker: int
    listener: int
    heartbeat: int
    folder: Path

    async def beat(self) -> None:
        """Send heartbeats and stop the process if the supervisor has exited."""
        os.set_blocking(self.heartbeat, False)
        try:
            while True:
                with suppress(BlockingIOError):
                    os.write(self.heartbeat, b".")
                await asyncio.sleep(HEARTBEAT_S)
        except OSError:
            os.kill(os.getpid(), signal.SIGTERM)


class Worker:
    process: subprocess.Popen[bytes]
    heartbeat: int

    def __init__(self, number: int, listener: socket.socket, folder: Path) -> None:
        self.number = number
        self.listener = listener
        self.folder = folder
        self.is_started = False
        self.try_again = 0.0
        self.silent_after = 0.0

    def start(self) -> None:
        now = time.monotonic()
        self.try_again, self.silent_after = now + RESTART_S, now + START_S
        worker_end = None
        try:
            self.heartbeat, worker_end = os.pipe()
            listener = self.listener.fileno()
            arguments = map(str, (self.number, listener, worker_end, self.folder))
            command = [sys.executable, "-m", "service", WorkerPlace.OPTION, *arguments]
            self.process = subprocess.Popen(command, pass_fds=(listener, worker_end))
            self.is_started = True
        except OSError as error:
            if worker_end is not None:
                os.close(self.heartbeat)
            logger.error("cannot start worker %s: %s; trying again", self.number, error.strerror)
        finally:
            if worker_end is not None:
                os.close(worker_end)

    def read_heartbeats(self) -> None:
        if os.read(self.heartbeat, 4096):
            self.silent_after = time.monotonic() + SILENCE_S
        else:
            time.sleep(0.01)  # the pipe is closed, because the process is exiting

    def failure(self) -> str | None:
        if not self.is_started:
            return "has not started"
        if self.process.poll() is not None:
            return f"ended with code {self.process.returncode}"
        return "is silent" if time.monotonic() > self.silent_after else None

    def close(self) -> None:
        if self.is_started:
            self.process.kill()
            self.process.wait()
            os.close(self.heartbeat)
        self.is_started = False


def supervise(settings: Settings) -> int:
    """Serve with several workers until SIGTERM or SIGINT. Return the exit code."""
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    port = listener.getsockname()[1]
    logger.info("%s workers listen on %s port %s", settings.workers, settings.host, port)
    with tempfile.TemporaryDirectory(prefix="dubito-") as name, listener:
        folder = Path(name)
        workers = [Worker(number, listener, folder) for number in range(settings.workers)]
        for worker in workers:
            worker.start()
        while not ending.is_set():
            heartbeats = [worker.heartbeat for worker in workers if worker.is_started]
            readable, _, _ = select(heartbeats, [], [], HEARTBEAT_S)
            for worker in workers:
                if worker.is_started and worker.heartbeat in readable:
                    worker.read_heartbeats()
                failure = worker.failure()
                if failure is not None and time.monotonic() > worker.try_again:
                    worker.close()
                    logger.error("worker %s %s; restarting it", worker.number, failure)
                    worker.start()
        workers = [worker for worker in workers if worker.is_started]
        for worker in workers:
            worker.process.terminate()
        listener.close()  # so that connections are refused when the workers stop listening
        _wait(workers, settings.shutdown_grace_s + settings.shutdown_timeout_s + KILL_S)
    return 0


def _wait(workers: list[Worker], seconds: float) -> None:
    end = time.monotonic() + seconds
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, end - time.monotonic()))
        is_late = worker.process.returncode is None
        worker.close()
        if is_late:
            logger.error("worker %s did not stop within %s s; killed it", worker.number, seconds)
