"""The offline half: networks, posteriors, fitting, calibration and export.

`training.fit` is its door for Python, `python -m training` for the command line.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from model_store.processes import processors

# Before torch is imported, which reads them once. Its threads wait for each other some fifty times
# a step. Those that spin for long use up the time of a thread whose processor another program has:
# 4,000 turns, some microseconds, cost little of it, and save most wakings.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
os.environ.setdefault("OMP_NUM_THREADS", str(processors()))

# What training says as it goes. Its commands print it as plain lines.
log = logging.getLogger("dubito.training")


@contextmanager
def silence() -> Iterator[None]:
    """Say nothing, while data are read once more."""
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
