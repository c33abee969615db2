"""The exchange with the other processes: a thread that sees their notices, and shows them what they
must know."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from model_store.errors import DubitoError
from service.shared_state.board import Board, Notice
from service.shared_state.pages import merged

logger = logging.getLogger("dubito")


class Siblings:
    """What this process tells the others and hears of them. One that serves alone has none."""

    def __init__(
        self,
        board: Board | None,
        actions: Mapping[str, Callable[..., Any]],
        page: Callable[[], bytes],
        bring_drift: Callable[[], None],
    ) -> None:
        """Begin.

        Args:
            actions: what notices can ask for.
            page: returns this process's metrics.
            bring_drift: brings the live rows that it saw to the evidence of all.
        """
        self.board = board
        self.actions = actions
        self.page = page
        self._bring_drift = bring_drift
        self._next_page = 0.0
        self._reached = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="siblings", daemon=True)

    def start(self) -> None:
        """Begin the exchange, if there may be other processes."""
        if self.board is not None:
            self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stopping.set()

    def post(self, action: str, *arguments: str) -> None:
        """Have all other processes do something; the words of `arguments` are handed on. Takes as
        long as a file."""
        assert action in self.actions
        if self.board is not None:
            try:
                self.board.post([action, *arguments])
            except OSError as error:
                logger.error("%s reaches no other process: %s", action, error)

    def pages(self) -> bytes:
        """Return one page of all processes' metrics: this one's as they are now, others' a little
        older."""
        if self.board is None:
            return self.page()
        try:
            pages = self.board.pages()
        except OSError:
            pages = {}
        return merged({**pages, self.board.name: self.page()})

    def _exchange(self) -> None:
        assert self.board is not None
        while not self._stopping.wait(self.board.look_s):
            try:
                self._once(self.board)
            except OSError as error:
                if self._reached:
                    logger.error(
                        "other processes that serve cannot be reached: %s; trying again", error
                    )
                self._reached = False
            except Exception:
                logger.exception("the exchange with other processes failed; trying again")
            else:
                if not self._reached:
                    logger.info("other processes that serve can be reached again")
                self._reached = True

    def _once(self, board: Board) -> None:
        for notice in board.news():
            self._act(notice)
        self._bring_drift()
        if time.monotonic() >= self._next_page:
            board.put_page(self.page())
            self._next_page = time.monotonic() + board.page_s

    def _act(self, notice: Notice) -> None:
        action, *arguments = notice
        try:
            self.actions[action](*arguments)
        except DubitoError as error:  # of what is not there for this process
            logger.info("another process's %s: %s", action, error)
        except Exception:
            logger.exception("another process's %s failed", action)
