"""Retry logic shared by both clients. It performs no I/O.

An endpoint is a generator of steps. It yields a `Request` and receives its `Outcome`, or yields a
`Pause`. The clients execute the steps.
"""

import math
import random
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx

from dubito.errors import DeadlineExceeded, DubitoError, NoAnswer, ServerError, make_error

FIRST_PAUSE_S = 0.5  # after a failed connection; doubles with each retry
MAX_PAUSE_S = 8.0
MAX_RETRY_AFTER_S = 120.0  # longer pauses are not retried
MAX_DEADLINE_S = 86_400.0  # limit of the service
JSON = "application/json"
NPZ = "application/x-npz"
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
CUT_OFF = (httpx.NetworkError, httpx.RemoteProtocolError)  # the request may have arrived

# Form field, and the file's name, content and media type
File = tuple[str, tuple[str, bytes, str]]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    form: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[File] = ()
    has_rows: bool = False  # the service accepts a deadline
    timeout_s: float = math.inf

    def within(self, left_s: float) -> "Request":
        """Set the timeout. If the request has rows, also set the service's deadline."""
        request = replace(self, timeout_s=left_s)
        if not self.has_rows:
            return request
        if self.files:
            return replace(request, form={**self.form, "deadline_s": str(left_s)})
        if self.content is not None and self.headers.get("Content-Type") == JSON:
            content = f'{{"deadline_s":{left_s},'.encode() + self.content[1:]
            return replace(request, content=content)
        return replace(request, query={**self.query, "deadline_s": str(left_s)})


@dataclass(frozen=True)
class Pause:
    seconds: float


Outcome = httpx.Response | httpx.RequestError | None
Result = TypeVar("Result")
Steps = Generator[Request | Pause, Outcome, Result]


@dataclass(frozen=True)
class Limits:
    """The time limit and retry limit for a call.

    Attributes:
        timeout_s: timeout of each request, if the call has no deadline.
        retries: maximum retries per request.
        ends: deadline of the call (`time.monotonic`), or infinity.
    """

    timeout_s: float
    retries: int
    ends: float = math.inf

    def within(self, deadline_s: float | None) -> "Limits":
        """Give the call a deadline of `deadline_s` seconds from now."""
        return self if deadline_s is None else replace(self, ends=time.monotonic() + deadline_s)

    @property
    def left_s(self) -> float | None:
        """The remaining time in seconds, or None if there is no deadline."""
        if math.isinf(self.ends):
            return None
        left = self.ends - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the call's deadline has passed")
        return min(left, MAX_DEADLINE_S)


def send(request: Request, limits: Limits, is_repeatable: bool = True) -> Steps[httpx.Response]:
    """Send a request, retry it if that is safe, and return the successful response.

    Only a request that `is_repeatable` is sent again after a lost connection.
    """
    for attempt in count():
        left = limits.left_s
        timed = replace(request, timeout_s=limits.timeout_s)
        outcome = yield timed if left is None else request.within(left)
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
    # A proxy may return its login form with status 200.
    media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type in (JSON, NPZ):
        return answer
    message = f"expected a response from Dubito, got {media_type or 'no media type'}"
    raise ServerError(answer.status_code, message)


def failure(
    outcome: httpx.Response | httpx.RequestError, attempt: int, is_repeatable: bool
) -> tuple[DubitoError, float | None]:
    """Return the error and the retry delay, which is None if there should be no retry."""
    if isinstance(outcome, httpx.Response):
        retry_after = retry_after_s(outcome)
        error = make_error(outcome, retry_after)
        if (
            retry_after is None
            or outcome.status_code not in (429, 503)
            or retry_after > MAX_RETRY_AFTER_S
        ):
            return error, None
        return error, retry_after * random.uniform(1.0, 1.25)
    if isinstance(outcome, NOT_SENT) or (is_repeatable and isinstance(outcome, CUT_OFF)):
        pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)
        return NoAnswer(_describe(outcome)), pause
    if isinstance(outcome, httpx.TimeoutException):
        return DeadlineExceeded(f"no answer in time: {_describe(outcome)}"), None
    return NoAnswer(_describe(outcome)), None


def retry_after_s(response: httpx.Response) -> float | None:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else None


def _describe(error: httpx.RequestError) -> str:
    # Some httpx errors have an empty message.
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        url = error.request.url
    except RuntimeError:  # The error has no request.
        return text
    place = f"{text} (at {url.scheme}://{url.netloc.decode()}"
    proxy = _find_proxy(url)
    return f"{place})" if proxy is None else f"{place}; the environment sets the proxy {proxy})"


def _find_proxy(url: httpx.URL) -> str | None:
    proxies = getproxies()
    text = proxies.get(url.scheme) or proxies.get("all")
    if text is None or proxy_bypass(url.netloc.decode()):
        return None
    try:
        proxy = httpx.URL(text if "://" in text else f"http://{text}")
    except httpx.InvalidURL:
        return "with an invalid URL"
    return f"{proxy.scheme}://{proxy.netloc.decode()}"
