"""Temporary changes to process-wide settings."""

import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Override(ContextDecorator, Generic[T]):
    """A context manager or decorator that changes a setting temporarily.

    Contexts of several threads can overlap. The last one to end restores the previous value.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], Any], value: T) -> None:
        self._read, self._write, self._value = read, write, value
        self._previous = value
        self._users = 0
        self._lock = threading.RLock()  # a finalizer can end a context at any point

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._previous = self._read()
                self._write(self._value)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._write(self._previous)
