"""The offline half: networks, posteriors, fitting, calibration and export.

`training.fit` is its door for Python, `python -m training` for the command line.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
