"""Train Bayesian networks, and publish them to the model store.

The entry points are `training.fit` and the command `python -m training`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# Commands print these records as plain lines.
log = logging.getLogger("dubito.training")


@contextmanager
def silence() -> Iterator[None]:
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
