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

DETAIL = re.compile(r"(?P<field>.{1,200}?): expected (?P<expected>.*), got (?P<got>.*)", re.DOTALL)


class DubitoError(Exception):
    """Anything that goes wrong between a program and the service.

    Attributes:
        code: the kind of problem by which the service calls it, "" where it did not.
        errors: of a refusal, each field that was found wrong (`field`, `detail`), at most ten.
    """

    code: str = ""
    errors: Sequence[Mapping[str, str]] = ()


class InvalidInput(DubitoError, ValueError):
    """A field is not what was expected; also before anything is sent.

    Attributes:
        field: its name, dotted, such as `inputs.3.age`; "" where the service named none.
        expected: what it should be.
        got: what came.
    """

    def __init__(self, field: str, expected: str, got: str, message: str | None = None) -> None:
        # as they are here, so that errors can be copied
        super().__init__(field, expected, got, message)
        self.field = field
        self.expected = expected
        self.got = got
        self.message = message or f"{field}: expected {expected}, got {got}"

    def __str__(self) -> str:
        return self.message


class AnswerError(DubitoError):
    """The service answered with a problem.

    Attributes:
        status: of HTTP.
        detail: what the service said.
        field: the field that it named, "" if none.
        request_id: by which the service's log knows the request; "" if it was not answered by the
            application.
        retry_after_s: after how many seconds to try again, where the answer says so.
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
    """The service wants a key, and none came that is valid."""


class Forbidden(AnswerError):
    """The key lacks a scope, which `detail` names."""


class NotFound(AnswerError):
    """A model, version or job that is not there."""


class Conflict(AnswerError):
    """A label goes against one that is kept, or a job has no result yet."""


class TooLarge(AnswerError):
    """More than a limit of the service allows."""


class Overloaded(AnswerError):
    """Too much work is waiting; `retry_after_s` says when to come back."""


class ServerError(AnswerError):
    """The service, or what stands before it, failed."""


class NotReady(ServerError):
    """Nothing to predict with, or no room for another connection."""


class NoSpace(AnswerError):
    """The service's disk is full: nothing was kept."""


class DeadlineExceeded(DubitoError):
    """There was no answer in time. What was asked for may still be done."""


class NoAnswer(DubitoError):
    """The connection failed before there was an answer. What was asked for may have been done."""


class JobFailed(DubitoError):
    """A job failed or was cancelled; the message says why.

    Attributes:
        id: the job's.
    """

    def __init__(self, id: str, message: str) -> None:
        super().__init__(id, message)
        self.id = id
        self.message = message

    def __str__(self) -> str:
        return self.message


class Absent(DubitoError, AttributeError):
    """An answer does not have a quantity; the message says why."""


BY_STATUS: Mapping[int, type[AnswerError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    429: Overloaded,
    503: NotReady,
    507: NoSpace,
}
OUT_OF_TIME = (408, 504)


def error_of(response: httpx.Response, retry_after_s: float | None = None) -> DubitoError:
    problem = _problem(response)
    error = _error_of(response, _detail(response, problem), retry_after_s)
    error.code = str(problem.get("code", ""))
    error.errors = tuple(problem.get("errors") or ())
    return error


def _error_of(response: httpx.Response, detail: str, retry_after_s: float | None) -> DubitoError:
    status = response.status_code
    if status in OUT_OF_TIME:
        return DeadlineExceeded(detail)
    if status == 422:
        named = DETAIL.fullmatch(detail)
        parts = ("", "", "") if named is None else (named["field"], named["expected"], named["got"])
        return InvalidInput(*parts, message=detail)
    kind = BY_STATUS.get(status, ServerError if status >= 500 else AnswerError)
    return kind(status, detail, response.headers.get("X-Request-ID", ""), retry_after_s)


def _problem(response: httpx.Response) -> dict[str, Any]:
    content: Any = None
    if "json" in response.headers.get("Content-Type", ""):
        with suppress(ValueError):
            content = response.json()
    return content if isinstance(content, dict) else {}


def _detail(response: httpx.Response, problem: dict[str, Any]) -> str:
    """Return what a problem says, or of another answer its status: it may be a proxy's page."""
    detail = problem.get("detail")
    return detail if isinstance(detail, str) and detail else f"HTTP status {response.status_code}"
