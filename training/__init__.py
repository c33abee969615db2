"""Networks, posteriors, fitting, calibration and export.

Start from `training.fit` in Python and from `python -m training` on the command line.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from model_store.processes import processors

# torch reads these variables once, on import. Its threads wait for each other some fifty times a
# step. A long spin takes processor time from threads that other programs have preempted. A spin of
# 4,000 turns lasts microseconds and still avoids most wake-ups.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
os.environ.setdefault("OMP_NUM_THREADS", str(processors()))

# The commands print its records as plain lines.
log = logging.getLogger("dubito.training")


@contextmanager
def silence() -> Iterator[None]:
    """Suppress info messages, for example while data are read a second time."""
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
