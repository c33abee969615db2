"""Errors of the domain. They know nothing of HTTP; `service.api.problems` maps each to a status.

DubitoError
├── InvalidInput          a value that a person gave: the field, what was expected, what came
├── Conflict              a value that goes against one that was accepted before
├── StoreError
│   ├── NotFound          no such model, version or alias
│   ├── BrokenArtifact    a version that must not be served: the file and what is wrong with it
│   ├── UnsupportedFormat a version written in a format that this reader does not know
│   └── StoreUnreachable  a bucket that cannot be reached, or refuses
├── OutOfMemory           a model whose graphs take more memory than they may for these rows
├── OverQuota             files of one owner's jobs take more than they may
└── StateUnusable         jobs and labels cannot be read or written
    └── NoSpace           the disk is full
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

MOST_ERRORS = 10  # that are told of at once


class DubitoError(Exception):
    """Any error that Dubito raises on purpose; its text is fit to be shown to a user."""


class InvalidInput(DubitoError):
    """A value that cannot be used. The text names the field, what was expected and what came."""

    def __init__(self, field: str, expected: str, got: str) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field = field
        self.expected = expected
        self.got = got
        self.others: Sequence[InvalidInput] = ()  # that were found with it

    def renamed(self, rename: Callable[[str], str]) -> "InvalidInput":
        """Return the same error, and those found with it, of fields by other names."""
        errors = (self, *self.others)
        return all_of([InvalidInput(rename(e.field), e.expected, e.got) for e in errors])


class Conflict(DubitoError):
    """A value that goes against one that was accepted before."""


class StoreError(DubitoError):
    """Something about the model store or one of its artifacts."""


class NotFound(StoreError):
    """No model, version or alias of that name."""


class BrokenArtifact(StoreError):
    """A version whose files are missing, truncated, changed or not what the manifest says."""

    def __init__(self, name: str, version: str, file: str, reason: str) -> None:
        super().__init__(f"model {name} version {version}: {file}: {reason}")
        self.file = file
        self.reason = reason


class UnsupportedFormat(StoreError):
    """A version whose `format_version` this reader does not know."""


class StoreUnreachable(StoreError):
    """A bucket that cannot be reached, or, if `is_refused`, that refuses what it is asked."""

    def __init__(self, text: str, is_refused: bool = False) -> None:
        super().__init__(text)
        self.is_refused = is_refused


class OutOfMemory(DubitoError, MemoryError):
    """A model whose graphs take more memory than they may for these rows."""

    def __init__(self) -> None:
        super().__init__(
            "the model: expected graphs that predict in the memory that they may take "
            "(DUBITO_TRIAL_BYTES), got one that wants more for this number of rows"
        )


class OverQuota(DubitoError):
    """Files of one owner's jobs that take more bytes than they may."""

    def __init__(self, most: int, got: int) -> None:
        super().__init__(
            f"jobs: expected files of at most {most} bytes for all jobs of one key "
            f"(DUBITO_MAX_JOB_BYTES), got {got} (DELETE /jobs/{{job}} frees those of a result)"
        )


class StateUnusable(DubitoError):
    """The service's state, jobs and labels, that cannot be read or written."""


class NoSpace(StateUnusable):
    """No space is left for it."""


def one_line(error: Exception) -> str:
    """Return what an error says, in one line of at most 300 printable characters, a terminal's
    colours left out."""
    return plain(error)[:300]


def plain(error: Exception) -> str:
    """Return all that an error says in one line of printable characters, a terminal's colours left
    out."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error))
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def all_of(errors: Sequence[InvalidInput]) -> InvalidInput:
    """Return the first of some errors, which knows the others."""
    errors[0].others = errors[1:MOST_ERRORS]
    return errors[0]


def kind_of(value: Any) -> str:
    """Say what a value is, in JSON's words; short numbers are shown, nothing else is echoed."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return repr(value)[:40]
        case bytes():
            return f"a file of {len(value)} bytes"
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"an array of {len(value)}"
        case dict():
            return "an object"
    return type(value).__name__
