"""Errors, all below `DubitoError`.

DubitoError
├── InvalidInput, DeadlineExceeded, NoAnswer, JobFailed, Absent
└── AnswerError
    ├── Unauthorized, Forbidden, NotFound, Conflict, TooLarge, Overloaded, NoSpace
    └── ServerError
        └── NotReady
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

DETAIL = re.compile(
    r"(?P<field>.{1,200}?): expected (?P<expected>.*), got (?P<received>.*)", re.DOTALL
)


class DubitoError(Exception):
    """The base of all errors of the client.

    Attributes:
        code: the service's code for the problem, "" without one.
        errors: each invalid field (`field`, `detail`), up to ten.
    """

    code: str = ""
    errors: Sequence[Mapping[str, str]] = ()


class InvalidInput(DubitoError, ValueError):
    """A field is invalid. The client may raise this before it sends anything.

    Attributes:
        field: its dotted name, such as `inputs.3.age`; "" if the service named none.
        expected: what it should be.
        received: the value that was received.
    """

    def __init__(
        self, field: str, expected: str, received: str, message: str | None = None
    ) -> None:
        # as they are here, so that errors can be copied
        super().__init__(field, expected, received, message)
        self.field = field
        self.expected = expected
        self.received = received
        self.message = message or f"{field}: expected {expected}, got {received}"

    def __str__(self) -> str:
        return self.message


class AnswerError(DubitoError):
    """The service answered with a problem.

    Attributes:
        status: the HTTP status.
        detail: the service's message.
        field: the invalid field, "" if none is named.
        request_id: the id in the service's log; "" if the application did not answer.
        retry_after_s: seconds until a retry, if the answer has them.
    """

    def __init__(
        self, status: int, detail: str, request_id: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, detail, request_id, retry_after_s)
        self.status = status
        self.detail = detail
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        named = DETAIL.fullmatch(detail)
        self.field = "" if named is None else named["field"]

    def __str__(self) -> str:
        return self.detail


class Unauthorized(AnswerError):
    """The service requires a valid key."""


class Forbidden(AnswerError):
    """The key lacks a scope, which `detail` names."""


class NotFound(AnswerError):
    """The model, version or job does not exist."""


class Conflict(AnswerError):
    """A label contradicts an earlier one, or a job has no result yet."""


class TooLarge(AnswerError):
    """The request exceeds a limit of the service."""


class Overloaded(AnswerError):
    """Too much work is waiting; try again after `retry_after_s`."""


class ServerError(AnswerError):
    """The service or a proxy failed."""


class NotReady(ServerError):
    """There is no model to predict with, or there are too many connections."""


class NoSpace(AnswerError):
    """The service's disk is full. It stored nothing."""


class DeadlineExceeded(DubitoError):
    """There was no answer in time. The service may still do the work."""


class NoAnswer(DubitoError):
    """The connection failed before an answer. The service may have done the work."""


class JobFailed(DubitoError):
    """A job failed or was cancelled. The message has the reason.

    Attributes:
        id: of the job.
    """

    def __init__(self, id: str, message: str) -> None:
        super().__init__(id, message)
        self.id = id
        self.message = message

    def __str__(self) -> str:
        return self.message


class Absent(DubitoError, AttributeError):
    """The answer lacks a quantity. The message has the reason."""


ERROR_BY_STATUS: Mapping[int, type[AnswerError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    429: Overloaded,
    503: NotReady,
    507: NoSpace,
}
TIMEOUT_STATUSES = (408, 504)


def make_error(response: httpx.Response, retry_after_s: float | None = None) -> DubitoError:
    problem = _problem(response)
    error = _make_error(response, _detail(response, problem), retry_after_s)
    error.code = str(problem.get("code", ""))
    error.errors = tuple(problem.get("errors") or ())
    return error


def _make_error(response: httpx.Response, detail: str, retry_after_s: float | None) -> DubitoError:
    status = response.status_code
    if status in TIMEOUT_STATUSES:
        return DeadlineExceeded(detail)
    if status == 422:
        named = DETAIL.fullmatch(detail)
        parts = (
            ("", "", "")
            if named is None
            else (named["field"], named["expected"], named["received"])
        )
        return InvalidInput(*parts, message=detail)
    kind = ERROR_BY_STATUS.get(status, ServerError if status >= 500 else AnswerError)
    return kind(status, detail, response.headers.get("X-Request-ID", ""), retry_after_s)


def _problem(response: httpx.Response) -> dict[str, Any]:
    content: Any = None
    if "json" in response.headers.get("Content-Type", ""):
        with suppress(ValueError):
            content = response.json()
    return content if isinstance(content, dict) else {}


def _detail(response: httpx.Response, problem: dict[str, Any]) -> str:
    """Return the detail of a problem, or the status of any other answer, such as a proxy's."""
    detail = problem.get("detail")
    return detail if isinstance(detail, str) and detail else f"HTTP status {response.status_code}"
