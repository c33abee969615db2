"""What processes take: memory, threads, open files."""

import time
from pathlib import Path


def pss_bytes(pid):
    """Memory of a process in bytes, its share of what is shared."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no Pss in smaps_rollup")


def own_bytes(pid):
    """Memory of a process in bytes that no file backs: what it holds itself, no matter who else maps the
    same libraries."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no Anonymous in smaps_rollup")


def threads(pid):
    """How many threads a process has."""
    return len([*Path(f"/proc/{pid}/task").iterdir()])


def open_files(pid):
    """How many file descriptors a process has."""
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def children(pid):
    """The process ids of a process's children."""
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def settled(measure, seconds=30.0, quiet_s=0.5):
    """A measured number once it has stayed the same for `quiet_s`."""
    end, value, since = time.monotonic() + seconds, measure(), time.monotonic()
    while time.monotonic() < since + quiet_s:
        assert time.monotonic() < end, f"still changing after {seconds} s"
        time.sleep(0.05)
        if (now := measure()) != value:
            value, since = now, time.monotonic()
    return value
