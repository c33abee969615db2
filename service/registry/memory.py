"""The C library's memory."""

import ctypes

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


def give_back_freed_memory() -> None:
    """Return to the system what was freed; glibc else keeps most of it. Takes some milliseconds."""
    if _TRIM is not None:
        _TRIM(0)
