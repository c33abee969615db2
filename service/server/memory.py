"""Memory that was freed goes back to the system: large requests and versions leave holes that the C
library keeps."""

import ctypes
import gc
import threading

PAUSE_S = 5.0
LARGE_BYTES = 8 << 20  # bodies, pools and answers; what a micro-batch takes is smaller
HEAPS = 2  # in place of eight a core: what one thread freed serves the others

_C = ctypes.CDLL(None)
_TRIM, _OPTION = getattr(_C, "malloc_trim", None), getattr(_C, "mallopt", None)  # glibc has them
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8


def keep_heaps_whole() -> None:
    """Have large blocks go back to the system when they are freed, and threads share heaps; before
    there are threads.

    By default the C library takes blocks of up to 32 MiB from a heap of the thread's own once one
    was freed, and a small block behind one that was freed keeps it.
    """
    if _OPTION is not None:
        _OPTION(_MMAP_THRESHOLD, LARGE_BYTES)
        _OPTION(_ARENA_MAX, HEAPS)


class FreedMemory:
    """A thread that gives back what was freed, again and again. It takes milliseconds.

    Cycles are looked for here too: little is not frozen, and in an idle process nothing else would
        look.
    """

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._give_back, name="freed-memory", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._ending.set()
        self._thread.join()

    def _give_back(self) -> None:
        while not self._ending.wait(PAUSE_S):
            gc.collect()
            if _TRIM is not None:
                _TRIM(0)
