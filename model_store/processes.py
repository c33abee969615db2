"""What a process says of itself to the system, where others matter more."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
LEAST_NICE = 19


def end_with_parent() -> None:
    """Have the system kill this process when the thread that started it is gone; elsewhere than on
    Linux nothing."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def be_killed_first() -> None:
    """Where memory runs out all the same, have the system kill this process and not the one that
    serves."""
    with suppress(OSError):  # where /proc is not to be written to
        Path("/proc/self/oom_score_adj").write_text("1000")


def be_idle() -> None:
    """Run only while no other process wants the processors, or where the system knows no such
    thing, seldom."""
    os.nice(LEAST_NICE)
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
