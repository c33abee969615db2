"""Read Parquet files where it may fail: `python -m model_store.sources.preflight`.

`service.api.file_preflights` starts it. It reads a line of JSON for each file, and its content, and
answers with a line. Each file is read by a copy of this process, whole and by the very code that
the service then reads it with, within bounds of memory and time that the system keeps.
"""

import gc
import io
import json
import os
import resource
import signal
import sys
from itertools import chain
from typing import Any

import pyarrow as pa

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from model_store.processes import (
    READY,
    answers_file,
    be_killed_first,
    describe_exit,
    end_with_parent,
    is_of_memory,
    limit_memory,
)
from model_store.sources.parquet import ParquetFile, write_tables


def main() -> None:
    answers = answers_file()
    end_with_parent()
    be_killed_first()
    small = io.BytesIO()
    write_tables(small, [pa.table({"x": [0.0]})])
    usual = small.getvalue(), {"shape": [1], "minimum": 0, "maximum": 1}, 1 << 30, 60.0
    memory_to_read(usual[0], InputSpec.model_validate(usual[1]))  # imports what reading needs
    gc.freeze()
    least = in_copy(*usual)  # that a copy takes of any file: pages of libraries
    print(READY, file=answers, flush=True)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        content = sys.stdin.buffer.read(asked.pop("size"))
        found = in_copy(content, **asked)
        if isinstance(found, int) and isinstance(least, int):
            found = max(0, found - least)
        print(json.dumps(found), file=answers, flush=True)


def in_copy(content: bytes, spec: dict[str, Any], most_bytes: int, seconds: float) -> int | str:
    """Return how many bytes of memory reading a file takes, or how a process ended that tried."""
    received, sent = os.pipe()
    copy = os.fork()
    if copy == 0:
        status = 1
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # ends the process
            limit_memory(most_bytes)
            os.write(sent, b"%d" % memory_to_read(content, InputSpec.model_validate(spec)))
            status = 0
        finally:
            os._exit(status)
    os.close(sent)
    with os.fdopen(received, "rb") as file:
        answer = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    return int(answer) if code == 0 else describe_exit(code)


def memory_to_read(content: bytes, spec: InputSpec) -> int:
    """Return how many bytes more than now reading a file takes, as far as it can be read."""
    before = _most_memory()
    try:
        file = ParquetFile(content, spec, "")
        for _ in chain(file.id_parts(), file.parts()):
            pass
    except InvalidInput as error:
        if is_of_memory(error):
            raise
    return _most_memory() - before


def _most_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
