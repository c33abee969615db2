"""Middleware for authentication, frequent routes, HEAD and compression."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi.routing import APIRoute
from starlette.middleware.gzip import (
    DEFAULT_EXCLUDED_CONTENT_TYPES,
    GZipResponder,
    IdentityResponder,
)
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

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
from service.errors import Forbidden, RequestError, WrongHost
from service.request_context import get_record
from service.server.shares import KEY_NAME

READ_METHODS = {"GET", "HEAD", "OPTIONS"}  # methods without side effects
SAME_ORIGIN_SITES = {b"same-origin", b"none"}  # values of Sec-Fetch-Site
GZIP_LEVEL = 1  # reduces JSON to a quarter, at 100 MB/s
MIN_GZIP_BYTES = 500
MIN_FREQUENT_GZIP_BYTES = 64 << 10  # of answers by `Shortcut`
_SAFE_HOST = re.compile(r"[0-9.]*|[^.]*")  # addresses, and names without dots
COMPRESSED_TYPES = (*DEFAULT_EXCLUDED_CONTENT_TYPES, NPZ, PARQUET)


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
        raise WrongHost(
            "Host",
            "an address, a name without dots or a name in DUBITO_ALLOWED_HOSTS",
            "another name",
        )
    if scope["method"] in READ_METHODS:
        return
    if origins & {"*", headers.get(b"origin", b"").decode("latin-1").lower()}:
        return
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin", b"").decode("latin-1")
    is_own = site in SAME_ORIGIN_SITES if site else origin.partition("://")[2].lower() in ("", host)
    if not is_own or origin == "null":
        raise Forbidden("Origin", "none, or the service's origin", "another page's origin")


def _read_key(scope: Scope) -> bytes:
    """Return the X-API-Key header or the bearer token, or b"" if there is neither."""
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
