"""The board of a cluster's replicas: an actor that all find by its name, wherever they are.

What it holds is in memory. Where its node is lost, Ray starts another: evidence of drift begins
    anew, and the log
says so; pages of metrics are there again after some seconds.
"""

import logging
import time
from collections import deque
from typing import Any

import ray
from ray.exceptions import RayError

from service.models.drift import Drift, DriftReport, LiveRows, Watched
from service.shared_state.board import Board, Notice

logger = logging.getLogger("dubito")

NAME, NAMESPACE = "dubito-board", "dubito"
ANSWER_S = 5.0  # within which it answers, or is not reached
MOST_NOTICES = 1000
SILENT_S = 20.0  # after which a replica's page is no longer shown


class BoardActor:
    """What all replicas have in common. One call after the other."""

    def __init__(self) -> None:
        self._born = time.time_ns()  # another after a loss
        self._count = 0  # of notices so far
        self._notices: deque[tuple[int, str, Notice]] = deque(maxlen=MOST_NOTICES)
        self._pages: dict[str, tuple[float, bytes]] = {}
        self._drifts: dict[Watched, Drift] = {}

    def last(self) -> tuple[int, int]:
        """Return which board this is, and the number of the last notice."""
        return self._born, self._count

    def post(self, name: str, notice: Notice) -> None:
        """Take a process's notice."""
        self._count += 1
        self._notices.append((self._count, name, notice))

    def news(self, name: str, since: tuple[int, int]) -> tuple[tuple[int, int], list[Notice]]:
        """Return the last notice's number, and those of other processes since one."""
        born, last = since
        after = last if born == self._born else 0
        return self.last(), [notice for n, of, notice in self._notices if n > after and of != name]

    def put_page(self, name: str, page: bytes) -> None:
        """Take a process's metrics."""
        self._pages[name] = time.monotonic(), page

    def pages(self) -> dict[str, bytes]:
        """Return the pages of processes that have shown one of late."""
        now = time.monotonic()
        self._pages = {name: page for name, page in self._pages.items() if now - page[0] < SILENT_S}
        return {name: page for name, (_, page) in self._pages.items()}

    def take(self, watched: Watched, rows: LiveRows) -> None:
        """Take live rows into the evidence of all."""
        self._of(watched).take(rows)

    def report(self, watched: Watched) -> DriftReport:
        """Return the evidence of a version."""
        return self._of(watched).report()

    def reset(self, watched: Watched) -> None:
        """Have the evidence of a version begin anew."""
        self._of(watched).reset()

    def _of(self, watched: Watched) -> Drift:
        drift = self._drifts.get(watched)
        if (
            drift is None or (drift.watched.gaps != watched.gaps).any()
        ):  # a number that was given again
            drift = self._drifts[watched] = Drift(watched)
        return drift


class ClusterBoard(Board):
    """The board, as a replica sees it."""

    look_s = 1.0
    page_s = 5.0

    def __init__(self, name: str) -> None:
        """Begin with notices from now on; starts the actor where there is none.

        Raises:
            OSError: if it cannot be reached.
        """
        self.name = name
        self._actor = (
            ray.remote(BoardActor)
            .options(
                name=NAME,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
            )
            .remote()
        )
        self._seen: tuple[int, int] = self._asked("last")

    def post(self, notice: Notice) -> None:
        """Have all other replicas see a notice."""
        self._asked("post", self.name, notice)

    def news(self) -> list[Notice]:
        """Return others' notices since the last look."""
        seen, notices = self._asked("news", self.name, self._seen)
        if seen[0] != self._seen[0]:
            logger.warning(
                "the cluster's board was lost and is there again: evidence of drift begins anew"
            )
        self._seen = seen
        return list(notices)

    def put_page(self, page: bytes) -> None:
        """Show the others this replica's metrics."""
        self._asked("put_page", self.name, page)

    def pages(self) -> dict[str, bytes]:
        """Return the latest page of each replica."""
        pages: dict[str, bytes] = self._asked("pages")
        return pages

    def take(self, watched: Watched, rows: LiveRows) -> None:
        """Take live rows into the evidence of all."""
        self._asked("take", watched, rows)

    def report(self, watched: Watched) -> DriftReport:
        """Return what all replicas have seen of a version's live rows."""
        report: DriftReport = self._asked("report", watched)
        return report

    def reset(self, watched: Watched) -> None:
        """Have the evidence of a version begin anew."""
        self._asked("reset", watched)

    def _asked(self, what: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, what).remote(*arguments), timeout=ANSWER_S)
        except RayError as error:
            raise OSError(f"the cluster's board does not answer: {type(error).__name__}") from None
