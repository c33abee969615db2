"""Limit the memory of a group of processes, like a container."""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

VERSION_2, VERSION_1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class MemoryGroup:
    """A cgroup with a limit on memory."""

    folder: Path

    @property
    def joins(self) -> list[str]:
        """Wrap a command so that it runs in the group."""
        return ["/bin/sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$0" "$@"']

    @property
    def kills(self) -> int:
        """Number of processes that the kernel killed for lack of memory."""
        for name in ("memory.events", "memory.oom_control"):
            if (self.folder / name).exists():
                lines = (self.folder / name).read_text().splitlines()
                return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        raise AssertionError("a group that says nothing of kills")


@contextmanager
def memory_group(most_bytes: int) -> Iterator[MemoryGroup | None]:
    root, limit = (VERSION_2, "memory.max")
    if (VERSION_1 / "memory.limit_in_bytes").exists():
        root, limit = VERSION_1, "memory.limit_in_bytes"
    folder = root / f"dubito-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(most_bytes))
    except OSError:
        if folder.exists():
            folder.rmdir()
        yield None
        return
    try:
        yield MemoryGroup(folder)
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:  # its processes are about to end
                time.sleep(0.1)
