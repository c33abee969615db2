"""What one worker is told reaches all: administrators ask a service, and one of its workers answers.

A notice is a line in a file of the folder that all workers share. Each worker looks for new lines several times a
second, and does what they say; the one that wrote a notice has done it already.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from model_store.errors import DubitoError
from service.process.supervisor import WorkerPlace

logger = logging.getLogger("dubito")

LOOK_S = 0.2
FILE = "notices"


class Notices:
    """Notices of all workers. A process that serves alone has none."""

    def __init__(self, place: WorkerPlace | None, actions: Mapping[str, Callable[..., Any]]) -> None:
        """Begin with what is written from now on; `actions` are what notices can ask for."""
        self.place = place
        self.actions = actions
        self._read = 0
        self._stopping = threading.Event()
        self._reader = threading.Thread(target=self._follow, name="notices", daemon=True)
        if place is not None:
            with (place.folder / FILE).open("a") as file:
                self._read = file.tell()

    def start(self) -> None:
        """Begin to look for notices, if there are other workers."""
        if self.place is not None:
            self._reader.start()

    def stop(self) -> None:
        """End that."""
        self._stopping.set()

    def post(self, action: str, *arguments: str) -> None:
        """Have all other workers do something; the words of `arguments` are handed on. Writes a file."""
        assert action in self.actions
        if self.place is not None:
            line = json.dumps([self.place.worker, action, *arguments]) + "\n"
            with (self.place.folder / FILE).open("ab", buffering=0) as file:
                file.write(line.encode())  # in one piece

    def _follow(self) -> None:
        assert self.place is not None
        while not self._stopping.wait(LOOK_S):
            try:
                with (self.place.folder / FILE).open("rb") as file:
                    file.seek(self._read)
                    lines = file.readlines()
            except OSError as error:
                logger.error("cannot read the notices of other workers: %s", error.strerror)
                continue
            for line in lines:
                self._read += len(line)
                worker, action, *arguments = json.loads(line)
                if worker != self.place.worker:
                    self._act(action, arguments)

    def _act(self, action: str, arguments: list[str]) -> None:
        try:
            self.actions[action](*arguments)
        except DubitoError as error:  # of what is not there for this worker
            logger.info("another worker's %s: %s", action, error)
        except Exception:
            logger.exception("another worker's %s failed", action)
