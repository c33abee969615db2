"""Exceptions with their HTTP status and problem code.

DubitoError
├── FieldError            a field with a wrong value
│   ├── InvalidInput      an invalid value
│   ├── TooLarge          more than a limit allows
│   ├── Conflict          a label that contradicts an earlier one
│   └── NotFound          an unknown model, version or alias (also a StoreError)
├── StoreError
│   ├── BrokenAlias       an alias that names no version
│   ├── BrokenArtifact    a damaged version
│   ├── UnsupportedFormat a version in an unknown format
│   └── StoreUnreachable  a bucket that is unreachable or refuses access
├── OutOfMemory           prediction exceeds its memory limit
├── OverQuota             a client's job files exceed their limit
└── StateUnusable         the state cannot be read or written
    └── NoSpace           the disk is full

`service/errors.py` has the errors of requests. The page of problems shows the first paragraph of
each docstring.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

MAX_ERRORS = 10  # reported at once


def list_choices(names: Iterable[str]) -> str:
    """Describe the allowed values, for example "one of a, b"."""
    return f"one of {', '.join(names) or '(none)'}"


class DubitoError(Exception):
    """An unexpected error.

    The text can be shown to users.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "unexpected"
    remedy: ClassVar[str] = "look for `X-Request-ID` in the log"
    field: str | None = None  # the wrong field of a request


class FieldError(DubitoError):
    """A field with a wrong value."""

    field: str

    def __init__(self, field: str, expected: str, received: str) -> None:
        super().__init__(f"{field}: expected {expected}, got {received}")
        self.field = field
        self.expected = expected
        self.received = received


class InvalidInput(FieldError):
    """A field has a wrong value."""

    status, code, remedy = 422, "invalid_input", "correct the fields in `errors`"
    other_errors: Sequence["InvalidInput"] = ()  # of the same request

    def rename_fields(self, rename: Callable[[str], str]) -> "InvalidInput":
        """Return a copy of the errors with different field names."""
        errors = (self, *self.other_errors)
        return merge_errors([InvalidInput(rename(e.field), e.expected, e.received) for e in errors])


class TooLarge(FieldError):
    """The request exceeds a limit."""

    status, code, remedy = 413, "too_large", "send less data per request, or raise the limit"


class Conflict(FieldError):
    """A label contradicts a stored label."""

    status, code, remedy = 409, "conflict", "send it with `replace`"


class StoreError(DubitoError):
    """Base class for model store errors."""


class NotFound(FieldError, StoreError):
    """The model, version, job, file or path does not exist."""

    status, code, remedy = 404, "not_found", "`GET /models`"


class BrokenAlias(StoreError):
    """An alias is missing, unreadable, or names a version that does not exist."""

    status, code, remedy = 503, "broken_alias", "move the alias to a version"


class BrokenArtifact(StoreError):
    """The files of a version are missing, damaged or do not match the manifest."""

    status, code, remedy = 503, "broken_artifact", "publish it again"

    def __init__(self, name: str, version: str, file: str, reason: str) -> None:
        super().__init__(f"model {name} version {version}: {file}: {reason}")
        self.file = file
        self.reason = reason


class UnsupportedFormat(StoreError):
    """A version has an unknown `format_version`."""

    status, code = 503, "unsupported_format"
    remedy = "update the service, or publish the version again"


class StoreUnreachable(StoreError):
    """The store's bucket cannot be reached, or refuses the request."""

    status, code, remedy = 503, "store_unreachable", "try again"


class OutOfMemory(DubitoError, MemoryError):
    """The prediction needs more memory than allowed."""

    status, code = 503, "out_of_memory"
    remedy = "send another number of rows"

    def __init__(self) -> None:
        super().__init__(
            "the model: expected graphs that predict within their memory limit, got one that needs "
            "more for this number of rows"
        )


class OverQuota(DubitoError):
    """The job files of an API key exceed the limit."""

    status, code, remedy = 507, "over_quota", "delete jobs"

    def __init__(self, max_bytes: int, size_bytes: int) -> None:
        super().__init__(
            f"jobs: expected up to {max_bytes} bytes of files for all jobs of one key "
            f"(DUBITO_MAX_JOB_BYTES), got {size_bytes} (DELETE /jobs/{{job}} deletes a result)"
        )


class StateUnusable(DubitoError):
    """Jobs and labels cannot be read or written."""

    status, code, remedy = 503, "state_unusable", "see the log"


class NoSpace(StateUnusable):
    """The disk is full."""

    status, code, remedy = 507, "no_space", "free some space"


@contextmanager
def refuse_unreadable(field: str, expected: str = "a file that can be read") -> Iterator[None]:
    """Convert an error of the file system to InvalidInput."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(field, expected, error.strerror or "an error") from error


def expected_value(message: str) -> str:
    """Extract the expected value from a pydantic message, as "Input should be a valid string"."""
    message = message.replace("String should match pattern", "a string that matches")
    message = message.replace("Field required", "a value").replace("frozenset", "array")
    return re.sub(r"^(Input should be|\w+ should have|Value error,( expected)?) ", "", message)


def one_line(error: object) -> str:
    """Format an error message as a single line of up to 300 characters."""
    return clean_message(error)[:300]


def clean_message(error: object) -> str:
    """Format an error message as a single line of printable text, without terminal colours."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error))
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def merge_errors(errors: Sequence[InvalidInput]) -> InvalidInput:
    """Attach all other errors to the first one and return it."""
    errors[0].other_errors = errors[1:MAX_ERRORS]
    return errors[0]


def describe_value(value: Any) -> str:
    """Describe a JSON value for an error message. Only numbers are shown literally."""
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
