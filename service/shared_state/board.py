"""Where processes that serve as one leave what the others must know. Of workers it is a folder that
all share."""

import fcntl
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.numpy import load, save

from service.models.drift import Drift, DriftReport, LiveRows, Watched
from service.server.supervisor import WorkerPlace

NOTICES = "notices"

Notice = list[str]  # what to do, and with what


class Board(ABC):
    """Notices, pages of metrics and evidence of drift, of all processes.

    Any call may take as long as a file or a message does, and raises OSError where the others
    cannot be reached.

    Attributes:
        name: of this process, unlike those of the others: the label `worker` of its metrics.
        look_s: seconds between looks for notices.
        page_s: seconds between pages.
    """

    name: str
    look_s: float
    page_s: float

    @abstractmethod
    def post(self, notice: Notice) -> None:
        """Have all other processes that run now see a notice."""

    @abstractmethod
    def news(self) -> list[Notice]:
        """Return others' notices since the last look, or since this process began."""

    @abstractmethod
    def put_page(self, page: bytes) -> None:
        """Show the others this process's metrics, as Prometheus' text."""

    @abstractmethod
    def pages(self) -> dict[str, bytes]:
        """Return the latest page of each process, by its name."""

    @abstractmethod
    def take(self, watched: Watched, rows: LiveRows) -> None:
        """Take live rows into the evidence of all."""

    @abstractmethod
    def report(self, watched: Watched) -> DriftReport:
        """Return what all have seen of a version's live rows."""

    @abstractmethod
    def reset(self, watched: Watched) -> None:
        """Have the evidence of a version begin anew."""


class FolderBoard(Board):
    """The board of a supervisor's workers.

    A notice is a line of one file. A page is a file of its worker. The evidence of a version is a
    file too, which is read and written under a lock: a worker that is replaced takes none of it
    along.
    """

    look_s = 0.2
    page_s = 1.0

    def __init__(self, place: WorkerPlace) -> None:
        """Begin with notices from now on."""
        self.name = str(place.worker)
        self.folder = place.folder
        with (self.folder / NOTICES).open("a") as file:
            self._read = file.tell()

    def post(self, notice: Notice) -> None:
        """Have all other workers see a notice."""
        line = json.dumps([self.name, *notice]) + "\n"
        with (self.folder / NOTICES).open("ab", buffering=0) as file:
            file.write(line.encode())  # in one piece

    def news(self) -> list[Notice]:
        """Return others' notices since the last look."""
        with (self.folder / NOTICES).open("rb") as file:
            file.seek(self._read)
            lines = file.readlines()
        self._read += sum(map(len, lines))
        notices = [json.loads(line) for line in lines]
        return [notice for worker, *notice in notices if worker != self.name]

    def put_page(self, page: bytes) -> None:
        """Show the others this worker's metrics."""
        self._write(self.folder / f"{self.name}.prom", page)

    def pages(self) -> dict[str, bytes]:
        """Return the latest page of each worker."""
        return {path.stem: path.read_bytes() for path in sorted(self.folder.glob("*.prom"))}

    def take(self, watched: Watched, rows: LiveRows) -> None:
        """Take live rows into the evidence of all."""
        with self._evidence(watched) as (drift, path):
            drift.take(rows)
            self._write(path, save(drift.state()))

    def report(self, watched: Watched) -> DriftReport:
        """Return what all workers have seen of a version's live rows."""
        with self._evidence(watched) as (drift, _):
            return drift.report()

    def reset(self, watched: Watched) -> None:
        """Have the evidence of a version begin anew."""
        with self._evidence(watched) as (_, path):
            path.unlink(missing_ok=True)

    @contextmanager
    def _evidence(self, watched: Watched) -> Iterator[tuple[Drift, Path]]:
        """Yield the evidence of a version and its file, while no other worker has it."""
        of = hashlib.blake2b(f"{watched.name} {watched.version} ".encode(), digest_size=16)
        of.update(watched.gaps.tobytes())  # a number may be given again once a version is deleted
        path = self.folder / f"{of.hexdigest()}.drift"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            drift = Drift(watched)
            if path.exists():
                drift.restore(load(path.read_bytes()))
            yield drift, path

    def _write(self, path: Path, content: bytes) -> None:
        draft = path.with_suffix(f".draft-{self.name}")
        draft.write_bytes(content)
        draft.rename(path)
