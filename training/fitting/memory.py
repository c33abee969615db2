"""The C library's memory."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Have glibc keep large blocks that are freed, and hand them out again.

    Blocks of more than 32 MB it gives back to the system at once. A convolution's activations are
    as large, and every step would find all their pages anew, a quarter of its time. Other C
    libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
