"""The metrics of several worker processes on one page.

A worker writes its page into a folder that all share, every second; whichever is asked answers with all pages, each
sample with the label `worker`. Sums over workers are the reader's: `sum without (worker) (...)`.
"""

import logging
import threading
from collections.abc import Callable

from service.process.supervisor import WorkerPlace

logger = logging.getLogger("dubito")

WRITE_S = 1.0


class WorkerMetrics:
    """The metrics pages of all workers. Of a process that serves alone it is its own page."""

    def __init__(self, page: Callable[[], bytes], place: WorkerPlace | None) -> None:
        self.page = page
        self.place = place
        self._stopping = threading.Event()
        self._writer = threading.Thread(target=self._write, name="metrics-page", daemon=True)

    def start(self) -> None:
        """Begin to write this worker's page, if there are others."""
        if self.place is not None:
            self._writer.start()

    def stop(self) -> None:
        """End that."""
        self._stopping.set()

    def all(self) -> bytes:
        """Return one page of all workers' metrics: this one's as they are now, others' at most a second old."""
        if self.place is None:
            return self.page()
        pages = {path.stem: path.read_bytes().decode() for path in sorted(self.place.folder.glob("*.prom"))}
        pages[str(self.place.worker)] = self.page().decode()
        return merged(pages).encode()

    def _write(self) -> None:
        assert self.place is not None
        path = self.place.folder / f"{self.place.worker}.prom"
        while not self._stopping.wait(WRITE_S):
            try:
                draft = path.with_suffix(".draft")
                draft.write_bytes(self.page())
                draft.rename(path)
            except OSError as error:
                logger.error("cannot write the page of metrics: %s", error.strerror)


def merged(pages: dict[str, str]) -> str:
    """Return Prometheus pages as one, each sample with its page's key as label `worker`."""
    families: dict[str, list[str]] = {}
    for worker, page in sorted(pages.items()):
        samples: list[str] = []
        for line in page.splitlines():
            if line.startswith("# HELP "):
                samples = families.setdefault(line.split(" ")[2], [line])
            elif line.startswith("# "):
                if line not in samples:
                    samples.append(line)
            else:
                name, bracket, rest = line.partition("{")
                if bracket:
                    samples.append(f'{name}{{worker="{worker}",{rest}')
                else:
                    name, _, value = line.partition(" ")
                    samples.append(f'{name}{{worker="{worker}"}} {value}')
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
