"""Exceptions raised by the client.

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
    """Base class for all exceptions raised by the client.

    Attributes:
        code: the service's problem code, or "".
        errors: up to ten invalid fields (`field`, `detail`).
    """

    message: str = ""
    code: str = ""
    errors: Sequence[Mapping[str, str]] = ()

    def __str__(self) -> str:
        return self.message or super().__str__()


class InvalidInput(DubitoError, ValueError):
    """Raised if a field has an invalid value, possibly before a request is sent.

    Attributes:
        field: dotted name, such as `inputs.3.age`, or "" if unknown.
        expected: description of valid values.
        received: the invalid value.
    """

    def __init__(
        self, field: str, expected: str, received: str, message: str | None = None
    ) -> None:
        # Exceptions are pickled by their `args`.
        super().__init__(field, expected, received, message)
        self.field = field
        self.expected = expected
        self.received = received
        self.message = message or f"{field}: expected {expected}, got {received}"


class AnswerError(DubitoError):
    """Raised when the service returns an error response.

    Attributes:
        status: HTTP status code.
        detail: the service's message.
        field: the invalid field, or "".
        request_id: request id in the service's log, or "".
        retry_after_s: seconds from the `Retry-After` header, if any.
    """

    def __init__(
        self, status: int, detail: str, request_id: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, detail, request_id, retry_after_s)
        self.status = status
        self.detail = self.message = detail
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        match = DETAIL.fullmatch(detail)
        self.field = "" if match is None else match["field"]


class Unauthorized(AnswerError):
    """Raised if the API key is missing or invalid."""


class Forbidden(AnswerError):
    """Raised if the API key lacks the required scope. See `detail`."""


class NotFound(AnswerError):
    """Raised if the model, version or job does not exist."""


class Conflict(AnswerError):
    """Raised if a label contradicts an existing one or a job is not done yet."""


class TooLarge(AnswerError):
    """Raised if the request exceeds one of the service's limits."""


class Overloaded(AnswerError):
    """Raised if the service is overloaded. Retry after `retry_after_s`."""


class ServerError(AnswerError):
    """Raised when the service or a proxy fails."""


class NotReady(ServerError):
    """Raised if the service has not loaded a model or has too many connections."""


class NoSpace(AnswerError):
    """Raised if the service's disk is full."""


class DeadlineExceeded(DubitoError):
    """Raised when a call times out. The service may still finish the work."""


class NoAnswer(DubitoError):
    """Raised when the connection fails. The service may have done the work."""


class JobFailed(DubitoError):
    """Raised if a job failed or was cancelled.

    Attributes:
        id: id of the job.
    """

    def __init__(self, id: str, message: str) -> None:
        super().__init__(id, message)
        self.id = id
        self.message = message


class Absent(DubitoError, AttributeError):
    """Raised if a response does not include the requested quantity."""


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
    """Create an exception from an error response and its problem document (RFC 9457), if any."""
    problem: Any = None
    if "json" in response.headers.get("Content-Type", ""):
        with suppress(ValueError):
            problem = response.json()
    problem, status = problem if isinstance(problem, dict) else {}, response.status_code
    detail = problem.get("detail")
    if not (isinstance(detail, str) and detail):
        detail = f"HTTP status {status}"
    error: DubitoError
    if status in TIMEOUT_STATUSES:
        error = DeadlineExceeded(detail)
    elif status == 422:
        match = DETAIL.fullmatch(detail)
        field, expected, received = match.groups() if match else ("", "", "")
        error = InvalidInput(field, expected, received, detail)
    else:
        kind = ERROR_BY_STATUS.get(status, ServerError if status >= 500 else AnswerError)
        error = kind(status, detail, response.headers.get("X-Request-ID", ""), retry_after_s)
    error.code = str(problem.get("code", ""))
    error.errors = tuple(problem.get("errors") or ())
    return error
