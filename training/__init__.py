"""Train Bayesian networks and publish them to the model store.

The entry points are `training.fit` and the command `python -m training`.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from model_store.processes import processors

# torch reads these variables on import. Its threads synchronise about fifty times per step. Long
# spinning takes CPU time from threads that wait for a core. A spin count of 4,000 lasts
# microseconds and still avoids most wake-ups.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
os.environ.setdefault("OMP_NUM_THREADS", str(processors()))

# Commands print these records as plain lines.
log = logging.getLogger("dubito.training")


@contextmanager
def silence() -> Iterator[None]:
    """Suppress info messages."""
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
