"""A process that does shards: `python -m service.batch.process`, started by `service.batch.here`.

It is told on its standard input what the job is, then a shard's number in each line, and says on
its standard output how far it is and what came of each. It ends with whoever started it.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict

from model_store.processes import be_killed_first, end_with_parent
from service.batch.shard_work import Told, Worker
from service.server.process import keep_heaps_whole

SAY_S = 0.5  # between what is said of a shard


def main() -> None:
    """Do shards until there is no more input."""
    end_with_parent()
    be_killed_first()
    keep_heaps_whole()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the one that started it too
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # so that nothing else is said there
    worker = Worker(Told.of_json(sys.stdin.readline()), threads=1)
    for line in sys.stdin:
        number, told = int(line), time.monotonic()

        def report(rows: int, number: int = number) -> None:
            nonlocal told
            if time.monotonic() - told > SAY_S:
                told = time.monotonic()
                output.write(json.dumps({"shard": number, "rows": rows}).encode() + b"\n")

        output.write(json.dumps(asdict(worker.answered(number, report))).encode() + b"\n")


if __name__ == "__main__":
    main()
