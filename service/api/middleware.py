"""Middleware for metrics, logs, traces, authentication, frequent routes, HEAD and compression."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPMethod
from threading import Event
from traceback import clear_frames

from fastapi.routing import APIRoute
from starlette.middleware.gzip import (
    DEFAULT_EXCLUDED_CONTENT_TYPES,
    GZipResponder,
    IdentityResponder,
)
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model_store.errors import DubitoError
from service.api.media_types import NPZ, PARQUET, accepts_gzip
from service.api.problems import error_response
from service.auth.keys import KeyRing, Keys
from service.auth.scopes import (
    API_SCOPES,
    MODELS_KEY,
    POOLS_KEY,
    SCOPES_KEY,
    authorize,
    needed_scope,
)
from service.auth.scopes import Scope as KeyScope
from service.errors import Forbidden, RequestError, ShuttingDown, WrongHost
from service.request_context import PREFIX_KEY, RECORD_KEY, RequestRecord, get_record
from service.server.shares import KEY_NAME
from service.telemetry.logs import RequestLog, format_traceback, log_refusal
from service.telemetry.metrics import Metrics
from service.telemetry.tracing import Tracing

logger = logging.getLogger("dubito")

ID_BYTES = 16  # of a generated request id
METHODS = frozenset(HTTPMethod)
REFUSALS = {401, 403, 421}  # from `service.auth`
VERSION_PREFIX = "/v1"  # of the API, before any path
READ_METHODS = {"GET", "HEAD", "OPTIONS"}  # methods without side effects
SAME_ORIGIN_SITES = {b"same-origin", b"none"}  # values of Sec-Fetch-Site
GZIP_LEVEL = 1  # reduces JSON to a quarter, at 100 MB/s
MIN_GZIP_BYTES = 500
MIN_FREQUENT_GZIP_BYTES = 64 << 10  # of answers by `Shortcut`
COMPRESSED_TYPES = (*DEFAULT_EXCLUDED_CONTENT_TYPES, NPZ, PARQUET)

_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_SAFE_HOST = re.compile(r"[0-9.]*|[^.]*")  # addresses, and names without dots


@dataclass(frozen=True)
class Observe:
    """Middleware that records every request and answers unexpected errors with 500.

    During shutdown, connections are closed after the next answer.
    """

    app: ASGIApp
    metrics: Metrics
    log: RequestLog | None
    tracing: Tracing | None
    ending: Event
    prefix: str = ""  # of the proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self._strip_prefixes(scope)
        record = scope[RECORD_KEY] = self._new_record(scope)
        span = None if self.tracing is None else self.tracing.begin(scope, record)
        status: int | None = None  # None if the client disconnects before the answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                closing = [(b"connection", b"close")] if self.ending.is_set() else []
                request_id = (b"x-request-id", record.request_id.encode())
                message["headers"] = [*message.get("headers", ()), *closing, request_id]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect as disconnect:
            record.reason = "client_gone"
            clear_frames(disconnect.__traceback__)  # to free the memory of the body
        except asyncio.CancelledError:
            if self.ending.is_set():  # otherwise another ASGI server noticed a disconnect
                error = ShuttingDown()
                record.reason = error.code
                if status is None:
                    await error_response(scope, error)(scope, receive, send_with_id)
            raise
        except Exception as error:
            record.reason = "unexpected"
            logger.error(
                "unexpected error in request %s: %s", record.request_id, format_traceback(error)
            )
            # If the answer has started, the server closes the connection.
            if status is None:
                detail = "unexpected error; search the service's log for this X-Request-ID"
                await error_response(scope, DubitoError(detail))(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - record.started
            self.metrics.count_request(route, status, record.reason, seconds)
            if status in REFUSALS:
                log_refusal(scope)
            if self.log is not None:
                self.log(record, route, status, seconds)
            if span is not None and self.tracing is not None:
                self.tracing.end(span, record, route, status)

    def _strip_prefixes(self, scope: Scope) -> None:
        prefix, path = self.prefix, scope["path"]
        if prefix and path.startswith(f"{prefix}/"):
            path = path.removeprefix(prefix)
        if path.startswith(f"{VERSION_PREFIX}/"):
            path, prefix = path.removeprefix(VERSION_PREFIX), prefix + VERSION_PREFIX
        scope["path"], scope[PREFIX_KEY] = path, prefix

    @staticmethod
    def _new_record(scope: Scope) -> RequestRecord:
        started = time.perf_counter()
        ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
        is_plain = len(ids) == 1 and _CLIENT_ID.fullmatch(ids[0])
        request_id = ids[0].decode() if is_plain else secrets.token_hex(ID_BYTES)
        method = scope["method"] if scope["method"] in METHODS else "other"
        return RequestRecord(request_id, method, started)


@dataclass(frozen=True)
class AuthMiddleware:
    """Middleware that authenticates requests by API key.

    If the API is open, reject cross-origin requests (403) and unknown host names (421).
    """

    app: ASGIApp
    ring: KeyRing
    hosts: frozenset[str] | None
    origins: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        keys = self.ring.keys
        scope[SCOPES_KEY] = API_SCOPES if keys.api_is_open else frozenset()
        authenticate(scope, keys, _read_key(scope))
        try:
            if keys.api_is_open:
                _check_origin(scope, self.hosts, self.origins)
        except RequestError as error:
            await error_response(scope, error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def authenticate(scope: Scope, keys: Keys, text: bytes) -> None:
    """Store a valid key's name, scopes and limits in the request's ASGI scope."""
    key = keys.find(text) if keys.names and text else None
    if key is not None:
        get_record(scope).key = key.name
        if not key.has_expired:
            scope[KEY_NAME], scope[MODELS_KEY], scope[POOLS_KEY] = key.name, key.models, key.pools
            scope[SCOPES_KEY] |= key.scopes


def _check_origin(scope: Scope, hosts: frozenset[str] | None, origins: frozenset[str]) -> None:
    """Reject requests sent by web pages from another origin.

    After DNS rebinding, Host contains a domain name. Otherwise browsers identify the page by Origin
    or, with TLS and on loopback, by Sec-Fetch-Site.
    """
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name = host.rpartition(":")[0] or host
    if hosts is not None and _SAFE_HOST.fullmatch(name) is None and name not in hosts:
        expected = "an address, a name without dots or a name in DUBITO_ALLOWED_HOSTS"
        raise WrongHost("Host", expected, "another name")
    if scope["method"] in READ_METHODS:
        return
    if origins & {"*", headers.get(b"origin", b"").decode("latin-1").lower()}:
        return
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin", b"").decode("latin-1")
    is_own = site in SAME_ORIGIN_SITES if site else origin.partition("://")[2].lower() in ("", host)
    if not is_own or origin == "null":
        raise Forbidden("Origin", "none, or the service's origin", "another page's origin")


def _read_key(scope: Scope) -> bytes:
    key = b""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            return bytes(value)
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            key = value[7:].strip()
    return key


class Shortcut:
    """Middleware that calls the endpoints of frequent POST routes directly.

    FastAPI's layers take longer than parsing a row. The endpoints take only the request and path
    parameters, and this class checks the scope of the API key.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[APIRoute]) -> None:
        self.app = app
        self.routes = [(route, needed_scope(route)) for route in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        match = self._find(scope["path"]) if is_post else None
        if match is None:
            await self.app(scope, receive, send)
            return
        route, needed, parameters = match
        scope["route"] = route
        request = Request(scope, receive, send)
        answer: ASGIApp
        try:
            if needed is not None and needed not in scope[SCOPES_KEY]:
                authorize(scope, needed)  # raises the error
            response = await route.endpoint(request, **parameters)
        except DubitoError as error:
            response = error_response(scope, error)
        is_streamed = isinstance(response, StreamingResponse)
        is_large = is_streamed or len(response.body) >= MIN_FREQUENT_GZIP_BYTES
        answer = Compression(response) if is_large else response
        await answer(scope, receive, send)

    def _find(self, path: str) -> tuple[APIRoute, KeyScope | None, dict[str, str]] | None:
        for route, needed in self.routes:
            match = route.path_regex.fullmatch(path)
            if match is not None:
                return route, needed, match.groupdict()
        return None


class Compression:
    """Middleware that compresses answers with gzip if the client accepts it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and accepts_gzip(scope):
            app = GZipResponder(
                app, MIN_GZIP_BYTES, GZIP_LEVEL, exclude_content_types=COMPRESSED_TYPES
            )
        elif scope["type"] == "http":
            app = IdentityResponder(app, MIN_GZIP_BYTES)  # sets Vary
        await app(scope, receive, send)


class HeadAsGet:
    """Middleware that routes HEAD requests like GET. The server omits the body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        if is_head:
            scope["method"] = "GET"
        try:
            await self.app(scope, receive, send)
        finally:
            if is_head:
                scope["method"] = "HEAD"
