"""How many processors this process may use."""

import os


def available_processors() -> int:
    """Return how many processors this process may run on, or where the system does not say, how
    many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
