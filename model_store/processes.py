"""Child processes: start, bound, watch and end them.

The parent holds a `ChildProcess` and sends it requests, each a line of JSON. The child calls
`become_child` and answers with lines. It may crash, take too long or be killed: the parent gets a
`NoAnswer`. `start_module` starts every other process.
"""

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
MAX_NICE = 19
SECRET = ("DUBITO_", "AWS_", "AZURE_", "GOOGLE_")  # prefixes: keys and access to buckets
READY = "ready"  # the first line of a child that runs untrusted files
START_S = 120.0  # until it is ready; on an idle machine imports take a second
LOOK_S = 0.05  # between looks at whether everything ends
END_S = 1.0  # until a child that closed its output has ended
STATUS = Path("/proc/self/status")  # on Linux


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
    """Start `python -m MODULE` from these packages, with a pipe as its standard input."""
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


class StopRequested(Exception):
    """The parent is about to end and does not wait for an answer."""


class NoAnswer(Exception):
    """A child gave no answer: it did not start, ended, or took too long."""

    def __init__(self, reason: str, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_late = is_late


class ChildProcess:
    """A process that answers requests; after a `NoAnswer` it must be closed.

    Args:
        module: calls `become_child`.
        environment: variables in addition to those of this process.
        is_trusted: whether the child inherits secrets from the environment.
    """

    def __init__(
        self, module: str, environment: Mapping[str, str], is_trusted: bool = False
    ) -> None:
        hidden = () if is_trusted else SECRET
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(hidden)
        }
        self._process = start_module(
            module, {**inherited, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._is_ready = False
        self._received = b""

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(
        self,
        request: Any,
        seconds: float,
        stopping: threading.Event,
        data: bytes | bytearray = b"",
    ) -> Any:
        """Send a request, and bytes after it, to a child that is `READY`; return the answer.

        Raises:
            NoAnswer: if none comes within `seconds`.
            StopRequested: if `stopping` is set meanwhile.
        """
        if not self._is_ready:
            try:
                self.receive(START_S, stopping)
            except NoAnswer as error:
                raise NoAnswer(f"not started: {error}") from None
            self._is_ready = True
        self.send(request, data)
        return self.receive(seconds, stopping)

    def send(self, request: Any, data: bytes | bytearray = b"") -> None:
        write_line(self._process, request)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def receive(self, seconds: float, stopping: threading.Event) -> Any:
        """Return the next answer; raises as `ask` does."""
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._received:
            if stopping.is_set():
                raise StopRequested
            left = end - time.monotonic()
            if left <= 0:
                raise NoAnswer("not in time", is_late=True)
            if select.select([self._process.stdout], [], [], min(left, LOOK_S))[0]:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise NoAnswer(self._describe_end())
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _describe_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            return describe_exit(self._process.wait(END_S))
        return "it closed its output"

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def become_child() -> Callable[[Any], None]:
    """Prepare this process as a `ChildProcess`; return the function that sends an answer.

    Output that libraries print does not reach the parent.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    end_with_parent()
    prefer_oom_kill()

    def send(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    return send


def open_standard_files() -> None:
    """Open the files 0 to 2 if the process was started without them.

    Otherwise a socket gets one of these numbers, and libraries print into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == number  # the lowest free number
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def limit_memory(extra: int) -> None:
    """Limit this process to `extra` bytes beyond its current memory; no limit on macOS."""
    try:
        lines = STATUS.read_text().splitlines()
    except FileNotFoundError:
        return
    current = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = current + extra if hard == resource.RLIM_INFINITY else min(current + extra, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes means that memory ran out."""
    while error is not None:
        if isinstance(error, MemoryError) or "alloc" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def end_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends (Linux only)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prefer_oom_kill() -> None:
    """Let the system kill this process before others when memory runs out."""
    with suppress(OSError):  # /proc may be read-only
        Path("/proc/self/oom_score_adj").write_text("1000")


def run_when_idle() -> None:
    """Run only while the processors are idle, or at low priority without SCHED_IDLE."""
    os.nice(MAX_NICE)
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
