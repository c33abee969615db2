"""Supervisor of worker processes that share a listening socket.

Workers send heartbeats through a pipe. The supervisor replaces a worker that exits, or is silent
for `SILENCE_S`. Workers stop if the supervisor exits.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import ClassVar

from service.settings import Settings

logger = logging.getLogger("dubito")

HEARTBEAT_S = 0.25
SILENCE_S = 2.0
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

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> "WorkerPlace":
        worker, listener, heartbeat, folder = arguments
        return cls(int(worker), int(listener), int(heartbeat), Path(folder))

    def start_heartbeat(self) -> None:
        """Send heartbeats in a thread, and stop the process if the supervisor has exited."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        try:
            while True:
                os.write(self.heartbeat, b".")
                time.sleep(HEARTBEAT_S)
        except OSError:
            os.kill(os.getpid(), signal.SIGTERM)


class Worker:
    def __init__(self, number: int, listener: socket.socket, folder: Path) -> None:
        self.heartbeat, theirs = os.pipe()
        arguments = map(str, (number, listener.fileno(), theirs, folder))
        command = [sys.executable, "-m", "service", WorkerPlace.OPTION, *arguments]
        self.process = subprocess.Popen(command, pass_fds=(listener.fileno(), theirs))
        os.close(theirs)
        self.number = number
        self.started = time.monotonic()
        self.silent_after = self.started + START_S

    def read_heartbeats(self) -> None:
        if os.read(self.heartbeat, 4096):
            self.silent_after = time.monotonic() + SILENCE_S
        else:
            time.sleep(0.01)  # the pipe is closed, because the process is exiting

    def failure(self) -> str | None:
        if self.process.poll() is not None:
            return f"ended with code {self.process.returncode}"
        return "is silent" if time.monotonic() > self.silent_after else None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.heartbeat)


def supervise(settings: Settings) -> int:
    """Serve with several workers until SIGTERM or SIGINT, and return the exit code."""
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
        while not ending.is_set():
            readable, _, _ = select([worker.heartbeat for worker in workers], [], [], HEARTBEAT_S)
            for place, worker in enumerate(workers):
                if worker.heartbeat in readable:
                    worker.read_heartbeats()
                failure = worker.failure()
                if failure is not None and time.monotonic() > worker.started + RESTART_S:
                    logger.error("worker %s %s; restarting it", worker.number, failure)
                    worker.close()
                    workers[place] = Worker(worker.number, listener, folder)
        for worker in workers:
            worker.process.terminate()
        listener.close()  # so that connections are refused when the workers stop listening
        _wait(workers, settings.shutdown_grace_s + settings.shutdown_timeout_s + KILL_S)
    return 0


def _wait(workers: list[Worker], seconds: float) -> None:
    end = time.monotonic() + seconds
    for worker in workers:
        try:
            worker.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.error(
                "worker %s has not stopped within %s s; killing it", worker.number, seconds
            )
        worker.close()
