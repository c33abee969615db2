"""Synchronous and asynchronous clients."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import httpx

from dubito.endpoints import Endpoints
from dubito.errors import InvalidInput
from dubito.options import URL
from dubito.retries import Limits, Outcome, Pause, Request, Steps

Http = TypeVar("Http", bound=httpx.Client | httpx.AsyncClient)
Result = TypeVar("Result")

TIMEOUT_S = 90.0  # longer than the service's deadline, whose error has more detail
CONNECT_S = 10.0
RETRIES = 4

AGENT = "dubito-client"


@dataclass(frozen=True)
class _Secret:
    """A value that is hidden from `repr`."""

    value: str | None = field(repr=False)


class _Calls(Endpoints, Generic[Http]):
    def __init__(
        self,
        url: str = URL,
        *,
        key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        http: Http | None = None,
    ) -> None:
        # A key from a file often ends in a line break.
        key = None if key is None else key.rstrip("\r\n")
        self._url, self._key = url, _Secret(key)
        self._check_address(key)
        self.limits = Limits(timeout_s, retries)
        self._http = self._open() if http is None else http
        self._is_own = http is None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    def _check_address(self, key: str | None) -> None:
        # httpx's error for a key with a line break would contain the key.
        try:
            is_url = httpx.URL(self._url).scheme in ("http", "https")
        except httpx.InvalidURL:
            is_url = False
        if not is_url:
            raise InvalidInput("url", "an http:// or https:// URL", repr(self._url))
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            raise InvalidInput("key", "printable ASCII characters", "an invalid key")

    def _arguments(self, request: Request) -> dict[str, Any]:
        headers = {"User-Agent": AGENT, **request.headers}
        if self._key.value is not None:
            headers["X-API-Key"] = self._key.value
        return {
            "method": request.method,
            "url": self._url.rstrip("/") + request.path,
            "params": request.query or None,
            "headers": headers,
            "content": request.content,
            "data": request.form or None,
            "files": request.files or None,
            "follow_redirects": False,  # A redirect would send the key to another host.
            "timeout": httpx.Timeout(request.timeout_s, connect=min(CONNECT_S, request.timeout_s)),
        }

    def _open(self) -> Http:
        raise NotImplementedError

    def run(self, steps: Steps[Any]) -> Any:
        raise NotImplementedError


class Client(_Calls[httpx.Client]):
    """A synchronous client. Use it as a context manager, or call `close`.

    All methods may raise the errors in `dubito.errors`.

    Args:
        url: URL of the service.
        key: API key, if the service requires one.
        timeout_s: timeout of each request, in seconds, if the call has no `deadline_s`.
        retries: maximum retries per request, after `Retry-After` or a failed connection.
        http: an httpx client to use, for example with a proxy or custom certificates. The caller
            must close it.
    """

    def _open(self) -> httpx.Client:
        return httpx.Client()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._is_own:
            self._http.close()

    def run(self, steps: Steps[Result]) -> Result:
        try:
            step = next(steps)
            while True:
                step = steps.send(self._take(step))
        except StopIteration as end:
            return end.value

    def _take(self, step: Request | Pause) -> Outcome:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            return self._http.request(**self._arguments(step))
        except httpx.RequestError as error:
            return error


class AsyncClient(_Calls[httpx.AsyncClient]):
    """An asynchronous client. Use it as an async context manager, or call `aclose`.

    It has the same arguments and methods as `Client`. `http` is an `httpx.AsyncClient`.
    """

    def _open(self) -> httpx.AsyncClient:
        return httpx.AsyncClient()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._is_own:
            await self._http.aclose()

    async def run(self, steps: Steps[Result]) -> Result:
        try:
            step = next(steps)
            while True:
                step = steps.send(await self._take(step))
        except StopIteration as end:
            return end.value

    async def _take(self, step: Request | Pause) -> Outcome:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            return await self._http.request(**self._arguments(step))
        except httpx.RequestError as error:
            return error
