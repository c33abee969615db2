"""Requests as data, and when they are sent again. Nothing here does input or output.

A call is a generator of steps: it yields a `Request` and is sent what came, or yields a `Pause`. A
client does the steps, and nothing else; so both clients share all that is decided.
"""

import email.utils
import math
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from typing import TypeVar

import httpx

from dubito.errors import DeadlineExceeded, DubitoError, NoAnswer, ServerError, error_of

FIRST_PAUSE_S = 0.5  # after a connection failed; doubled each time
LONGEST_PAUSE_S = 8.0
LONGEST_RETRY_AFTER_S = 120.0  # one who is told to wait longer is told so
LONGEST_DEADLINE_S = 86_400.0  # that the service takes
MEDIA_TYPES = ("application/json", "application/x-npz")  # of answers that are no refusals
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
CUT_OFF = (httpx.NetworkError, httpx.RemoteProtocolError)  # it may have been sent

# A form's field, and a file's name, content and media type
File = tuple[str, tuple[str, bytes, str]]


@dataclass(frozen=True)
class Request:
    """A request of HTTP. `timeout_s` bounds each wait for the other side, in seconds."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    form: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[File] = ()
    timeout_s: float = math.inf


@dataclass(frozen=True)
class Pause:
    """Time to let pass, in seconds."""

    seconds: float


Came = httpx.Response | httpx.RequestError | None
Result = TypeVar("Result")
Steps = Generator[Request | Pause, Came, Result]


@dataclass(frozen=True)
class Limits:
    """How long a call may take and how often each of its requests is tried again.

    Attributes:
        timeout_s: what a request may wait for the other side where the call has no deadline, in
            seconds.
        retries: how often a request is sent again.
        ends: when the call's deadline is, by `time.monotonic`; infinite where it has none.
    """

    timeout_s: float
    retries: int
    ends: float = math.inf

    def within(self, deadline_s: float | None) -> "Limits":
        """Return the same for a call that ends `deadline_s` from now."""
        return self if deadline_s is None else replace(self, ends=time.monotonic() + deadline_s)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, None where there is no deadline."""
        if math.isinf(self.ends):
            return None
        left = self.ends - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the call's deadline has passed")
        return min(left, LONGEST_DEADLINE_S)


def send(
    made: Callable[[float | None], Request], limits: Limits, is_repeatable: bool = True
) -> Steps[httpx.Response]:
    """Send a request, again where that is safe and of use, and return the answer of success.

    Again is safe after a refusal that says `Retry-After` and where no connection was made; if
    `is_repeatable`, also where a connection failed before the answer.

    Args:
        made: makes the request, given the seconds that are left.
        limits: of time and tries.
        is_repeatable: whether the same twice does no more than once.

    Raises:
        DubitoError: what the answer stands for, or that there was none.
    """
    for tried in count():
        left = limits.left_s
        came = yield replace(made(left), timeout_s=limits.timeout_s if left is None else left)
        assert came is not None
        if isinstance(came, httpx.Response) and came.is_success:
            return _check_media_type(came)
        error, pause = failure(came, tried, is_repeatable)
        is_in_time = pause is None or limits.ends - time.monotonic() > pause
        if not is_in_time and isinstance(error, NoAnswer):
            error = DeadlineExceeded(f"the call's deadline has passed: {error}")
        if pause is None or tried >= limits.retries or not is_in_time:
            raise error from (came if isinstance(came, httpx.RequestError) else None)
        yield Pause(pause)
    raise AssertionError  # not reached


def _check_media_type(answer: httpx.Response) -> httpx.Response:
    """Return an answer of success, unless it is another's, such as the page of a proxy that wants a
    password."""
    media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type in MEDIA_TYPES:
        return answer
    said = f"expected an answer of Dubito's, got {media_type or 'another'}"
    raise ServerError(answer.status_code, said)


def failure(
    came: httpx.Response | httpx.RequestError, tried: int, is_repeatable: bool
) -> tuple[DubitoError, float | None]:
    """Return what went wrong, and after how many seconds to try again; None if not at all."""
    if isinstance(came, httpx.Response):
        told = retry_after_s(came)
        error = error_of(came, told)
        if told is None or came.status_code not in (429, 503) or told > LONGEST_RETRY_AFTER_S:
            return error, None
        return error, told * random.uniform(1.0, 1.25)  # not all clients at once
    if isinstance(came, NOT_SENT) or (is_repeatable and isinstance(came, CUT_OFF)):
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**tried) * random.uniform(0.5, 1.0)
        return NoAnswer(_describe(came)), pause
    if isinstance(came, httpx.TimeoutException):
        return DeadlineExceeded(f"no answer in time: {_describe(came)}"), None
    return NoAnswer(_describe(came)), None


def retry_after_s(response: httpx.Response) -> float | None:
    """Return the seconds that `Retry-After` says, None without it; it may be a date."""
    text = response.headers.get("Retry-After", "")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def _describe(error: httpx.RequestError) -> str:
    """Say what went wrong with a connection, and whose; some of httpx's errors have no words."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        url = error.request.url
    except RuntimeError:  # it knows of none
        return said
    return f"{said} (asked {url.scheme}://{url.netloc.decode()})"
