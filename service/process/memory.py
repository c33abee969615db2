"""Memory that was freed goes back to the system: large requests and versions leave holes that the C library keeps."""

import ctypes
import gc
import threading

PAUSE_S = 5.0
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


class FreedMemory:
    """A thread that gives back what was freed, again and again. It takes milliseconds.

    Refused requests leave cycles of frames and errors that hold bodies of megabytes, and are looked for here: little
    beside them is not frozen, and in an idle process nothing else would look.
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
