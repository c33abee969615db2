"""Child processes that exchange lines of JSON with their parent.

The parent uses `ChildProcess`, and the child calls `become_child`.
"""

import ctypes
import errno
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from model_store.types import Content

PR_SET_PDEATHSIG = 1
MAX_NICE = 19
# Variables that every child process inherits. Others can contain secrets.
INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TMP|TEMP|PYTHON\w*|VIRTUAL_ENV"
    r"|GLIBC_TUNABLES|(LD|XDG|MALLOC|OMP|GOMP|KMP|MKL|OPENBLAS|ARROW|CUDA|CUBLAS|NVIDIA)_\w+"
)
# Variables for child processes that read the store or fit a model
TRUSTED = re.compile(
    r"DUBITO_(STORE|STATE|DATA|RUNS|GRAPHS|CACHE|CACHE_BYTES|VERIFY_KEY_FILE|THREADS)"
    r"|(AWS|AZURE|GOOGLE|GCE|IDENTITY|MSI)_\w+|SSL_CERT_(FILE|DIR)|\w+_PROXY|TORCH\w*|MPLCONFIGDIR",
    re.IGNORECASE,
)
# Texts of the C++ library, onnxruntime (its arena, CUDA and cuBLAS) and the system
OUT_OF_MEMORY = re.compile(
    r"std::bad_alloc|Failed to allocate memory for requested buffer of size \d"
    r"|Available memory of \d+ is smaller than requested bytes of \d"
    r"|CUDA failure 2: out of memory|CU(BLAS|DNN|FFT)_(STATUS_)?ALLOC_FAILED"
    rf"|{re.escape(os.strerror(errno.ENOMEM))}"
)
TOKENIZING = {"TOKENIZERS_PARALLELISM": "false"}  # in the calling thread
READY = "ready"  # the first line of a child
START_S = 120.0
POLL_S = 0.05  # interval between checks for a stop request
END_S = 1.0  # for a child to exit after closing its output
STATUS = Path("/proc/self/status")  # Linux only


def processors(
    cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the number of processors that the affinity and cgroups of this process allow."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    available = len(affinity(0)) if affinity else os.cpu_count() or 1
    limits = [_cpu_limit(folder) for folder in _cpu_cgroups(cgroups, membership)]
    return max(1, min([available, *(limit for limit in limits if limit is not None)]))


def _cpu_cgroups(cgroups: Path, membership: Path) -> Iterator[Path]:
    yield cgroups
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, or both versions
            roots = [cgroups, cgroups / "unified"]
        elif "cpu" in controllers.split(","):
            roots = [cgroups / controllers, cgroups / "cpu"]
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        yield from (root / folder for root in roots for folder in (inner, *inner.parents))


def _cpu_limit(cgroup: Path) -> int | None:
    """Return a cgroup's limit in whole processors, or None if it has no limit."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (cgroup / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (cgroup / "cpu.cfs_period_us").read_text(encoding="ascii")
        return int(quota) // int(period) if int(quota) >= 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no limit
        return None


def inherited_environment(is_trusted: bool = False) -> dict[str, str]:
    """Return a child's environment, with credentials and settings of fits only if it is trusted."""
    patterns = (INHERITED, TRUSTED) if is_trusted else (INHERITED,)
    names = [name for name in os.environ if any(p.fullmatch(name) for p in patterns)]
    return {name: os.environ[name] for name in names}


def start_module(
    module: str, environment: Mapping[str, str], *arguments: str, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE` with a pipe as standard input."""
    packages = str(Path(__file__).parents[1])
    path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        env={**TOKENIZING, **environment, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        **options,
    )


def write_line(process: subprocess.Popen[bytes], content: Any, data: Content = b"") -> None:
    """Send a line of JSON and binary data. Errors are ignored if the process has exited."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(content).encode() + b"\n")
        process.stdin.write(data)
        process.stdin.flush()


class StopRequested(Exception):
    """Raised when the parent shuts down while waiting for a response."""


class NoAnswer(Exception):
    """Raised when a child process fails to start, crashes or times out."""

    def __init__(self, reason: str, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_late = is_late


class ChildProcess:
    """A process that runs a module that calls `become_child`. Close it after a `NoAnswer`."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._process = start_module(
            module,
            {**inherited_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._is_ready = False
        self._received = b""

    def ask(
        self, request: Any, seconds: float, stopping: threading.Event, data: Content = b""
    ) -> Any:
        """Send a request with optional binary data and return the child's response.

        Raises:
            NoAnswer: if the child crashes or does not respond within `seconds`.
            StopRequested: if `stopping` is set.
        """
        if not self._is_ready:
            try:
                self._receive(START_S, stopping)
            except NoAnswer as error:
                raise NoAnswer(f"not started: {error}") from None
            self._is_ready = True
        write_line(self._process, request, data)
        return self._receive(seconds, stopping)

    def _receive(self, seconds: float, stopping: threading.Event) -> Any:
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._received:
            if stopping.is_set():
                raise StopRequested
            left = end - time.monotonic()
            if left <= 0:
                raise NoAnswer("not in time", is_late=True)
            if select.select([self._process.stdout], [], [], min(left, POLL_S))[0]:
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
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def become_child() -> Callable[[Any], None]:
    """Set up this process as a child and return a function that sends responses.

    Standard output is redirected to standard error, so that libraries can print.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    end_with_parent()
    prefer_oom_kill()

    def send(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    return send


def open_standard_files() -> None:
    """Open the standard input, output and error streams if they are closed.

    Otherwise libraries could print into a socket with the same file descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == number  # the lowest free descriptor
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def limit_memory(extra: int) -> None:
    """Limit this process to `extra` bytes beyond its current memory use (Linux only)."""
    try:
        lines = STATUS.read_text().splitlines()
    except FileNotFoundError:
        return
    current = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = current + extra if hard == resource.RLIM_INFINITY else min(current + extra, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def end_with_parent() -> None:
    """Terminate this process when its parent thread exits (Linux only)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prefer_oom_kill() -> None:
    """Make the kernel kill this process first if the system runs out of memory."""
    with suppress(OSError):  # /proc may be read-only
        Path("/proc/self/oom_score_adj").write_text("1000")


def run_when_idle() -> None:
    os.nice(MAX_NICE)
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
