"""Middleware for frequent routes, HEAD, conditional GET and compression."""

from collections.abc import Sequence
from hashlib import sha256

from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.middleware.gzip import (
    DEFAULT_EXCLUDED_CONTENT_TYPES,
    GZipResponder,
    IdentityResponder,
)
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model_store.errors import DubitoError
from service.api.media_types import accepts_gzip, list_header
from service.api.problems import error_response
from service.api.requests import NPZ, PARQUET
from service.api.responses import PartsResponse
from service.auth.scopes import SCOPES_KEY, authorize, needed_scope
from service.auth.scopes import Scope as KeyScope

READ_METHODS = {"GET", "HEAD"}
GZIP_LEVEL = 1  # reduces JSON to a quarter, at 100 MB/s
MIN_GZIP_BYTES = 500
MIN_FREQUENT_GZIP_BYTES = 64 << 10  # of answers by `Shortcut`
COMPRESSED_TYPES = (*DEFAULT_EXCLUDED_CONTENT_TYPES, NPZ, PARQUET)


class Shortcut:
    """Middleware that calls the endpoints of frequent POST routes directly.

    FastAPI's layers take longer than parsing a row. The endpoints take only the request and path
    parameters, and this class checks the scope of the API key.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[APIRoute]) -> None:
        self.app = app
        posts = [(route, needed_scope(route)) for route in routes if route.methods == {"POST"}]
        self.paths = {post[0].path: post for post in posts if not post[0].param_convertors}
        self.patterns = [post for post in posts if post[0].param_convertors]

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
        size = len(response.body)
        is_large = isinstance(response, PartsResponse) or size >= MIN_FREQUENT_GZIP_BYTES
        answer = Compression(response) if is_large else response
        await answer(scope, receive, send)

    def _find(self, path: str) -> tuple[APIRoute, KeyScope | None, dict[str, str]] | None:
        if path in self.paths:
            return *self.paths[path], {}
        for route, needed in self.patterns:
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


class ConditionalGet:
    """Middleware for HEAD requests and conditional GET requests.

    HEAD is answered like GET, but without a body. GET is answered with 304 if the client already
    has the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in READ_METHODS:
            await self.app(scope, receive, send)
            return
        method, if_none_match = scope["method"], list_header(scope, b"if-none-match")
        start: Message | None = None  # delayed, because the ETag depends on the body
        is_over = False

        async def send_part(message: Message) -> None:
            nonlocal start, is_over
            if message["type"] == "http.response.start":
                scope["method"] = method
                start = message
            elif start is not None:
                head, start = start, None
                _set_etag(head, message, if_none_match)
                is_over = head["status"] == 304 or method == "HEAD"
                await send(head)
                await send({"type": "http.response.body"} if is_over else message)
            elif not is_over:
                await send(message)

        scope["method"] = "GET"  # the method of routes
        try:
            await self.app(scope, receive, send_part)
        finally:
            scope["method"] = method


def _set_etag(start: Message, body: Message, if_none_match: str) -> None:
    """Set the answer's ETag. If the client has the answer, change the status to 304."""
    headers = MutableHeaders(raw=start["headers"])
    if start["status"] == 200 and not body.get("more_body"):
        headers.setdefault("etag", f'W/"{sha256(body["body"]).hexdigest()[:32]}"')
        headers.setdefault("cache-control", "private, no-cache")
    etag = headers.get("etag")
    if etag is not None and (if_none_match == "*" or etag.removeprefix("W/") in if_none_match):
        start["status"] = 304
        del headers["content-length"]
