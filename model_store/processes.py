"""Child processes: how they are started, and how they step back where others matter more."""

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
LEAST_NICE = 19
SECRET = ("DUBITO_", "AWS_", "AZURE_", "GOOGLE_")  # keys, and what opens buckets
READY = "ready"  # the first line of a process that is not to be trusted
# in which it must be ready: it imports for a second, on an idle machine for less
START_S = 120.0
LOOK_S = 0.05  # between looks at whether it is to be given up
STATUS = Path("/proc/self/status")  # of Linux


def processors(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many processors this process may use, within its container's limit.

    `cpu_max` is the file of cgroup v2: microseconds of processor time in each period, or `max`, and
    the period.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    available = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text(encoding="ascii").split()
        return available if quota == "max" else max(1, min(available, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no such limit here
        return available


def start_module(
    module: str, environment: Mapping[str, str], *arguments: str, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE` of these packages, which reads its standard input."""
    packages = str(Path(__file__).parents[1])
    path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        env={**environment, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        **options,
    )


def write_line(process: subprocess.Popen[bytes], content: Any) -> None:
    """Send a line of JSON to a process that may have ended."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(content).encode() + b"\n")
        process.stdin.flush()


class GivenUp(Exception):
    """A process that was not waited for, since everything ends."""


class AnsweringProcess:
    """A process that reads lines of JSON, and answers in lines. It may be killed.

    Args:
        environment: variables besides those of this process.
        is_trusted: whether it gets what is secret in the environment.
    """

    def __init__(
        self, module: str, environment: Mapping[str, str], is_trusted: bool = False
    ) -> None:
        hidden = () if is_trusted else SECRET
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self._process = start_module(
            module, {**kept, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._is_ready = False
        self._received = b""

    def is_ready(self, stopping: threading.Event) -> bool:
        """Wait until the process says `READY`; return whether it does.

        Raises:
            GivenUp: if `stopping` is set meanwhile.
        """
        self._is_ready = self._is_ready or self.line(START_S, stopping) is not None
        return self._is_ready

    def send(self, content: Any, data: bytes | bytearray = b"") -> None:
        """Send a line of JSON, and bytes after it, to a process that may have ended."""
        write_line(self._process, content)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def line(self, seconds: float, stopping: threading.Event) -> bytes | None:
        """Return the next line; None if none came in time, or the process has ended.

        Raises:
            GivenUp: if `stopping` is set meanwhile.
        """
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._received:
            if stopping.is_set():
                raise GivenUp
            left = end - time.monotonic()
            if left <= 0:
                return None
            if select.select([self._process.stdout], [], [], min(left, LOOK_S))[0]:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    return None
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def end(self) -> str:
        """Say how the process ended; one that has not is killed."""
        try:
            return describe_exit(self._process.wait(1.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "not in time"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def open_standard_files() -> None:
    """Have the files 0 to 2 open, also where a process was started without them: a socket would get
    their number, and what libraries print would go to it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == number  # the least that is free
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def answers_file() -> Any:
    """Return the file that a process answers to, its standard output; what libraries print is no
    answer."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def limit_memory(more: int) -> None:
    """Let this process have `more` bytes than it has now; no limit where the system does not say
    (macOS)."""
    try:
        lines = STATUS.read_text().splitlines()
    except FileNotFoundError:
        return
    has = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = has + more if hard == resource.RLIM_INFINITY else min(has + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_of_memory(error: BaseException | None) -> bool:
    """Return whether an error came of one that says that there is no memory left."""
    while error is not None:
        if isinstance(error, MemoryError) or "alloc" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def end_with_parent() -> None:
    """Have the system kill this process when the thread that started it is gone; on Linux alone."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def be_killed_first() -> None:
    """Have the system kill this process before others when memory runs out."""
    with suppress(OSError):  # where /proc is not to be written to
        Path("/proc/self/oom_score_adj").write_text("1000")


def be_idle() -> None:
    """Run only while no other process wants the processors, or seldom where the system has no
    SCHED_IDLE."""
    os.nice(LEAST_NICE)
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
