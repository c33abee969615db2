"""What training says as it goes: log records of `dubito.training`, which its commands print as
plain lines."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("dubito.training")


@contextmanager
def unsaid() -> Iterator[None]:
    """Keep messages of what was said already."""
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def printed(is_quiet: bool = False) -> Iterator[None]:
    """Print messages to standard output, the message alone; of a quiet command, none."""
    handler, level = logging.StreamHandler(sys.stdout), log.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.WARNING if is_quiet else logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
