"""Requests as data, and when to send them again. Nothing here does input or output.

A call is a generator of steps: it yields a `Request`, and is sent its `Outcome`, or a `Pause`. Both
clients only do the steps, so they share every decision.
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
LONGEST_RETRY_AFTER_S = 120.0  # beyond it the call fails
LONGEST_DEADLINE_S = 86_400.0  # that the service takes
MEDIA_TYPES = ("application/json", "application/x-npz")  # of successful answers
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
    """A wait."""

    seconds: float


Outcome = httpx.Response | httpx.RequestError | None
Result = TypeVar("Result")
Steps = Generator[Request | Pause, Outcome, Result]


@dataclass(frozen=True)
class Limits:
    """Time and retries of a call.

    Attributes:
        timeout_s: how long a request may wait for the service if the call has no deadline.
        retries: of each request.
        ends: the call's deadline by `time.monotonic`; infinite if it has none.
    """

    timeout_s: float
    retries: int
    ends: float = math.inf

    def within(self, deadline_s: float | None) -> "Limits":
        """Return the limits of a call that ends `deadline_s` from now."""
        return self if deadline_s is None else replace(self, ends=time.monotonic() + deadline_s)

    @property
    def left_s(self) -> float | None:
        """Remaining seconds; None without a deadline."""
        if math.isinf(self.ends):
            return None
        left = self.ends - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the call's deadline has passed")
        return min(left, LONGEST_DEADLINE_S)


def send(
    make: Callable[[float | None], Request], limits: Limits, is_repeatable: bool = True
) -> Steps[httpx.Response]:
    """Send a request, with retries if they are safe and useful, and return the successful answer.

    A retry is safe after a refusal with `Retry-After` and if no connection was made; if
    `is_repeatable`, also if a connection failed before the answer.

    Args:
        make: makes the request from the remaining seconds.
        limits: of time and tries.
        is_repeatable: whether sending it twice has the effect of once.

    Raises:
        DubitoError: if the answer is an error, or there was none.
    """
    for attempt in count():
        left = limits.left_s
        outcome = yield replace(make(left), timeout_s=limits.timeout_s if left is None else left)
        assert outcome is not None
        if isinstance(outcome, httpx.Response) and outcome.is_success:
            return _check_media_type(outcome)
        error, pause = failure(outcome, attempt, is_repeatable)
        is_in_time = pause is None or limits.ends - time.monotonic() > pause
        if not is_in_time and isinstance(error, NoAnswer):
            error = DeadlineExceeded(f"the call's deadline has passed: {error}")
        if pause is None or attempt >= limits.retries or not is_in_time:
            raise error from (outcome if isinstance(outcome, httpx.RequestError) else None)
        yield Pause(pause)
    raise AssertionError  # not reached


def _check_media_type(answer: httpx.Response) -> httpx.Response:
    """Return a successful answer of the service; a proxy's page with a login form is an error."""
    media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type in MEDIA_TYPES:
        return answer
    message = f"expected an answer of Dubito's, got {media_type or 'another'}"
    raise ServerError(answer.status_code, message)


def failure(
    outcome: httpx.Response | httpx.RequestError, attempt: int, is_repeatable: bool
) -> tuple[DubitoError, float | None]:
    """Return the error, and the seconds until a retry; None if there should be none."""
    if isinstance(outcome, httpx.Response):
        retry_after = retry_after_s(outcome)
        error = error_of(outcome, retry_after)
        if (
            retry_after is None
            or outcome.status_code not in (429, 503)
            or retry_after > LONGEST_RETRY_AFTER_S
        ):
            return error, None
        return error, retry_after * random.uniform(1.0, 1.25)  # not all clients at once
    if isinstance(outcome, NOT_SENT) or (is_repeatable and isinstance(outcome, CUT_OFF)):
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)
        return NoAnswer(_describe(outcome)), pause
    if isinstance(outcome, httpx.TimeoutException):
        return DeadlineExceeded(f"no answer in time: {_describe(outcome)}"), None
    return NoAnswer(_describe(outcome)), None


def retry_after_s(response: httpx.Response) -> float | None:
    """Return the seconds in `Retry-After`, which can be a date; None without it."""
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
    """Describe a connection's error and its origin; some of httpx's errors have no text."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        url = error.request.url
    except RuntimeError:  # it knows of none
        return text
    return f"{text} (asked {url.scheme}://{url.netloc.decode()})"
