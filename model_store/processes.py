"""Child processes: how they are started, and how they step back where others matter more."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
LEAST_NICE = 19


def available_processors() -> int:
    """How many processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_module(
    module: str, environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE` of these packages, which reads its standard input."""
    packages = str(Path(__file__).parents[1])
    path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
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
