"""The offline half: networks, posteriors, fitting, calibration and export.

`training.fit` is its door for Python, `python -m training` for the command line.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from model_store.processes import processors

# Before torch is imported, which reads them once. Its threads wait for each other some fifty times
# a step: where another program has one of their processors, those that spin use up its time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
