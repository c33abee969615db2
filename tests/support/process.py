"""Memory and open files of processes."""

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def pss_bytes(pid):
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no Pss in smaps_rollup")


def anonymous_bytes(pid):
    """Return the anonymous memory of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no Anonymous in smaps_rollup")


def peak_bytes(pid):
    """Return the peak resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no VmHWM in status")


def open_files(pid):
    """Return the number of open file descriptors."""
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def children(pid):
    """Return the ids of child processes."""
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def is_running(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_stable(measure, seconds=30.0, quiet_s=0.5):
    """Wait until a value is unchanged for `quiet_s`, and return it."""
    end, value, since = time.monotonic() + seconds, measure(), time.monotonic()
    while time.monotonic() < since + quiet_s:
        assert time.monotonic() < end, f"still changing after {seconds} s"
        time.sleep(0.05)
        if (current := measure()) != value:
            value, since = current, time.monotonic()
    return value


HEAP_BYTES = 6 << 20


@contextmanager
def fresh_process() -> Iterator[Callable[..., Any]]:
    """Call functions in a fresh process, because earlier allocations would distort `peak_growth_bytes`."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield lambda function, *args: process.submit(function, *args).result()


def peak_growth_bytes(work: Callable[[], object]) -> int:
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallopt(-3, 1 << 20)  # return large blocks to the system, like the service
    library.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current value
    before = _read_kilobytes("VmRSS")
    work()
    return 1024 * (_read_kilobytes("VmHWM") - before)


def _read_kilobytes(name: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if name in x)
    return int(line.split()[1])
