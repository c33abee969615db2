"""A child process that tries to read untrusted Parquet files with limited resources.

`service.models.preflights` starts it and sends the content of each file. A fork of the process
reads the file with the same code as the service.
"""

import gc
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
from model_store.processes import READY, become_child, describe_exit, is_out_of_memory, limit_memory
from model_store.sources.parquet import ParquetFile, to_parquet


def main() -> None:
    send = become_child()
    small = to_parquet(pa.table({"x": [0.0]}))
    smallest = small, {"shape": [1], "minimum": 0, "maximum": 1}, 1 << 30, 60.0
    memory_to_read(smallest[0], InputSpec.model_validate(smallest[1]))  # import libraries
    gc.freeze()
    overhead = read_in_fork(*smallest)  # memory of libraries
    send(READY)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        content = sys.stdin.buffer.read(request.pop("size"))
        answer = read_in_fork(content, **request)
        if isinstance(answer, int) and isinstance(overhead, int):
            answer = max(0, answer - overhead)
        send(answer)


def read_in_fork(content: bytes, spec: dict[str, Any], max_bytes: int, seconds: float) -> int | str:
    """Read a file in a forked process. Return the bytes used, or describe the failure."""
    received, sent = os.pipe()
    copy = os.fork()
    if copy == 0:
        status = 1
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # ends the process
            limit_memory(max_bytes)
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
    """Read a file and return the increase in peak memory, in bytes."""
    before = _peak_memory()
    try:
        file = ParquetFile(content, spec, "")
        for _ in chain(file.id_parts(), file.parts()):
            pass
    except InvalidInput as error:
        if is_out_of_memory(error):
            raise
    return _peak_memory() - before


def _peak_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
